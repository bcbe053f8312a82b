"""The page as one file: its own scripts and styles, and the answers that it would ask the server for.

The file has a content security policy of its own, which names its two scripts by their hashes: text of a model stands
in it as data, and no other script runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from roll.tracking.rollouts import KINDS
from roll.workbench.view.api import Api
from roll.workbench.view.rows import BadQuery
from roll.workbench.view.server import STATIC, THIRD_PARTY
from roll.workbench.view.spans import trace_id

ENTRY = "app.js"
_MAX_PICTURE_BYTES = 2_000_000
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)


def export_page(api: Api, file: Path, *, episodes: int, steps: list[int] | None = None) -> int:
    """Write the page with a sample of episodes, whole steps of each kind; returns how many episodes it has.

    Args:
        episodes: at most so many; a step that doesn't fit is left out, but for the last one of each run and kind.
        steps: which to take; None: spread over the run, the last one first.

    Raises:
        ValueError: a step that was asked for isn't recorded in any run.
    """
    chosen = _chosen(api, episodes, steps)
    answers: dict[str, Any] = {}
    pictures: dict[str, str] = {}
    _ask(api, answers, "/api/runs")
    for run in answers["/api/runs"]["runs"]:
        run["folder"] = ""  # of this machine, and nobody else's business
        own = {
            kind: sorted(step for number, of, step in chosen if number == run["number"] and of == kind)
            for kind in KINDS
        }
        run["recorded"] = own
        base = f"/api/runs/{run['number']}"
        answers[f"{base}/traces"] = {"traces": []}  # they stay with the run
        for name in ("state", "events", "causes", "config"):
            _ask(api, answers, f"{base}/{name}")
        _ask(api, answers, f"{base}/failures", limit=50)
        answers[f"{base}/metrics"] = api.answer(f"{base}/metrics", {"name": run["metrics"]})
    count = sum(_add_step(api, answers, pictures, *one) for one in chosen)
    _add_tasks(answers)
    for run in answers["/api/runs"]["runs"]:
        base = f"/api/runs/{run['number']}"
        for kind in KINDS:
            tasks = _ask(api, answers, f"{base}/tasks", kind=kind)["tasks"]
            tasks[:] = [one for one in tasks if f"{base}/task?{urlencode({'task': one['task_id']})}" in answers]
    _write(file, {"answers": answers, "pictures": pictures})
    return count


def _chosen(api: Api, episodes: int, steps: list[int] | None) -> list[tuple[int, Any, int]]:
    """Return (run, kind, step) of what the file has."""
    there = [(run.number, kind, step) for run in api.runs for kind in KINDS for step in run.recorded()[kind]]
    if steps is not None:
        if missing := [step for step in steps if step not in {step for _, _, step in there}]:
            raise ValueError(f"--steps: no run has recorded step {missing[0]}")
        there = [one for one in there if one[2] in steps]
    chosen: list[tuple[int, Any, int]] = []
    left = episodes
    for number in range(len(api.runs)):
        for kind in KINDS:
            own = _spread([step for of, named, step in there if of == number and named == kind])
            for index, step in enumerate(own):
                size = api.answer(f"/api/runs/{number}/rows", {"kind": [kind], "step": [str(step)], "limit": ["1"]})[
                    "total"
                ]
                if size <= left or index == 0:
                    chosen.append((number, kind, step))
                    left -= size
    return chosen


def _spread(steps: list[int]) -> list[int]:
    """Return steps so that the first few are spread over all: the last, the first, the middle, the quarters."""
    order, chosen = [len(steps) - 1, 0] if steps else [], []
    parts = 2
    while len(order) < 4 * len(steps) and parts <= 2 * len(steps):
        order += [len(steps) * i // parts for i in range(1, parts, 2)]
        parts *= 2
    for index in [*order, *range(len(steps))]:
        if steps[index] not in chosen:
            chosen.append(steps[index])
    return chosen


def _add_step(api: Api, answers: dict[str, Any], pictures: dict[str, str], number: int, kind: str, step: int) -> int:
    base, about = f"/api/runs/{number}", {"kind": kind, "step": step}
    for name in ("rows", "groups"):
        _ask_all(api, answers, f"{base}/{name}", about, name)
    if kind == "train":
        address = f"{base}/differences?{urlencode({'step': step, 'limit': 100})}"
        answers[address] = api.answer(f"{base}/differences", {"step": [str(step)], "limit": ["100"]})
    rows = answers[f"{base}/rows?{urlencode(about)}"]["rows"]
    for row in rows:
        episode = _ask(api, answers, f"{base}/episode", **about, row=row["row"])
        if trace := trace_id(episode["trace"] or ""):
            _ask(api, answers, f"{base}/spans", trace=trace)
        for picture in episode["pictures"]:
            path = api.file(api.run(str(number)), picture["path"])
            if path.stat().st_size <= _MAX_PICTURE_BYTES:
                content = base64.b64encode(path.read_bytes()).decode()
                pictures[f"{number}/{picture['path']}"] = f"data:image/png;base64,{content}"
    return len(rows)


def _ask_all(api: Api, answers: dict[str, Any], path: str, about: dict[str, Any], name: str) -> None:
    """Take every page of a list along as one answer."""
    parameters = {key: [str(value)] for key, value in about.items()}
    limit = {"rows": 500, "groups": 100}[name]
    answer = api.answer(path, {**parameters, "limit": [str(limit)]})
    while len(answer[name]) < answer["total"]:
        more = api.answer(path, {**parameters, "limit": [str(limit)], "offset": [str(len(answer[name]))]})
        answer[name] += more[name]
    answers[f"{path}?{urlencode(about)}"] = answer


def _add_tasks(answers: dict[str, Any]) -> None:
    """Add where each task is found, of the episodes that the file has."""
    by_task: dict[tuple[str, str], list[Any]] = {}
    for address, answer in list(answers.items()):
        base, _, query = address.partition("/rows?")
        if query:
            kind = re.match(r"kind=(\w+)", query)
            for row in answer["rows"]:
                by_task.setdefault((base, row["task_id"]), []).append({**row, "kind": kind[1] if kind else "train"})
    for (base, task), rows in by_task.items():
        answers[f"{base}/task?{urlencode({'task': task})}"] = {"rows": rows}


def _ask(api: Api, answers: dict[str, Any], path: str, **query: Any) -> Any:
    try:
        answer = api.answer(path, {name: [str(value)] for name, value in query.items()})
    except BadQuery as error:
        raise ValueError(str(error)) from error
    answers[path + (f"?{urlencode(query)}" if query else "")] = answer
    return answer


def bundle() -> str:
    """Return the page's modules as one script, each after those that it imports.

    Their top-level names must differ, which a test watches: they share one scope here.
    """
    order: list[str] = []

    def add(name: str) -> None:
        if name not in order:
            for other in _IMPORT.findall((STATIC / name).read_text(encoding="utf-8")):
                add(other)
            order.append(name)

    add(ENTRY)
    texts = [_IMPORT.sub("", (STATIC / name).read_text(encoding="utf-8")) for name in order]
    return "\n".join(
        re.sub(r"^export (?=(async )?function|const|class)", "", text, flags=re.MULTILINE) for text in texts
    )


def _write(file: Path, recorded: dict[str, Any]) -> None:
    plots = (THIRD_PARTY / "uplot" / "uPlot.iife.min.js").read_text(encoding="utf-8")
    styles = (THIRD_PARTY / "uplot" / "uPlot.min.css").read_text(encoding="utf-8")
    styles += (STATIC / "style.css").read_text(encoding="utf-8")
    scripts = bundle()
    policy = (
        f"default-src 'none'; script-src {_hash(plots)} {_hash(scripts)}; style-src {_hash(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # In a script element only a tag ends the data, so none may stand in it.
    data = json.dumps(recorded, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', head)
    page = re.sub(r'<link rel="stylesheet" href="third_party[^>]*>\n', "", page)
    page = page.replace('<link rel="stylesheet" href="style.css">', f"<style>{styles}</style>")
    page = re.sub(r'<script src="third_party[^>]*></script>\n', "", page)
    page = page.replace('<script type="module" src="app.js"></script>\n', "")
    body = f'<script type="application/json" id="recorded">{data}</script>\n<script>{plots}</script>\n'
    body += f'<script type="module">{scripts}</script>\n</body>'
    page = "".join([page.partition("</body>")[0], body, page.partition("</body>")[2]])
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(file)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HERE = Path(__file__).parent / "demo"
DEMOS = {"quickstart": ("quickstart",), "agentic": ("dial", "dial-collapsed")}
"""Folders by the name of the demo. The agentic one is a game whose environment has a fault, learned twice: as it should
be, and with a learning rate so high that the policy collapses."""


def demo_runs(name: str = "quickstart") -> list[Path]:
    """Return the folders of a demo's runs."""
    return [HERE / folder for folder in DEMOS[name]]
