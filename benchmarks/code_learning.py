"""Does a small model learn to write programs from their tests, or to use a tool? Whole runs with several seeds.

    pip install matplotlib
    python benchmarks/code_learning.py --seeds 1 2 3 --plot docs/learning/code.png
    python benchmarks/code_learning.py --example tools --seeds 1 2 3 --plot docs/learning/tools.png

Each seed is two commands, the warm start and the training. Finished runs below `--output` aren't run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = ROOT / "examples" / "start_pipeline.py"


@dataclass(frozen=True)
class Example:
    """A folder of examples/ with a warm start and a training that goes on from it."""

    folder: str
    warm: str
    training: str
    title: str


EXAMPLES = {
    "code": Example("code", "sft_tiny_programs", "rlvr_tiny_programs", "Tiny programs"),
    "tools": Example("tools", "sft_maths", "rlvr_maths", "Sums with the tool python"),
}


@dataclass(frozen=True)
class Curve:
    """One run: the share of held-out tasks that a sampled response solves, by step."""

    seed: int
    steps: list[int]
    solved: list[float]
    minutes: float


def run(example: Example, seed: int, folder: Path, warm_steps: int | None, settings: Sequence[str]) -> Curve:
    """Run one seed, unless it is finished, and read its log."""
    warm, trained, done = folder / "sft", folder / "rl", folder / "seconds.json"
    if not done.is_file():
        begun = time.monotonic()
        shorter = [] if warm_steps is None else [f"max_steps={warm_steps}"]
        start(example.folder, example.warm, f"seed={seed}", f"output_dir={warm}", *shorter)
        start(
            example.folder,
            example.training,
            f"seed={seed}",
            f"output_dir={trained}",
            f"pretrain={warm}/hf_model",
            f"actor_train.data_args.file_name={warm}/tasks.jsonl",
            f"validation.data_args.file_name={warm}/held_out.jsonl",
            *settings,
        )
        done.write_text(json.dumps(time.monotonic() - begun))
    lines = (trained / "logs" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "val/accuracy" in row]
    seconds = json.loads(done.read_text())
    return Curve(seed, [row["step"] for row in rows], [row["val/accuracy"] for row in rows], seconds / 60)


def start(folder: str, name: str, *settings: str) -> None:
    """Run one configuration of an example."""
    command = [sys.executable, str(START), "--config_path", str(ROOT / "examples" / folder), "--config_name", name]
    subprocess.run([*command, "track_with=jsonl", *settings], check=True)


def table(curves: Sequence[Curve]) -> str:
    """Return the runs as a Markdown table."""
    lines = ["| seed | warm start | trained | gain | minutes |", "|---|---|---|---|---|"]
    for curve in curves:
        first, last = curve.solved[0], curve.solved[-1]
        gain = f"{100 * (last - first):+.1f} points"
        lines.append(f"| {curve.seed} | {first:.1%} | {last:.1%} | {gain} | {curve.minutes:.1f} |")
    return "\n".join(lines)


def plot(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draw the share of solved tasks over training steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=120)
    for curve in curves:
        axes.plot(curve.steps, [100 * s for s in curve.solved], marker="o", markersize=3, label=f"seed {curve.seed}")
    axes.set(xlabel="training step (0: warm start)", ylabel="held-out tasks solved, %", title=title)
    axes.set(ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--example", choices=EXAMPLES, default="code", help="what is learnt (default: code)")
    parser.add_argument("--output", type=Path, help="folder of the runs (default: output/learning/<example>)")
    parser.add_argument("--plot", type=Path, help="a PNG file to draw the curves to")
    parser.add_argument("--warm-steps", type=int, help="steps of the warm start (default: as its file says)")
    parser.add_argument("--set", nargs="*", default=[], help="key=value for the training, e.g. max_steps=80")
    options = parser.parse_args()
    example, output = EXAMPLES[options.example], options.output or Path("output/learning") / options.example
    curves = [run(example, seed, output / str(seed), options.warm_steps, options.set) for seed in options.seeds]
    print(table(curves))
    if options.plot:
        plot(curves, example.title, options.plot)


if __name__ == "__main__":
    main()
