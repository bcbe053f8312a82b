"""`roll profile`: where each second of a run's steps went, in plain text."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.api.launch import stored_config
from roll.cli.exits import Exit
from roll.cli.plot import rows_of
from roll.pipelines.run.stored_config import CONFIG_FILE, run_directory
from roll.tracking.profiling.chrome import label
from roll.tracking.profiling.recorder import PROFILER
from roll.tracking.timing import OUTSIDE_STEP

_SUFFIX = ".summary.json"
_NOT_PHASES = {"controller", "controller_share", "step"}


def profile(options: argparse.Namespace) -> int:
    """Print the phases of all steps by the run's metrics, then each profiled step."""
    folder = options.run_folder.resolve()
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(options.run_folder)!r}; give the output_dir of a run")
    summaries = summaries_of(profiles_of(folder), options.step)
    parts = [] if options.step is not None else [timings(rows_of(folder))]
    parts += [step_table(summary, top=options.top) for summary in summaries]
    if not summaries:
        parts.append("no step was profiled; profile_steps=[2] records phases, calls and operators of the second step")
    sys.stdout.write("\n\n".join(parts) + "\n")
    return Exit.DONE


def profiles_of(run: Path) -> Path:
    """Return the folder of a run's profiles: where its configuration says, seen from where the folder is now."""
    usual = run / "logs" / "profiler"
    if usual.is_dir() or not (run / CONFIG_FILE).is_file():
        return usual
    return run_directory(run) / stored_config(run).profiler_path


def summaries_of(folder: Path, step: int | None) -> list[dict[str, Any]]:
    """Return the numbers of the profiled steps, or of one; raises `ValueError` where that one wasn't profiled."""
    summaries = []
    for file in sorted(folder.glob(f"step-*{_SUFFIX}")):
        try:
            summaries.append({**json.loads(file.read_text(encoding="utf-8")), "folder": str(folder)})
        except ValueError as error:
            raise ValueError(f"{file} can't be read: {error}") from error
    if step is None:
        return summaries
    chosen = [summary for summary in summaries if summary["step"] == step]
    if not chosen:
        there = ", ".join(str(summary["step"]) for summary in summaries) or "none"
        raise ValueError(f"--step: {folder} has no profile of step {step}; profiled steps: {there}")
    return chosen


def timings(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the median seconds of each phase over all steps, as the metrics have them."""
    steps = [row for row in rows if "time/step" in row]
    if not steps:
        return "no step has ended yet"
    own: dict[str, list[float]] = {}
    for row in steps:
        for phase, seconds in own_seconds(row).items():
            own.setdefault(phase, []).append(seconds)
    total = sum(row["time/step"] for row in steps)
    cells = [
        (phase, f"{statistics.median(times):.3f}", f"{sum(times):.2f}",
         "between" if phase in OUTSIDE_STEP else _share(sum(times), total), str(len(times)))
        for phase, times in sorted(own.items(), key=lambda item: -sum(item[1]))
    ]  # fmt: skip
    median = statistics.median(row["time/step"] for row in steps)
    head = f"{len(steps)} steps, {median:.3f} s each (median); seconds of a phase without those of phases inside it"
    return f"{head}\n{_table(('phase', 'median s', 'sum s', 'of steps', 'times'), cells)}"


def own_seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's seconds by phase, without those of phases inside; what no phase has is `outside any phase`."""
    seconds = {}
    for name, value in row.items():
        phase = name.removeprefix("time/")
        if name.startswith("time/") and "/" not in phase and phase not in _NOT_PHASES:
            seconds[phase] = float(row.get(f"{name}/self", value))
    return {**seconds, "outside any phase": float(row.get("time/step/self", row["time/step"]))}


def step_table(summary: Mapping[str, Any], *, top: int) -> str:
    """Return one profiled step: phases, then calls and operators of each rank."""
    seconds = summary["seconds"]
    head = f"step {summary['step']}, profiled: {seconds:.3f} s. {summary['folder']}/{summary['file']}: ui.perfetto.dev"
    cells = [
        ("  " * max(0, row["depth"] - 1) + row["name"], f"{row['own_seconds']:.3f}", f"{row['seconds']:.3f}",
         _share(row["own_seconds"], seconds), str(row["count"]))
        for row in summary["phases"]
    ]  # fmt: skip
    parts = [f"{head}\n{_table(('phase', 'own s', 's', 'own share', 'times'), cells)}"]
    parts += [_rank(track, rank, seconds, top) for track, rank in summary["ranks"].items()]
    if summary["dropped_spans"]:
        parts.append(f"{summary['dropped_spans']} spans beyond the limit of a log are missing")
    return "\n\n".join(parts)


def _rank(track: str, rank: Mapping[str, Any], seconds: float, top: int) -> str:
    calls = [
        (row["name"], str(row["count"]), f"{row['seconds']:.3f}", _share(row["seconds"], seconds),
         f"{row['longest']:.3f}", "" if row["rss_mib"] is None else f"{row['rss_mib']:.0f}")
        for row in rank["calls"]
    ]  # fmt: skip
    parts = [
        f"{label(track)} on {rank['host']}",
        _table(("call", "times", "s", "of step", "longest", "MiB after"), calls),
    ]
    called = sum(row["seconds"] for row in rank["calls"] if row["name"] != PROFILER)
    for kind in ("operators", "kernels"):
        if rows := rank.get(kind, [])[:top]:
            cells = [
                (row["name"][:60], str(row["calls"]), f"{row['own_seconds']:.4f}",
                 _share(row["own_seconds"], called), f"{row['seconds']:.4f}")
                for row in rows
            ]  # fmt: skip
            parts.append(_table((kind[:-1], "times", "own s", "of calls", "s"), cells))
    for key, what in (("cut_events", "events were too short for the file"), ("unwatched_calls", "calls unwatched")):
        if rank.get(key):
            parts.append(f"{rank[key]} {what}")
    return "\n".join(parts)


def _share(part: float, total: float) -> str:
    return f"{part / total:.1%}" if total > 0 else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        _, *rest = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join((row[0].ljust(widths[0]), *rest)).rstrip())
    return "\n".join(lines)
