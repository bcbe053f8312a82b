"""Everything that only an accelerator can show, with one command: a report in Markdown, part by part.

    python benchmarks/gpu.py                        # all parts, on all accelerators of this machine
    python benchmarks/gpu.py --parts head step      # some
    python benchmarks/gpu.py --dry-run              # on a CPU, tiny: that every part starts; takes a minute or two

Each part is a command of its own, which the report names, so that one that fails or hangs (`--timeout`) takes nothing
with it: its last lines stand in the report instead of its table, and the exit code is 1. Only vLLM and liger-kernel are
looked for; what isn't installed is left out with a line. What the parts must show is in docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """A section of the report."""

    title: str
    command: tuple[str, ...]
    """Without the interpreter."""
    dry: tuple[str, ...]
    """Added, or put in the place of `command` where that has options of its own."""
    least: int = 1
    """Accelerators that it takes."""


TRAIN_STEP = ("benchmarks/train_step.py", "--backends", "fsdp2", "fsdp2-padded", "zero1", "megatron")
GPU_TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/strategies/test_hf_fused.py",
             "tests/strategies/test_hf_memory.py")  # fmt: skip
STEP = ("benchmarks/gpu_step.py",)
SEVEN = ("--model", "Qwen/Qwen2.5-7B", "--gpus", "8")
EXPERTS = ("--model", "Qwen/Qwen3-30B-A3B", "--gpus", "8")
OFFLOAD = "actor_train.strategy_args.strategy_config.optimizer_offload=true"
PARTS = {
    "machine": Part("The machine", ("benchmarks/gpu_parts.py", "machine"), ()),
    "tests": Part("Tests that need an accelerator", GPU_TESTS, ("--collect-only",)),
    "head": Part("The head: log-probs and their gradients", ("benchmarks/gpu_parts.py", "head"), ("--dry-run",)),
    "attention": Part("Attention over packed rows", ("benchmarks/gpu_parts.py", "attention"), ("--dry-run",)),
    "optimizer": Part("The optimizer step", ("benchmarks/gpu_parts.py", "optimizer"), ("--dry-run",)),
    "waits": Part("Waits for the device in a train step", ("benchmarks/gpu_parts.py", "waits"), ("--dry-run",)),
    "sleep": Part("A role's memory to the host and back", ("benchmarks/gpu_parts.py", "sleep"), ("--dry-run",)),
    "train": Part(
        "A train step on one accelerator, against a bare loop",
        (*TRAIN_STEP, "--shape", "qwen2.5-0.5b", "--dtype", "bf16", "--longest", "2048", "--rows", "32"),
        ("--rounds", "1", "--rows", "4", "--longest", "8", "--shape", "small", "--dtype", "fp32", "--per-pass", "2",
         "--backends", "fsdp2"),
    ),
    "step": Part("A whole step, 0.6B on one", STEP, ("--dry-run",)),
    "apart": Part("A whole step, 0.6B on two, apart", (*STEP, "--gpus", "2", "--apart"), (), least=2),
    "step8": Part("A whole step, 7B on eight", (*STEP, *SEVEN), (), least=8),
    "offload": Part("The same, optimizer states on the host", (*STEP, *SEVEN, "--set", OFFLOAD), (), least=8),
    "apart8": Part("The same, trainer and engines apart", (*STEP, *SEVEN, "--apart"), (), least=8),
    "experts": Part("A whole step, 30B-A3B on eight", (*STEP, *EXPERTS), (), least=8),
}  # fmt: skip


def accelerators() -> int:
    """Count them in a process of its own, so that this one holds no memory on them."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def run(part: Part, folder: Path, name: str, args: argparse.Namespace) -> tuple[str, bool]:
    """Run one part; returns (its section of the report, whether it ended well)."""
    command = [sys.executable, *part.command, *(part.dry if args.dry_run else ())]
    log, started = folder / f"{name}.log", time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}, start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=args.timeout)
            ended = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            printed, ended = process.communicate()[0], f"stopped after {args.timeout} s"
    well = process.returncode == 0
    shown = tables(printed) if well else f"**Failed: {ended}.** Its last lines, of {log.name}:\n\n```\n{tail(log)}\n```"
    command_line = shlex.join(["python", *command[1:]])
    return f"## {part.title}\n\n```\n{command_line}\n```\n\n{shown}\n\n{time.monotonic() - started:.0f} s.\n", well


def tables(printed: str) -> str:
    """Return what a part printed from its first table on, with the line before."""
    lines = printed.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("|")), None)
    return "\n".join(lines[-3:] if first is None else lines[max(0, first - 2) :])


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a file."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


def main() -> None:
    """Run the parts, and write the report as they end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu", help="folder of report.md and the logs")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for a part")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, as small as it gets")
    args = parser.parse_args()
    there = 1 if args.dry_run else accelerators()
    if not there:
        sys.exit("no accelerator was found by torch; --dry-run shows on a CPU that every part starts")
    args.output.mkdir(parents=True, exist_ok=True)
    report, failed = args.output / "report.md", []
    written = "# On accelerators\n\n" + ("A dry run on a CPU: the figures mean nothing.\n\n" if args.dry_run else "")
    for name in args.parts:
        part = PARTS[name]
        if there < part.least:
            section, well = (
                f"## {part.title}\n\nLeft out: it takes {part.least} accelerators, here are {there}.\n",
                True,
            )
        else:
            section, well = run(part, args.output, name, args)
        failed += [] if well else [name]
        written += f"{section}\n"
        report.write_text(written)
        print(section, flush=True)
    print(f"report: {report}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
