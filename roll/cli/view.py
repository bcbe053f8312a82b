"""`roll view`: a page of recorded runs in the browser, or as one file."""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from roll.cli.exits import Exit
from roll.utils.terminal import say

if TYPE_CHECKING:
    from roll.workbench.view.api import Api

NEEDS = ("starlette", "uvicorn")
FORMATS = (".html", ".eval", ".json")


def view(options: argparse.Namespace) -> int:
    """Serve the page until it is interrupted, or write it."""
    from roll.workbench.view.api import Api
    from roll.workbench.view.export import demo_runs
    from roll.workbench.view.runs import named_runs

    folders: list[Path] = [*options.runs, *(demo_runs(options.demo) if options.demo else [])]
    if not folders:
        raise ValueError("which run? roll view RUN [RUN2 ...], or roll view --demo for a recorded one")
    url = options.trace_url
    if url and not (url.startswith(("http://", "https://")) and "{trace}" in url):
        raise ValueError(
            f"--trace_url {url!r} is no address with {{trace}} in it, such as http://localhost:16686/trace/{{trace}} "
            "of Jaeger"
        )
    api = Api(named_runs(folders), trace_url=url)
    if options.export is not None or options.trackio is not None:
        return _export(api, options)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"roll view needs {' and '.join(missing)}, which isn't installed: pip install 'roll-rl[view]'")
    from roll.workbench.view.server import serve
    from roll.workbench.view.visitors import is_loopback, users_are_known

    by_user = is_loopback(options.host) and users_are_known()

    def ready(address: str) -> None:
        say(f"{', '.join(run.name for run in api.runs)}: {address}")
        say("Ctrl-C ends it; the runs don't notice.")
        if options.open:
            webbrowser.open(address)

    token = secrets.token_urlsafe(24)
    serve(api, host=options.host, port=options.port, token=token, by_user=by_user, ready=ready)
    return Exit.DONE


def _export(api: Api, options: argparse.Namespace) -> int:
    from roll.workbench.view.export import export_page
    from roll.workbench.view.inspect_log import write_inspect_log
    from roll.workbench.view.trackio_traces import write_trackio_traces
    from roll.workbench.view.transcripts import choose

    file: Path | None = options.export
    if options.episodes < 1:
        raise ValueError(f"--episodes {options.episodes}: give a number from 1")
    if file is not None and file.suffix not in FORMATS:
        raise ValueError(f"--export {file}: the end of its name says the format; known are {', '.join(FORMATS)}")
    if options.trackio is not None and importlib.util.find_spec("trackio") is None:
        raise ValueError("--trackio needs the package trackio, which isn't installed: pip install trackio")
    if file is not None and file.suffix == ".html":
        count = export_page(api, file, episodes=options.episodes, steps=options.steps)
        say(f"{file}: {count} episodes, {_mib(file)}; it opens from disk, without a network")
    if options.trackio is None and (file is None or file.suffix == ".html"):
        return Exit.DONE
    chosen = choose(api, kind=options.kind, steps=options.steps, most=options.episodes)
    more = f"; {chosen.left_out} more are left out (--episodes {options.episodes})" if chosen.left_out else ""
    if file is not None and file.suffix != ".html":
        write_inspect_log(chosen, file)
        reader = f"inspect view --log-dir {file.parent}" if file.suffix == ".eval" else "for Inspect's read_eval_log"
        say(f"{file}: {len(chosen.rows)} episodes, {_mib(file)}; {reader}{more}")
    if options.trackio is not None:
        write_trackio_traces(chosen, options.trackio)
        say(f"{len(chosen.rows)} traces; trackio show --project {options.trackio}{more}")
    return Exit.DONE


def _mib(file: Path) -> str:
    return f"{file.stat().st_size / 2**20:.1f} MiB"
