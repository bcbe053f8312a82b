"""The quickstart for several seeds: accuracy before and after, wall time, and where the time of a step goes.

    python benchmarks/quickstart.py --seeds 42 1 2 --out /tmp/quickstart

Runs the shipped configuration through `examples/start_pipeline.py`, one process a seed, and prints the two tables of
`docs/benchmarks.md`. `--only-report` reads finished runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]


def run(seed: int, folder: Path, overrides: Sequence[str]) -> None:
    """Do one run; write its wall time from the command to the prompt to `wall.json`."""
    command = [sys.executable, str(ROOT / "examples" / "start_pipeline.py")]
    command += ["--config_path", str(ROOT / "examples" / "quickstart"), "--config_name", "rlvr_smollm2"]
    started = time.monotonic()
    subprocess.run([*command, f"seed={seed}", f"output_dir={folder}", *overrides], check=True)
    (folder / "wall.json").write_text(json.dumps(time.monotonic() - started))


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]


def accuracy_table(folders: dict[int, Path]) -> str:
    lines = ["| seed | sums | products | all | gain | steps | wall time |", "|---|---|---|---|---|---|---|"]
    for seed, folder in folders.items():
        rows = rows_of(folder)
        validated = [row for row in rows if "val/accuracy" in row]
        before, after = validated[0], validated[-1]
        cells = [
            f"{before[name]:.1%} -> {after[name]:.1%}"
            for name in ("val/sums/accuracy", "val/products/accuracy", "val/accuracy")
        ]
        gain = 100 * (after["val/accuracy"] - before["val/accuracy"])
        wall = json.loads((folder / "wall.json").read_text())
        lines.append(f"| {seed} | {' | '.join(cells)} | +{gain:.1f} points | {rows[-1]['step']:.0f} | {wall:.0f} s |")
    return "\n".join(lines)


def time_table(folders: dict[int, Path]) -> str:
    steps = [row for folder in folders.values() for row in rows_of(folder) if row["step"] > 0]
    names = ("time/step", "time/generate", "time/train_actor", "time/sync_weights", "time/credit", "time/controller")
    lines = ["| part of a step | median s | share of all steps |", "|---|---|---|"]
    total = sum(row["time/step"] for row in steps)
    for name in names:
        share = sum(row[name] for row in steps) / total
        lines.append(f"| `{name}` | {median(row[name] for row in steps):.3f} | {share:.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart for several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further keys")
    options = parser.parse_args()
    folders = {seed: options.out / f"seed{seed}" for seed in options.seeds}
    for seed, folder in folders.items():
        if not options.only_report:
            run(seed, folder, options.set)
    print(accuracy_table(folders))
    print()
    print(time_table(folders))


if __name__ == "__main__":
    main()
