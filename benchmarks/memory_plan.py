"""The memory that `roll plan` foresees beside the memory that is used: peaks of single roles on a CPU.

    python benchmarks/memory_plan.py
    python benchmarks/memory_plan.py --only "fsdp2" "hf_infer"

Each case is a process of its own, which builds the role with a model of random weights and takes optimizer steps, or
generates. Measured is what torch's own accounting of the CPU's memory says: the tensors that are there before the
second step, and the highest sum of what its allocator gave out and got back since. The same work with a tiny model
goes before, and its tensors don't count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "strategies")]
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A role, and the shape of its batch."""

    strategy: str
    family: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)
    rows: int = 4
    """Per pass."""
    passes: int = 2
    length: int = 384
    kind: str = "policy"


BF16 = {"dtype": "bf16"}
WHOLE = {"disable_gradient_checkpointing": True}
PACKED = {"use_sequence_packing": True}
ZERO = {stage: {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000}} for stage in (1, 2, 3)}
CASES: dict[str, Case] = {
    "fsdp2": Case("fsdp2_train"),
    "fsdp2, bf16": Case("fsdp2_train", model=BF16),
    "fsdp2, packed": Case("fsdp2_train", worker=PACKED),
    "fsdp2, no checkpointing": Case("fsdp2_train", model=WHOLE),
    "fsdp2, no checkpointing, packed": Case("fsdp2_train", model=WHOLE, worker=PACKED),
    "fsdp2, LoRA": Case("fsdp2_train", model={"lora_rank": 16}),
    "fsdp2, LoRA, no checkpointing": Case("fsdp2_train", model={"lora_rank": 16, **WHOLE}),
    "fsdp2, one pass": Case("fsdp2_train", passes=1),
    "fsdp2, critic": Case("fsdp2_train", kind="value"),
    "fsdp2, qwen3_moe": Case("fsdp2_train", family="qwen3_moe"),
    "ZeRO 1, bf16": Case("deepspeed_train", options=ZERO[1], model=BF16),
    "ZeRO 2, bf16": Case("deepspeed_train", options=ZERO[2], model=BF16),
    "ZeRO 3, bf16, packed": Case("deepspeed_train", options=ZERO[3], model=BF16, worker=PACKED),
    "megatron": Case("megatron_train"),
    "megatron, bf16, no recomputation": Case("megatron_train", model={**BF16, **WHOLE}),
    "hf_infer": Case("hf_infer", rows=64, length=256),
    "hf_infer, bf16": Case("hf_infer", rows=96, length=256, model=BF16),
}
SIZES = {"hidden": 320, "layers": 4, "vocab_size": 8192, "num_attention_heads": 10, "num_key_value_heads": 5,
         "head_dim": 32, "intermediate_size": 1024, "max_position_embeddings": 2048,
         "tie_word_embeddings": False}  # fmt: skip
SMALL = {**SIZES, "layers": 2}
EXPERTS = {"moe_intermediate_size": 512, "num_experts": 4}
PROMPT = 32
"""Tokens of the prompts, which aren't scored."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases whose name is one of these")
    parser.add_argument("--small", action="store_true", help="half of the layers, for a test")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(measured(CASES[args.case], args.folder))
        return
    names = [name for name in CASES if not args.only or name in args.only]
    print("| case | planned MiB | measured MiB | planned / measured |\n|---|---|---|---|")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        build_models(Path(folder), {CASES[name].family for name in names}, small=args.small)
        for name in names:
            plan, measured_bytes = planned(CASES[name], Path(folder)), in_a_process(name, folder, small=args.small)
            worst = max(worst, abs(plan / measured_bytes - 1))
            print(
                f"| {name} | {plan / MIB:.0f} | {measured_bytes / MIB:.0f} | {plan / measured_bytes:.2f} |", flush=True
            )
    print(f"largest difference: {100 * worst:.0f} %")


def build_models(folder: Path, families: set[str], *, small: bool) -> None:
    """Make a model of each family to measure, and a tiny one to warm up with."""
    from tiny_models import build_tiny_model

    for family in families:
        experts = EXPERTS if "moe" in family else {}
        build_tiny_model(folder / family, family, **{**(SMALL if small else SIZES), **experts})
        build_tiny_model(folder / f"{family}.tiny", family, max_position_embeddings=2048)


def in_a_process(name: str, folder: str, *, small: bool) -> int:
    """Return bytes that a case takes."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", name, "--folder", folder, *(["--small"] * small)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return int(done.stdout.splitlines()[-1])


# --- the plan ---------------------------------------------------------------------------------------------------------


def planned(case: Case, folder: Path) -> int:
    """Return bytes in the worst moment, without the process itself."""
    from roll.configs.parsing.loader import read_config
    from roll.workbench.planning.machines import parse_machines
    from roll.workbench.planning.plan import plan_memory

    file = folder / "job.yaml"
    file.write_text(json.dumps(job(case, folder / case.family)))
    reading = read_config(file, [])
    assert reading.config is not None and not reading.violations, reading.violations
    plan = plan_memory(reading.config, parse_machines("cpu:64"))
    role = "actor_infer" if case.strategy == "hf_infer" else "critic" if case.kind == "value" else "actor_train"
    sizes = [
        sum(item.nbytes for owner, item in use.items if owner == role and item.what not in ("process", "sync buffers"))
        + sum(
            item.nbytes for owner, item in use.items if owner == role and item.what == "sync buffers" and item.lasting
        )
        for use in plan.hosts[0].uses
        if use.role == role and use.phase in ("train", "generate")
    ]
    return max(sizes)


