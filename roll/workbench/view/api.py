"""The answers of the page's server, each a function of a request's parameters: docs/view.md lists them.

`Api.answer("/api/...", parameters)` is all there is, so that an exported page can take the same answers along.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from roll import __version__
from roll.tracking.rollouts import KINDS, SCHEMA_VERSION
from roll.workbench.view import episodes, overview
from roll.workbench.view.rows import NUMBERS, BadQuery, RowFilter, RowIndex, histogram, kind_of, number, page, records
from roll.workbench.view.runs import Run
from roll.workbench.view.spans import SPANS_FILE, SpanIndex

FILE = "config.yaml"
"""In the run's folder; secrets aren't in it."""
_LARGEST = 4 * 2**20
_LONGEST_VALUE = 2000


def settings(folder: Path) -> dict[str, str]:
    """Return the values of a run's configuration by their keys, as text; empty: it has kept none that can be read."""
    import yaml

    file = folder / FILE
    try:
        if not file.resolve().is_relative_to(folder) or file.stat().st_size > _LARGEST:
            return {}
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return dict(_flat(tree, "")) if isinstance(tree, Mapping) else {}


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        yield key, text[:_LONGEST_VALUE]


Parameters = Mapping[str, list[str]]
_PICTURES = (".png", ".jpg", ".jpeg", ".gif")
_MAX_ROWS = 500


