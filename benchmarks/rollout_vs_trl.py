"""A whole GRPO step, generation to optimizer, against TRL's `GRPOTrainer` on the same task.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -r benchmarks/requirements-trl.txt
    python benchmarks/rollout_vs_trl.py --trl-python /tmp/trl/bin/python                # responses of one length
    python benchmarks/rollout_vs_trl.py --trl-python /tmp/trl/bin/python --mean-length 64   # few are long

Each side is one process for the whole run, and the sides take turns on the same machine. A round is one step of each,
then the parts of our step by themselves (`bare`). The report has medians over the rounds, and medians of each round's
ratios. Start-up and the first steps are left out. Processor seconds are those of a side's own process. They are more
reliable than wall time on a busy machine, but they miss engines in processes of their own (vLLM).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from trl_task import Task, write_files  # noqa: E402 - beside this file

START_SECONDS = 300.0
STEP_SECONDS = 600.0


class Side:
    """A process that takes steps when told to."""

    def __init__(self, name: str, python: str, script: str, task: Task, folder: Path, extra: list[str]) -> None:
        self.name = name
        address = str(folder / f"{name}.socket")
        environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads),
                       "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        command = [python, str(HERE / script), "--folder", str(folder), "--address", address]
        self._log = (folder / f"{name}.log").open("w+")
        with Listener(address, family="AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [*command, "--task", json.dumps(asdict(task)), *extra],
                env=environment,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            self._connection: Connection = self._accept(listener)
        self.threads = self._answer(START_SECONDS)["threads"]

    def _accept(self, listener: Listener) -> Connection:
        listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
        try:
            return listener.accept()
        except TimeoutError:
            raise RuntimeError(self._failure(f"{self.name} didn't start in {START_SECONDS:.0f} s")) from None

    def _answer(self, timeout: float) -> dict[str, Any]:
        waited = 0.0
        while not self._connection.poll(1.0):
            waited += 1.0
            if self._process.poll() is not None or waited > timeout:
                raise RuntimeError(self._failure(f"{self.name} gave no answer in {waited:.0f} s"))
        try:
            answer: dict[str, Any] = self._connection.recv()
        except EOFError:
            raise RuntimeError(self._failure(f"{self.name} ended")) from None
        return answer

    def _failure(self, what: str) -> str:
        self._log.seek(0)
        return f"{what}; the end of its output:\n{self._log.read()[-3000:]}"

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return its figures."""
        self._connection.send(command)
        return self._answer(STEP_SECONDS)

    def close(self) -> None:
        """End the process."""
        try:
            self._connection.send("stop")
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._log.close()


