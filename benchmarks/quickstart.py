"""The quickstart for several seeds: accuracy before and after, wall time, and where the time of a step goes.

    python benchmarks/quickstart.py --seeds 42 1 2 --out /tmp/quickstart
    python benchmarks/quickstart.py --seeds 42 --out /tmp/quickstart --memory --set max_steps=2 save_steps=2

Runs the shipped configuration through `examples/start_pipeline.py`, one process a seed, and prints the tables of
`docs/benchmarks.md`. `--memory` adds the peak of each phase: the proportional set size (PSS) of all processes, read ten
times a second, and the phases by the run's own spans. `--only-report` reads finished runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


PHASES = ("generate", "train_actor", "sync_weights", "validate", "save", "export")
MIB = 2**20


def run(seed: int, folder: Path, overrides: Sequence[str], *, memory: bool) -> None:
    """Do one run; write its wall time from the command to the prompt to `wall.json`, its memory to `memory.json`."""
    command = [sys.executable, str(ROOT / "examples" / "start_pipeline.py")]
    command += ["--config_path", str(ROOT / "examples" / "quickstart"), "--config_name", "rlvr_smollm2"]
    command += [f"seed={seed}", f"output_dir={folder}", *overrides, *(["tracing.enabled=true"] * memory)]
    started = time.monotonic()
    with subprocess.Popen(command) as process:
        samples = sampled(process) if memory else []
        code = process.wait()
    if code:
        raise subprocess.CalledProcessError(code, command)
    (folder / "wall.json").write_text(json.dumps(time.monotonic() - started))
    if memory:
        (folder / "memory.json").write_text(json.dumps(samples))


def sampled(process: subprocess.Popen[bytes]) -> list[tuple[int, int, int]]:
    """Return (time in ns, bytes of the process, bytes of all that it has started) until it ends."""
    samples, main = [], psutil.Process(process.pid)
    while process.poll() is None:
        mine, others = proportional(main), 0
        with contextlib.suppress(psutil.Error):
            others = sum(map(proportional, main.children(recursive=True)))
        samples.append((time.time_ns(), mine, others))
        time.sleep(0.1)
    return samples


def proportional(process: psutil.Process) -> int:
    """Return the proportional set size of a process; 0 once it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]


def accuracy_table(folders: dict[int, Path]) -> str:
    lines = ["| seed | sums | products | all | gain | steps | wall time |", "|---|---|---|---|---|---|---|"]
    for seed, folder in folders.items():
        rows = rows_of(folder)
        validated = [row for row in rows if "val/accuracy" in row]
        cells = ["not validated"] * 4
        if validated:
            before, after = validated[0], validated[-1]
            names = ("val/sums/accuracy", "val/products/accuracy", "val/accuracy")
            cells = [f"{before[name]:.1%} -> {after[name]:.1%}" for name in names]
            cells.append(f"{100 * (after['val/accuracy'] - before['val/accuracy']):+.1f} points")
        wall = json.loads((folder / "wall.json").read_text())
        lines.append(f"| {seed} | {' | '.join(cells)} | {rows[-1]['step']:.0f} | {wall:.0f} s |")
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


def memory_table(folders: dict[int, Path]) -> str:
    lines = ["| phase | all processes, MiB | of it the main one |", "|---|---|---|"]
    peaks: dict[str, tuple[int, int]] = {}
    for folder in folders.values():
        spans = [span for line in (folder / "logs" / "spans.jsonl").read_text().splitlines() for span in spans_of(line)]
        for now, mine, others in json.loads((folder / "memory.json").read_text()):
            inside = [name for name, start, end in spans if name in PHASES and start <= now <= end]
            phase = inside[-1] if inside else "start, and between"
            peaks[phase] = max(peaks.get(phase, (0, 0)), (mine + others, mine))
    for phase, (everything, mine) in sorted(peaks.items(), key=lambda item: item[1]):
        lines.append(f"| `{phase}` | {everything / MIB:,.0f} | {mine / MIB:,.0f} |")
    return "\n".join(lines)


def spans_of(line: str) -> list[tuple[str, int, int]]:
    """Return (name, begin, end in ns) of the spans in a line of `spans.jsonl`."""
    spans: list[dict[str, Any]] = [
        span for each in json.loads(line)["resourceSpans"] for scope in each["scopeSpans"] for span in scope["spans"]
    ]
    return [(span["name"], int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])) for span in spans]


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart for several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("--memory", action="store_true", help="also the peak of each phase")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further keys")
    options = parser.parse_args()
    folders = {seed: options.out / f"seed{seed}" for seed in options.seeds}
    for seed, folder in folders.items():
        if not options.only_report:
            run(seed, folder, options.set, memory=options.memory)
    print(accuracy_table(folders))
    print()
    print(time_table(folders))
    if options.memory:
        print()
        print(memory_table(folders))


if __name__ == "__main__":
    main()
