"""Where the time of an RL step must go on accelerators, by arithmetic alone: nothing is run, and no torch is loaded.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --models Qwen/Qwen2.5-7B --gpus 8 --prompts 128 --response 4096

For each phase of a step that samples with vLLM on the same GPUs as it trains (FSDP2, checkpointing on):

    tokens     rows x (prompt + response), rows = prompts x group
    pass       FLOP of a forward pass = 2 A tokens + 2 L Q sum of T^2   A: numbers in matrices that a token meets, head
                                                                       included; Q: width of all query heads; the
                                                                       causal half of 4 L Q T^2
    generate   each prompt once (prefix cache), then `response` decoding steps of c rows per engine, each the larger of
               2 A c + 4 L Q c t FLOP and the bytes of weights and of keys and values: W + c t K
               (t: mean context; K = 4 L x width of the key heads bytes; with experts W has those that c tokens meet)
    score      2 passes: old log-probs, and those of the reference
    train      4 passes of the matrices (forward, again, twice backward), 4.5 of the attention
    gather     per micro-batch 2 gathers in bf16 and a sum of gradients in float32: 8 N (g - 1) / g bytes on the link
    optimizer  28 N / g bytes: AdamW reads weights, gradients and two moments, and writes all but the gradients
    sync       2 N (g - 1) / g bytes on the link, and 4 N of memory for reading and writing the engine's copy

`least` is at the peak of the data sheet, `estimate` at the shares of it in SHARES. Both are estimates, no measurements:
all responses have one length, and nothing is counted for kernels that wait, environments, rewards or the controller.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from roll.workbench.planning.architecture import Architecture, read_architecture  # noqa: E402

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B")
FLOPS, MEMORY, LINK, CAPACITY = 989e12, 3.35e12, 450e9, 80e9
"""Of an H100 SXM by its data sheet: dense bf16 FLOP/s, bytes/s of memory, bytes/s of NVLink one way, bytes."""
SHARES = {"prefill": 0.5, "decode": 0.6, "score": 0.45, "train": 0.4, "optimizer": 0.7, "link": 0.7}
"""Assumed shares of the peak. Training on one GPU of 0.6B reaches less: its layers are too small to fill it."""
STATES = 16
"""Bytes per parameter of training: float32 weights, gradients and two moments."""


@dataclass(frozen=True)
class Phase:
    """What a phase must do per GPU."""

    name: str
    flop: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    share: float = 1.0

    @property
    def seconds(self) -> dict[str, float]:
        """Return the least seconds by what bounds them."""
        return {"compute": self.flop / FLOPS, "memory": self.memory / MEMORY, "link": self.link / LINK}

    @property
    def bound(self) -> str:
        """Return what takes longest."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def least(self) -> float:
        """Return seconds at the peak; what overlaps is counted once."""
        return max(self.seconds.values())


def active(arch: Architecture) -> int:
    """Return the numbers in matrices that a token meets, head included."""
    per_layer = (weight for number in range(arch.layers) for weight in arch.layer(number) if len(weight.shape) > 1)
    met = (w.size // arch.experts * arch.experts_per_token if len(w.shape) == 3 else w.size for w in per_layer)
    return sum(met) + arch.vocab * arch.hidden


def decode_bytes(arch: Architecture, rows: float) -> float:
    """Return the bytes of bf16 weights that a decoding step of so many rows reads."""
    if not arch.experts:
        return 2.0 * active(arch)
    met = 1 - (1 - arch.experts_per_token / arch.experts) ** rows
    weights = [weight for number in range(arch.layers) for weight in arch.layer(number)]
    experts = sum(weight.size for weight in weights if len(weight.shape) == 3)
    others = sum(weight.size for weight in weights if len(weight.shape) == 2) + arch.vocab * arch.hidden
    return 2.0 * (met * experts + others)


def phases(arch: Architecture, gpus: int, args: argparse.Namespace) -> list[Phase]:
    """Return the phases of a step."""
    rows, length, n = args.prompts * args.group, args.prompt + args.response, arch.count()
    tokens, matrices = rows * length / gpus, 2.0 * active(arch)
    attention = 2.0 * arch.layers * arch.query * rows * length**2 / gpus
    prompts = args.prompts * args.prompt / gpus
    prefill = matrices * prompts + 2.0 * arch.layers * arch.query * args.prompts * args.prompt**2 / gpus
    concurrent = min(args.concurrent, rows / gpus)
    context, steps = args.prompt + args.response / 2, args.response * rows / gpus / concurrent
    flop = steps * concurrent * (matrices + 4.0 * arch.layers * arch.query * context)
    read = steps * (decode_bytes(arch, concurrent) + concurrent * context * 4.0 * arch.layers * arch.key)
    others, micro_batches = (gpus - 1) / gpus, max(1.0, tokens / args.micro_batch)
    return [
        Phase("prefill", flop=prefill, share=SHARES["prefill"]),
        Phase("decode", flop=flop, memory=read, share=SHARES["decode"]),
        Phase("score", flop=2 * (matrices * tokens + attention), share=SHARES["score"]),
        Phase("train", flop=4 * matrices * tokens + 4.5 * attention, share=SHARES["train"]),
        Phase("gather", link=micro_batches * 8 * n * others, share=SHARES["link"]),
        Phase("optimizer", memory=args.updates * 28 * n / gpus, share=SHARES["optimizer"]),
        Phase("sync", memory=4 * n, link=2 * n * others, share=SHARES["link"]),
    ]


def show(model: str, gpus: int, args: argparse.Namespace) -> None:
    """Print the table of one model on so many GPUs."""
    arch = read_architecture(model, {}, "pretrain")
    print(f"\n{model} on {gpus} x H100 (estimates, nothing was run)")
    if STATES * arch.count() > CAPACITY * gpus:
        need = STATES * arch.count() / 1e9
        print(f"states of {need:.0f} GB don't fit into {CAPACITY * gpus / 1e9:.0f} GB: no table")
        return
    parts = phases(arch, gpus, args)
    total = sum(phase.least / phase.share for phase in parts)
    print("| phase | TFLOP per GPU | GB of memory | GB on the link | bound by | least s | estimate s | share |")
    print("|---|---|---|---|---|---|---|---|")
    for phase in parts:
        numbers = f"{phase.flop / 1e12:.4g} | {phase.memory / 1e9:.4g} | {phase.link / 1e9:.4g}"
        estimate = phase.least / phase.share
        print(f"| {phase.name} | {numbers} | {phase.bound if phase.least else '-'} | {phase.least:.2f} | "
              f"{estimate:.2f} | {estimate / total:.0%} |")  # fmt: skip
    tokens = args.prompts * args.group * (args.prompt + args.response)
    print(f"| all | | | | | {sum(phase.least for phase in parts):.2f} | {total:.2f} | {tokens / total / gpus:.0f} "
          "tokens/s/GPU |")  # fmt: skip


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a step consists of."""
    parser.add_argument("--prompts", type=int, default=64, help="per step")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--response", type=int, default=1024, help="tokens")
    parser.add_argument("--concurrent", type=int, default=256, help="responses that an engine decodes at once")
    parser.add_argument("--micro_batch", type=int, default=16384, help="tokens")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps per step")


def main() -> None:
    """Parse the command line, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="hub ids or folders")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 8])
    add_workload(parser)
    args = parser.parse_args()
    for model in args.models:
        for gpus in args.gpus:
            show(model, gpus, args)


if __name__ == "__main__":
    main()
