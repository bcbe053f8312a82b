"""Rules between keys of `training_args`. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation, no_effect
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.worker_config import TrainConfig


def training_rules(role: str, worker: TrainConfig) -> Iterator[Violation]:
    """Schedules that have room, an optimizer that suits what is trained."""
    args, path = worker.training_args, f"{role}.training_args"
    if args.lr_decay_steps is not None and args.lr_decay_steps <= args.warmup_steps:
        expected = f"more than warmup_steps ({args.warmup_steps}), which it includes"
        yield Violation(f"{path}.lr_decay_steps", expected, "remove it: then it is the whole run", args.lr_decay_steps)
    if args.lr_scheduler_type == "warmup_stable_decay" and args.num_cycles is not None and args.decay_style != "cosine":
        why = f" with wsd_decay_style {args.decay_style}, which has no waves"
        yield no_effect(f"{path}.num_cycles", why, "remove it", args.num_cycles)
    if args.optimizer == "muon" and worker.model_args.uses_lora:
        expected = "adamw with LoRA: the two factors of an adapter aren't matrices that Muon was made for"
        yield Violation(f"{path}.optimizer", expected, f"{path}.optimizer=adamw", "muon")
    options = worker.strategy_args.strategy_config
    if worker.model_args.uses_lora and isinstance(options, MegatronConfig) and options.transformer_impl != "local":
        key = f"{role}.strategy_args.strategy_config.transformer_impl"
        expected = "local with LoRA: Transformer Engine's layers have their norms inside, where adapters can't begin"
        yield Violation(key, expected, f"{key}=local", options.transformer_impl)
