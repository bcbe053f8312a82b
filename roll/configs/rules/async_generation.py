"""Rules about generation that runs ahead of training, and about the weights that it gets."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation
from roll.configs.schema.engine_config import VLLM_LORA_RANKS, VllmConfig
from roll.configs.schema.rl_config import RLConfig

_AHEAD = "async_generation_ratio"


def async_rules(config: RLConfig) -> Iterator[Violation]:
    """Check what can, and what can't, go on while weights change. That something corrects for it is `loss_rules`'s
    matter."""
    if config.async_generation_ratio == 0:
        return
    engine = config.actor_infer.strategy_args.strategy_name
    if config.executor == "inline" and engine == "hf_infer" and not config.replays:
        expected = "0 with executor inline and hf_infer: generation stands still while training computes in its process"
        fix = "executor=ray, or an engine with processes of its own (vllm, sglang)"
        yield Violation(_AHEAD, expected, fix, config.async_generation_ratio)
    corrected = config.train_infer_correction is not None or config.loss.corrects_staleness
    if corrected and config.allow_uncorrected_async:
        by = "train_infer_correction" if config.train_infer_correction else f"policy_loss {config.policy_loss}"
        yield Violation("allow_uncorrected_async", f"false, because {by} corrects for older weights", "remove it", True)


def transport_rules(config: RLConfig) -> Iterator[Violation]:
    """Check how weights travel, against where the two ends are."""
    way, plan = config.weight_transport, config.placement
    trainer = plan.node_of(config.actor_train.slots[0])
    far = sorted({plan.node_of(slot) for slot in config.actor_infer.slots} - {trainer})
    if way == "shared_memory" and far:
        expected = f"a way between machines: actor_train's rank 0 is on node {trainer}, engines are on node {far[0]}"
        yield Violation("weight_transport", expected, "weight_transport=auto", way)
    if config.delta_weight_sync and config.executor == "inline" and way == "auto":
        expected = "false with executor: inline, where engines read the trainer's weights and nothing is sent"
        yield Violation("delta_weight_sync", expected, "remove it, or weight_transport=shared_memory", True)
    if config.val_only and config.verify_weight_sync != "off" and not config.resume_from_checkpoint:
        expected = "off with val_only: the starting weights are read by the engine itself, nothing is sent"
        yield Violation("verify_weight_sync", expected, "verify_weight_sync=off", config.verify_weight_sync)


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
