"""How far each backend and parallel layout is from a plain transformers + AdamW loop, after five optimizer steps.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --layouts "FSDP2, 2 ranks" --families llama qwen3

The check is that of `tests/strategies/layout_contract.py`, which fails above 1e-4. The table shows the largest relative
difference of log-probs, entropy, loss, gradient norm and weights over the families, dense and packed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "strategies")]

DENSE, EXPERTS = ("llama", "qwen2", "qwen3"), ("qwen3_moe",)
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, EP2 = {**TP2, "sequence_parallel": True}, {"expert_model_parallel_size": 2}

LAYOUTS: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    "FSDP2, 1 rank": ("fsdp2_train", 1, {}, DENSE + EXPERTS),
    "FSDP2, 2 ranks": ("fsdp2_train", 2, {}, DENSE + EXPERTS),
    "FSDP2, 2 x 2 ranks (HSDP)": ("fsdp2_train", 4, {"fsdp_size": 2}, DENSE),
    "FSDP2, Ulysses 2": ("fsdp2_train", 2, {"ulysses_size": 2}, DENSE + EXPERTS),
    "FSDP2, ring 2": ("fsdp2_train", 2, {"ring_attention_size": 2}, DENSE + EXPERTS),
    **{
        f"DeepSpeed ZeRO {stage}, 2 ranks": (
            "deepspeed_train", 2, {"zero_optimization": {"stage": stage}}, DENSE + EXPERTS,
        )
        for stage in range(4)
    },
    "DeepSpeed ZeRO 3, Ulysses 2": (
        "deepspeed_train", 2, {"zero_optimization": {"stage": 3}, "ulysses_size": 2}, DENSE,
    ),
    "Megatron, 1 rank": ("megatron_train", 1, {}, DENSE + EXPERTS),
    "Megatron, DP 2": ("megatron_train", 2, {}, DENSE + EXPERTS),
    "Megatron, TP 2": ("megatron_train", 2, TP2, DENSE),
    "Megatron, TP 2 + SP": ("megatron_train", 2, SP, DENSE + EXPERTS),
    "Megatron, PP 2": ("megatron_train", 2, PP2, DENSE + EXPERTS),
    "Megatron, TP 2 x PP 2": ("megatron_train", 4, {**TP2, **PP2}, DENSE),
    "Megatron, PP 2, 2 virtual stages": (
        "megatron_train", 2, {**PP2, "virtual_pipeline_model_parallel_size": 2}, DENSE,
    ),
    "Megatron, CP 2": ("megatron_train", 2, {"context_parallel_size": 2}, DENSE),
    "Megatron, EP 2, alltoall": ("megatron_train", 2, EP2, EXPERTS),
    "Megatron, EP 2, allgather": ("megatron_train", 2, {**EP2, "moe_token_dispatcher_type": "allgather"}, EXPERTS),
}  # fmt: skip
NAMES = ("logprobs", "entropy", "loss", "grad_norm", "weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--families", nargs="+", choices=DENSE + EXPERTS, default=DENSE + EXPERTS)
    args = parser.parse_args()
    from layout_contract import check_layout, differences, reference
    from ranks import RankPool
    from tiny_models import build_tiny_model

    pool = RankPool()
    print("| layout | families | " + " | ".join(NAMES) + " |\n" + "|---" * (2 + len(NAMES)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for title in args.layouts:
            strategy, world, configured, known = LAYOUTS[title]
            families = [family for family in known if family in args.families]
            options = dict(configured)
            model = {key: options.pop(key, 1) for key in ("ulysses_size", "ring_attention_size")}
            layers = 4 if "virtual_pipeline_model_parallel_size" in options else 2
            worst = dict.fromkeys(NAMES, 0.0)
            for family in families:
                path = Path(folder) / f"{family}{layers}"
                if not path.exists():
                    build_tiny_model(path, family, layers=layers)
                for packed in (False, True):
                    worker = {"use_sequence_packing": packed}
                    done = check_layout(pool, path, strategy, options, world, worker=worker, model=model)
                    result = differences(done, reference(path))
                    worst = {name: max(worst[name], result[name]) for name in NAMES}
            figures = " | ".join(f"{worst[name]:.1e}" for name in NAMES)
            print(f"| {title} | {', '.join(families)} | {figures} |", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
