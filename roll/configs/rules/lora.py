"""Rules about low-rank adapters: which backends and engines take them."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation
from roll.configs.schema.engine_config import VLLM_LORA_RANKS, VllmConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import TrainConfig

ALL_LINEAR = "all-linear"
"""Entry of `lora_target` that means every linear layer but the head."""

PEFT_MISSING = "pip install -e '.[lora]'"
"""What brings peft."""


def lora_rules(config: RunConfig) -> Iterator[Violation]:
    """Each role that trains adapters."""
    for role, worker in config.sections.items():
        if isinstance(worker, TrainConfig) and worker.model_args.uses_lora:
            yield from _training_rules(f"{role}.model_args", worker)


def lora_sync_rules(config: RLConfig) -> Iterator[Violation]:
    """Adapters alone can be sent where there are some, to an engine that can hold them beside its weights."""
    if config.lora_sync != "adapters":
        return
    key, worker, args = "lora_sync", config.actor_infer, config.actor_train.model_args
    merge = "remove it, or lora_sync=merged"
    if not args.uses_lora:
        expected = "merged: actor_train trains the weights themselves, there are no adapters to send"
        yield Violation(key, expected, f"{merge}, or actor_train.model_args.lora_rank=16", "adapters")
    options, name = worker.strategy_args.strategy_config, worker.strategy_args.strategy_name
    if not isinstance(options, VllmConfig):
        expected = f"merged with {name}, which takes merged weights only"
        yield Violation(key, expected, f"{merge}, or actor_infer.strategy_args.strategy_name=vllm", "adapters")
        return
    if options.sleep_level == 2:
        path = "actor_infer.strategy_args.strategy_config.sleep_level"
        expected = "0 or 1 with lora_sync: adapters: level 2 gives up the base weights, which are sent only once"
        yield Violation(path, expected, f"{path}=1, or lora_sync=merged", 2)
    if args.lora_rank > VLLM_LORA_RANKS[-1]:
        expected = f"at most {VLLM_LORA_RANKS[-1]} with lora_sync: adapters, for which vLLM has room"
        yield Violation("actor_train.model_args.lora_rank", expected, "lora_sync=merged", args.lora_rank)


def _training_rules(path: str, worker: TrainConfig) -> Iterator[Violation]:
    args, strategy = worker.model_args, worker.strategy_args.strategy_name
    key = "lora_rank" if args.lora_rank else "adapter_name_or_path"
    if strategy.startswith("megatron"):
        yield Violation(
            f"{path}.{key}",
            f"no adapters with {strategy}, whose fused and split layers have no place for them",
            f"{path.split('.')[0]}.strategy_args.strategy_name=fsdp2_train or deepspeed_train, or remove the LoRA keys",
            getattr(args, key),
        )
    if ALL_LINEAR in args.lora_target and len(args.lora_target) > 1:
        expected = f"{ALL_LINEAR} alone, or names of layers alone"
        yield Violation(f"{path}.lora_target", expected, f"{path}.lora_target={ALL_LINEAR}", list(args.lora_target))
