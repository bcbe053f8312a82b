"""`roll plot`: the learning curves of one run or several, from their `metrics.jsonl`."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.cli.exits import Exit
from roll.tracking.jsonl import METRICS_FILE
from roll.tracking.steplines import read_steps
from roll.utils.terminal import say

PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "held-out accuracy": ("val/accuracy", "val/token_accuracy"),
    "held-out reward": ("val/reward",),
    "KL to the reference, or to the policy before": ("kl/reference", "actor/ppo_kl"),
    "entropy": ("actor/entropy",),
    "response length (tokens)": ("response/length_mean",),
    "loss": ("sft/loss", "preference/loss", "actor/loss"),
    "reward margin": ("val/margin", "preference/margin"),
}
"""Title of a panel -> the metrics of which it shows the first that a run has."""
SUFFIXES = (".png", ".svg", ".pdf")


def plot(options: argparse.Namespace) -> int:
    """Write the picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("roll plot needs matplotlib, which isn't installed: pip install 'matplotlib>=3.10,<4'")
    if options.output.suffix not in SUFFIXES:
        raise ValueError(f"-o: {options.output}: expected a name that ends in {', '.join(SUFFIXES)}")
    runs = {str(folder): rows_of(folder) for folder in options.runs}
    wanted = {name: (name,) for name in options.metric} if options.metric else PANELS
    panels = {title: lines for title, names in wanted.items() if (lines := lines_of(runs, names))}
    if not panels:
        known = sorted({name for rows in runs.values() for row in rows for name in row} - {"step"})
        raise ValueError(f"none of these metrics is there: {', '.join(wanted)}; the runs have {', '.join(known[:40])}")
    draw(panels, options.output)
    say(f"{len(panels)} curves of {len(runs)} run(s) in {options.output}")
    return Exit.DONE


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run, by its folder or that of its logs; raise `ValueError` where there are none."""
    files = [folder / "logs" / METRICS_FILE, folder / METRICS_FILE]
    file = next((candidate for candidate in files if candidate.is_file()), None)
    if file is None:
        what = "has no logs/metrics.jsonl; is it the output_dir of a run, and is jsonl in its track_with?"
        raise ValueError(f"{folder} {what}" if folder.is_dir() else f"there is no folder {str(folder)!r}")
    rows = read_steps(file)
    if not rows:
        raise ValueError(f"{file} has no rows yet")
    return rows


def lines_of(runs: dict[str, list[dict[str, Any]]], names: Sequence[str]) -> dict[str, tuple[list[int], list[float]]]:
    """Return by label the steps and values of the first of these metrics that each run has."""
    lines = {}
    for run, rows in runs.items():
        name = next((name for name in names if any(name in row for row in rows)), None)
        if name is not None:
            points = [(row["step"], float(row[name])) for row in rows if name in row]
            label = name if len(runs) == 1 else run if len(names) == 1 else f"{run} ({name})"
            lines[label] = ([step for step, _ in points], [value for _, value in points])
    return lines


def draw(panels: dict[str, dict[str, tuple[list[int], list[float]]]], output: Path) -> None:
    """Draw a panel for each entry, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, number)
        for label, (steps, values) in lines.items():
            axes.plot(steps, values, label=label, marker="." if len(steps) < 40 else None)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
