"""`roll view`: a page of recorded runs in the browser, or as one file."""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import webbrowser
from pathlib import Path

from roll.cli.exits import Exit, say

NEEDS = ("starlette", "uvicorn")


def view(options: argparse.Namespace) -> int:
    """Serve the page until it is interrupted, or write it."""
    from roll.view.api import Api
    from roll.view.demo import demo_runs
    from roll.view.runs import named_runs

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
    if options.export is not None:
        return _export(api, options)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"roll view needs {' and '.join(missing)}, which isn't installed: pip install 'roll-rl[view]'")
    from roll.view.server import is_loopback, serve

    token = None if is_loopback(options.host) else secrets.token_urlsafe(24)

    def ready(address: str) -> None:
        say(f"{', '.join(run.name for run in api.runs)}: {address}")
        say("Ctrl-C ends it; the runs don't notice.")
        if options.open:
            webbrowser.open(address)

    serve(api, host=options.host, port=options.port, token=token, ready=ready)
    return Exit.DONE


def _export(api: object, options: argparse.Namespace) -> int:
    from roll.view.api import Api
    from roll.view.export import export_page

    assert isinstance(api, Api)
    exported = export_page(api, options.export, episodes=options.episodes, steps=options.steps)
    size = options.export.stat().st_size / 2**20
    say(f"{options.export}: {exported} episodes, {size:.1f} MiB; it opens from disk, without a network")
    return Exit.DONE