def job(case: Case, model: Path) -> dict[str, Any]:
    """Return a configuration whose role is the case's."""
    trains = case.strategy != "hf_infer"
    count = case.rows * case.passes if trains else case.rows
    trained = {
        "model_args": case.model,
        "training_args": {"per_device_train_batch_size": case.rows, "gradient_accumulation_steps": case.passes},
        "strategy_args": {"strategy_name": case.strategy, "strategy_config": case.options},
        **case.worker,
    }
    tree: dict[str, Any] = {
        "pipeline": "rlvr",
        "executor": "inline",
        "pretrain": str(model),
        "rollout_batch_size": 1 if trains else count,
        "num_return_sequences_in_group": count if trains else 1,
        "max_running_requests": max(count, 1),
        "prompt_length": PROMPT,
        "response_length": case.length - PROMPT,
        "rewards": {"math": {"name": "math_rule"}},
        "init_kl_coef": 0.0,
        "adv_estimator": "gae" if case.kind == "value" else "reinforce",
        "actor_train": {"data_args": {"file_name": "rows.jsonl"}},
        "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}},
    }
    if case.kind == "value":
        tree["critic"] = trained
        tree["actor_train"]["training_args"] = trained["training_args"]
    elif trains:
        tree["actor_train"] |= trained
    else:
        tree["actor_infer"]["model_args"] = case.model
    return tree


# --- the measurement --------------------------------------------------------------------------------------------------


def measured(case: Case, folder: Path) -> int:
    """Return bytes of torch's tensors in the worst moment."""
    work = generate if case.strategy == "hf_infer" else train
    work(replace(case, rows=2, passes=1, length=64), folder / f"{case.family}.tiny")
    before = alive()
    return work(case, folder / case.family) - before


def alive() -> int:
    """Return bytes behind all tensors that there are."""
    import torch

    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def peak_of(work: Callable[[], object]) -> int:
    """Return bytes of tensors in the worst moment of some work."""
    from torch.profiler import ProfilerActivity, profile

    there = alive()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    recorded: Any = profiled.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return there + most


def train(case: Case, model: Path) -> int:
    """Build the role and take two optimizer steps; what `peak_of` says of the second."""
    import socket

    import torch
    from layout_contract import layout_spec
    from train_contract import LOSS, build, make_info

    from roll.strategies.base import LossFn, LossTerms
    from roll.types.metrics import Metrics

    def squares(outputs: Any, batch: Any, sizes: Any) -> LossTerms:
        del batch
        return LossTerms((outputs.values**2).sum() / sizes.tokens, Metrics())

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spec = layout_spec(
        model, case.strategy, case.options, model=case.model, worker=case.worker, kind=case.kind,
        training={"per_device_train_batch_size": case.rows, "gradient_accumulation_steps": case.passes},
    )  # fmt: skip
    strategy, batch = build(spec, make_info(0, 1, port)), full_rows(case)
    loss = LOSS if case.kind == "policy" else LossFn(compute=squares, needs=("values",))
    torch.manual_seed(0)
    strategy.train_step(batch, loss)  # after it moments are there, and weights have been read
    return peak_of(lambda: strategy.train_step(batch, loss))


def full_rows(case: Case) -> Any:
    """Return rows of the greatest length."""
    import torch
    from train_contract import make_batch

    batch = make_batch((case.length,) * (case.rows * case.passes))
    acting = torch.arange(batch.num_tokens) % case.length >= PROMPT
    return replace(batch, action_mask=acting, loss_mask=acting)


def generate(case: Case, model: Path) -> int:
    """Let `hf_infer` answer a full batch with responses of the greatest length."""
    from roll.configs.schema.strategy_config import HfInferConfig
    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.base import EngineSettings, Request, SamplingParams
    from roll.strategies.engines.hf.hf_infer import build

    settings = EngineSettings(max_running_requests=case.rows, max_sequence_length=case.length, seed=1)
    engine = build(ModelArgs(model_name_or_path=str(model), **case.model), HfInferConfig(), settings)
    params = SamplingParams(max_new_tokens=case.length - PROMPT, ignore_eos=True)
    # Of two lengths, so that there is a mask.
    prompts = [tuple(6 + (row + i) % 80 for i in range(PROMPT - row % 2)) for row in range(case.rows)]
    engine.submit(
        [
            Request(id=f"r{row}", prompt_ids=ids, params=params, seed=row, order=(row,))
            for row, ids in enumerate(prompts)
        ]
    )

    def answer() -> None:
        left = case.rows
        while left:
            left -= len(engine.poll(16))

    return peak_of(answer)


if __name__ == "__main__":
    main()