class Api:
    """Answers requests about runs. Thread-safe."""

    def __init__(self, runs: list[Run], *, trace_url: str = "") -> None:
        """Answer about these runs; `trace_url` is where a trace is shown, with `{trace}` for its id."""
        self.runs = runs
        self._trace_url = trace_url
        self._spans = {run.number: SpanIndex(run.logs / SPANS_FILE) for run in runs}
        self._indexes = {run.number: RowIndex() for run in runs}
        self._of_run: dict[str, Callable[[Run, Parameters], Any]] = {
            "state": lambda run, _: run.state(),
            "events": lambda run, _: {"events": run.events()},
            "failures": lambda run, query: {"failures": run.failures()[: _integer(query, "limit", 50)]},
            "causes": lambda run, _: {"causes": overview.causes(self._indexes[run.number], run.rollouts)},
            "steps": lambda run, _: run.recorded(),
            "metrics": self._metrics,
            "rows": self._rows,
            "groups": self._groups,
            "episode": self._episode,
            "differences": self._differences,
            "task": self._task,
            "tasks": self._tasks,
            "pictures": self._pictures,
            "spans": lambda run, query: {"spans": self._spans[run.number].trace(_text(query, "trace"))},
            "traces": lambda run, _: {"traces": run.traces()},
            "config": lambda run, _: {"config": settings(run.folder)},
        }

    def answer(self, path: str, parameters: Parameters) -> Any:
        """Return what JSON is sent for a path below `/api/`. Raises `BadQuery`, `KeyError` for an unknown path."""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts == ["api", "runs"]:
            about = {"version": __version__, "schema": SCHEMA_VERSION, "trace_url": self._trace_url}
            return {**about, "runs": [self._run(run) for run in self.runs]}
        if parts == ["api", "version"]:
            return {"versions": [run.version() for run in self.runs]}
        if len(parts) == 4 and parts[:2] == ["api", "runs"] and parts[3] in self._of_run:
            return self._of_run[parts[3]](self.run(parts[2]), parameters)
        raise KeyError(path)

    def run(self, text: str) -> Run:
        """Return a run by its number. Raises `BadQuery`."""
        if text.isascii() and text.isdigit() and len(text) < 6 and int(text) < len(self.runs):
            return self.runs[int(text)]
        raise BadQuery(f"there is no run {text[:40]!r}; there are 0 to {len(self.runs) - 1}")

    def file(self, run: Run, text: str) -> Path:
        """Return a picture or profile of a run by its path in the run's folder. Raises `BadQuery` for others."""
        try:
            path = (run.folder / text).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadQuery("there is no such file in the run") from error
        # A run's folder holds more than what the page shows: keys, checkpoints, whatever an environment wrote.
        inside = path.is_relative_to(run.folder) and path.is_file()
        if not inside or not (path.suffix in _PICTURES or str(path.relative_to(run.folder)) in run.traces()):
            raise BadQuery("there is no such picture or profile in the run")
        return path

    def warm(self) -> None:
        """Read the small columns of all files, in a thread of its own."""

        def read() -> None:
            for run in self.runs:
                for kind in KINDS:
                    try:
                        self._indexes[run.number].table(run.rollouts, kind)
                    except BadQuery:
                        continue

        threading.Thread(target=read, name="index", daemon=True).start()

    def _run(self, run: Run) -> dict[str, Any]:
        state = run.state()
        return {
            "number": run.number,
            "name": run.name,
            "folder": str(run.folder),
            "about": run.about(),
            "status": state["status"],
            "step": state["step"],
            "metrics": sorted(run.curves.values),
            "recorded": run.recorded(),
        }

    def _metrics(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        with run.lock:
            run.curves.read()
            names = [name for name in parameters.get("name", ()) if name in run.curves.values]
            return {"steps": list(run.curves.steps), "values": {name: run.curves.column(name) for name in names}}

    def _rows(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        kind, index, folder = _kind(parameters), self._indexes[run.number], run.rollouts
        matches = index.matching(folder, kind, RowFilter.of(parameters))
        offset, limit = _integer(parameters, "offset", 0), min(_integer(parameters, "limit", 100), _MAX_ROWS)
        shown = page(matches, _text(parameters, "sort"), _text(parameters, "order"), offset, limit)
        bins = _text(parameters, "bins") or "reward"
        if bins not in NUMBERS:
            raise BadQuery(f"bins: there is no number {bins[:40]!r}; there are {', '.join(NUMBERS)}")
        return {"total": matches.num_rows, "rows": records(shown), "histogram": histogram(matches[bins])}

    def _groups(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        kind, index, wanted = _kind(parameters), self._indexes[run.number], RowFilter.of(parameters)
        folder = _rollouts(run)
        groups = episodes.groups(
            index,
            folder,
            kind,
            wanted,
            sort=_text(parameters, "sort") or "recorded",
            order=_text(parameters, "order"),
            offset=_integer(parameters, "offset", 0),
            limit=min(_integer(parameters, "limit", 20), 100),
        )
        rows = index.matching(folder, kind, wanted)
        table = index.table(folder, kind, wanted.step)
        values = {name: sorted(set(table[name].to_pylist()) - {None, ""}) for name in ("status", "domain", "tag")}
        return {**groups, "rows": rows.num_rows, "histogram": histogram(rows["reward"]), "values": values}

    def _episode(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        step, row = _integer(parameters, "step", None), _integer(parameters, "row", None)
        episode = episodes.episode(self._indexes[run.number], _rollouts(run), _kind(parameters), step, row)
        return {**episode, "pictures": self._pictures(run, {"task": [episode["task_id"] or ""]})["pictures"]}

    def _differences(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        step, limit = _integer(parameters, "step", None), _integer(parameters, "limit", 50)
        return episodes.differences(self._indexes[run.number], _rollouts(run), _kind(parameters), step, limit)

    def _task(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        return {"rows": episodes.same_task(self._indexes[run.number], _rollouts(run), _text(parameters, "task"), KINDS)}

    def _tasks(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        return {"tasks": overview.tasks(self._indexes[run.number], run.rollouts, _kind(parameters))}

    def _pictures(self, run: Run, parameters: Parameters) -> dict[str, Any]:
        """Return the pictures of a task's episodes, with the steps after which they were drawn."""
        configured, task = run.about().get("pictures"), _text(parameters, "task")
        if not isinstance(configured, str) or not task:
            return {"pictures": []}
        root = (run.logs / configured).resolve()
        pictures = []
        if root.is_relative_to(run.folder):
            for folder in sorted(root.glob("step-*")):
                picture = (folder / task / "episode.png").resolve()
                if picture.is_relative_to(root) and picture.is_file():
                    pictures.append({"step": folder.name[5:], "path": str(picture.relative_to(run.folder))})
        return {"pictures": pictures}


def _rollouts(run: Run) -> Path:
    folder = run.rollouts
    if folder is None:
        raise BadQuery(f"{run.name} has no rollouts; have a run record them: rollout_dump_dir=<output_dir>/rollouts")
    return folder


def _text(parameters: Parameters, name: str) -> str:
    return parameters.get(name, [""])[-1]


def _kind(parameters: Parameters) -> Any:
    return kind_of(_text(parameters, "kind") or "train")


def _integer(parameters: Parameters, name: str, default: int | None) -> Any:
    if name not in parameters:
        if default is None:
            raise BadQuery(f"{name}: it is missing")
        return default
    value = number(name, parameters[name][-1])
    if value != int(value) or value < 0:
        raise BadQuery(f"{name}: {parameters[name][-1][:40]!r} is no whole number")
    return int(value)