def measure(options: argparse.Namespace, task: Task, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of every round, by `trl`, `ours` and `bare`."""
    write_files(folder, task)
    per_device = str(options.trl_per_device or task.rows)
    cache = ["--cache", options.trl_cache] if options.trl_cache else []
    packing = ["--packing" if options.packing else "--no-packing"]
    sides: list[Side] = []
    try:
        if options.only != "ours":
            extra = ["--per-device", per_device, *cache]
            sides.append(Side("trl", options.trl_python, "trl_theirs.py", task, folder, extra))
        if options.only != "trl":
            extra = ["--per-device", str(options.per_device), "--engine", options.engine, *packing]
            sides.append(Side("ours", sys.executable, "trl_ours.py", task, folder, extra))
        figures: dict[str, list[dict[str, Any]]] = {name: [] for name in ("trl", "ours", "bare")}
        for i in range(options.warm_up + options.rounds):
            # Who goes first changes, so that a machine that slows down or speeds up favours neither.
            for side in sides if i % 2 == 0 else reversed(sides):
                figures[side.name].append(side.ask("step"))
                if side.name == "ours":
                    figures["bare"].append(side.ask("bare"))
        print("threads: " + ", ".join(f"{side.name} {side.threads}" for side in sides))
    finally:
        for side in sides:
            side.close()
    return {name: rows[options.warm_up :] for name, rows in figures.items()}


def spread(values: list[float]) -> str:
    """Return the median with the quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def report(task: Task, figures: dict[str, list[dict[str, Any]]]) -> None:
    kind = "one length" if task.mean_length is None else f"mean length about {task.mean_length}"
    print(
        f"{task.prompts} prompts x {task.samples} responses, prompts of {task.prompt_length} tokens, responses up to "
        f"{task.response_length}, {kind}; load {', '.join(f'{load:.1f}' for load in os.getloadavg())}\n"
    )
    print("| side | s per step | processor s | responses/s | response tokens/s | trained tokens per step | longest |")
    print("|---|---|---|---|---|---|---|")
    for name in ("trl", "ours"):
        rows = figures[name]
        if not rows:
            continue
        seconds = [row["seconds"] for row in rows]
        tokens = [sum(row["lengths"]) for row in rows]
        rate = median(t / s for t, s in zip(tokens, seconds, strict=True))
        cells = [name, spread(seconds), f"{median(row['processor'] for row in rows):.2f}",
                 f"{task.rows / median(seconds):.1f}", f"{rate:,.0f}", f"{fmean(tokens):,.0f}",
                 f"{fmean(max(row['lengths']) for row in rows):,.0f}"]  # fmt: skip
        print("| " + " | ".join(cells) + " |")
    if figures["bare"]:
        generate, train = (median(row[part] for row in figures["bare"]) for part in ("generate", "train"))
        sums = [{"seconds": row["generate"] + row["train"], "processor": row["processor"]} for row in figures["bare"]]
        print(f"\nbare engine {generate:.2f} s + bare forward/backward {train:.2f} s")
        print(f"our whole step / bare parts: {ratios(figures['ours'], sums)}")
    if figures["trl"] and figures["ours"]:
        print(f"TRL's time / ours: {ratios(figures['trl'], figures['ours'])}")
        if task.mean_length is not None:
            # Lengths are drawn again on either side: a single round pairs a lucky draw with an unlucky one.
            trl, ours = per_token(figures["trl"]), per_token(figures["ours"])
            wall, processor = trl[0] / ours[0], trl[1] / ours[1]
            print(f"per trained token, over all rounds: {wall:.2f}, in processor seconds {processor:.2f}")


def per_token(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Return seconds and processor seconds per trained token, over all rounds together."""
    tokens = sum(sum(row["lengths"]) for row in rows)
    return sum(row["seconds"] for row in rows) / tokens, sum(row["processor"] for row in rows) / tokens


def ratios(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str:
    """Return the ratios of the rounds' seconds and processor seconds."""
    pairs = list(zip(first, second, strict=True))
    wall, processor = ([a[unit] / b[unit] for a, b in pairs] for unit in ("seconds", "processor"))
    return f"{spread(wall)}, in processor seconds {spread(processor)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A whole GRPO step against TRL's.")
    parser.add_argument("--trl-python", default="python", help="interpreter of the environment that has TRL")
    parser.add_argument("--mean-length", type=int, help="of responses that end by themselves; default: none does")
    parser.add_argument("--response-length", type=int, help="default: 128, with --mean-length 512")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", default="hf_infer", help="our engine: hf_infer or vllm")
    parser.add_argument("--per-device", type=int, default=16, help="our responses per pass in training")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trl-per-device", type=int, help="TRL's responses per pass in training; default: all")
    parser.add_argument("--trl-cache", help="cache_implementation of TRL's generate")
    parser.add_argument("--only", choices=["ours", "trl"], help="measure one side alone")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args()
    task = Task(
        prompts=options.prompts,
        samples=options.samples,
        prompt_length=options.prompt_length,
        response_length=options.response_length or (512 if options.mean_length else 128),
        mean_length=options.mean_length,
        threads=options.threads,
        steps=options.rounds + options.warm_up + 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, task, Path(folder))
    report(task, figures)
    if options.json is not None:
        options.json.write_text(json.dumps({"task": asdict(task), **figures}))


if __name__ == "__main__":
    main()
