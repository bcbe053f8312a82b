"""Is bf16 faster than fp32 on this processor? Products of the quickstart's model, and what `dtype: auto` takes.

    OMP_NUM_THREADS=1 python benchmarks/processor_types.py [--rows 1 16 128 512 2048] [--rounds 7]

A product of so many rows with each weight of SmolLM2-135M, once per round, fp32 and bf16 in turns. Times are medians of
processor time, which other load on the machine changes little; a ratio above 1 says that bf16 is faster. Few rows are a
decode step, many a training pass. `packed` is bf16 with a weight that oneDNN has reordered beforehand; where oneDNN
can't compute in bf16 the column is empty.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll.configs.checks.dtype_choice import THIS_MACHINE, choose_dtype
from roll.configs.checks.machine_checks import this_machine

SHAPES = {"q, o": (576, 576), "k, v": (576, 192), "gate, up": (576, 1536), "down": (1536, 576), "head": (576, 49_152)}
"""Inputs and outputs of the linear layers of SmolLM2-135M."""
FEATURES = ("avx2", "avx512_f", "avx512_bf16", "amx_tile", "amx_bf16", "bf16", "sve_bf16")
"""Names in `torch.cpu.get_capabilities()` that matter here; the last two are of ARM."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512, 2048])
    parser.add_argument("--layers", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    has, choice = torch.cpu.get_capabilities(), choose_dtype({THIS_MACHINE: this_machine()})
    print(f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"features: {', '.join(name for name in FEATURES if has.get(name)) or 'none of those that matter'}")
    print(f"dtype: auto is {choice.dtype}: {choice.reason}\n")
    print("| layer | inputs x outputs | rows | fp32 (ms) | bf16 (ms) | fp32 / bf16 | packed (ms) | fp32 / packed |")
    print("|---" * 8 + "|")
    for name in args.layers:
        for rows in args.rows:
            print(_line(name, rows, args.rounds), flush=True)


def _line(name: str, rows: int, rounds: int) -> str:
    inputs, outputs = SHAPES[name]
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
    narrow_x, narrow = x.bfloat16(), weight.bfloat16()
    ways: dict[str, Callable[[], Tensor]] = {
        "fp32": lambda: torch.nn.functional.linear(x, weight),
        "bf16": lambda: torch.nn.functional.linear(narrow_x, narrow),
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(narrow, rows)
        ways["packed"] = lambda: torch.ops.mkldnn._linear_pointwise(narrow_x, packed, None, "none", [], "")
    ms = _medians(ways, rounds)
    cells = [f"{ms['fp32']:.3f}", f"{ms['bf16']:.3f}", f"{ms['fp32'] / ms['bf16']:.2f}"]
    cells += [f"{ms['packed']:.3f}", f"{ms['fp32'] / ms['packed']:.2f}"] if "packed" in ms else ["", ""]
    return f"| {name} | {inputs} x {outputs} | {rows} | " + " | ".join(cells) + " |"


@torch.inference_mode()
def _medians(ways: Mapping[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of processor time of each; the first round doesn't count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begun = time.process_time()
            way()
            times[name].append(1e3 * (time.process_time() - begun))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
