"""Rules about DeepSpeed's JSON: keys it knows, and nothing that contradicts the rest of the role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from roll.configs.errors import Violation, did_you_mean, no_effect
from roll.configs.schema.deepspeed_config import OFFLOAD_KEYS, REFUSED_ZERO_KEYS, ZERO_KEYS, DeepSpeedConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import TrainConfig, WorkerConfig

COUNTS = frozenset(
    {
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "zero_hpz_partition_size",
    }
)
"""Keys of `zero_optimization` that are numbers; those that are neither these, `stage` nor sections are switches."""


def deepspeed_rules(config: RunConfig) -> Iterator[Violation]:
    """Check each role on DeepSpeed by itself."""
    for role, worker in config.sections.items():
        if not isinstance(worker.strategy_args.strategy_config, DeepSpeedConfig):
            continue
        options, path = worker.strategy_args.strategy_config, f"{role}.strategy_args.strategy_config"
        yield from _zero(f"{path}.zero_optimization", options.zero_optimization)
        group = options.zero_optimization.get("zero_hpz_partition_size", 1)
        if _is_count(group) and group > 1 and worker.ranks % group:
            expected = f"a divisor of the {worker.ranks} rank(s) of {role}, whose weights such a group keeps whole"
            key = f"{path}.zero_optimization.zero_hpz_partition_size"
            yield Violation(key, expected, "1 or remove it", group)
        yield from _types(path, worker, options)
        if isinstance(worker, TrainConfig):
            limit = 0.0 if config.max_grad_norm is None else config.max_grad_norm
            yield from _sizes(path, role, worker, options, limit)
            yield from _optimizer(f"{path}.optimizer", f"{role}.training_args", worker, options)
            yield from _division(path, options)


def _zero(path: str, section: Mapping[str, Any]) -> Iterator[Violation]:
    """Check that DeepSpeed has these keys, that they act here and in this stage, and the kind of their values."""
    yield from _unknown(path, section.keys() - REFUSED_ZERO_KEYS.keys(), frozenset(ZERO_KEYS), section)
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield Violation(f"{path}.stage", "0, 1, 2 or 3", "", stage)
        return
    if isinstance(stage, float):
        yield Violation(f"{path}.stage", "a whole number", f"write {stage:.0f}", stage)
    for key, value in section.items():
        below, switch = f"{path}.{key}", value == "auto" or isinstance(value, bool)
        if key in REFUSED_ZERO_KEYS:
            yield no_effect(below, f": {REFUSED_ZERO_KEYS[key]}", "remove it", value)
        elif key in OFFLOAD_KEYS:
            yield from _offload(path, key, value, int(stage))
        elif stage not in ZERO_KEYS.get(key, (stage,)):
            why = f" with stage {stage}: it acts in stage {' or '.join(map(str, ZERO_KEYS[key]))}"
            yield no_effect(below, why, "remove it", value)
        elif key in COUNTS:
            least = 1 if key == "reduce_bucket_size" else 0
            if value != "auto" and not (_is_count(value) and value >= least):
                yield Violation(below, f"a whole number >= {least}, or auto", "", value)
        elif key in ZERO_KEYS and key != "stage" and not switch:
            yield Violation(below, "true or false, or auto", "", value)
        elif key == "allgather_partitions" and value is False:
            expected = "true: DeepSpeed gathers partitions, it no longer sends them around"
            yield Violation(below, expected, "remove it", value)


def _offload(path: str, name: str, section: Any, stage: int) -> Iterator[Violation]:
    below = f"{path}.{name}"
    if not isinstance(section, Mapping):
        if section is not None:
            yield Violation(below, "a section with keys", f"{below}={{device: cpu}}", section)
        return
    yield from _unknown(below, section, OFFLOAD_KEYS[name], section)
    device, ratio, least = section.get("device", "none"), section.get("ratio", 1.0), 3 if name == "offload_param" else 1
    if device not in ("none", "cpu"):
        expected = "cpu or none: offload to files isn't supported"
        yield Violation(f"{below}.device", expected, f"{below}.device=cpu", device)
    if device != "none" and stage < least:
        expected = f"stage {least} or more with {name}, which only acts there"
        yield Violation(f"{path}.stage", expected, f"{path}.stage={least}, or remove {name}", stage)
    if not isinstance(section.get("pin_memory", False), bool):
        yield Violation(f"{below}.pin_memory", "true or false", "", section["pin_memory"])
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        yield Violation(f"{below}.ratio", "a number from 0 to 1", "", ratio)
    elif ratio != 1 and stage < 3:
        yield Violation(f"{below}.ratio", "1 below stage 3", "remove it", ratio)


def _unknown(path: str, keys: Iterable[str], known: frozenset[str], section: Mapping[str, Any]) -> Iterator[Violation]:
    for key in sorted(set(keys) - known):
        fix = did_you_mean(key, known) or "remove it"
        yield Violation(f"{path}.{key}", "a key of DeepSpeed's that acts here", fix, section[key])


def _types(path: str, worker: WorkerConfig, options: DeepSpeedConfig) -> Iterator[Violation]:
    dtype = worker.model_args.dtype
    role = path.split(".", maxsplit=1)[0]
    for name in ("bf16", "fp16"):
        section: dict[str, Any] | None = getattr(options, name)
        if section is None:
            continue
        # The other stages, and offload, have optimizers that don't ask.
        immediate = name == "bf16" and options.stage == 1 and not options.offloads("offload_optimizer")
        known = frozenset({"enabled", "immediate_grad_update"} if immediate else {"enabled"})
        yield from _unknown(f"{path}.{name}", section, known, section)
        enabled = section.get("enabled", "auto")
        open_yet = dtype == "auto" and name == "bf16"
        if enabled != "auto" and (open_yet or enabled is not (dtype == name)):
            value = "auto" if open_yet else f"{str(dtype == name).lower()}"
            expected = f"{value}, because {role}.model_args.dtype is {dtype}{'' if open_yet else '; or auto'}"
            wanted = name if enabled else "fp32"
            fix = f"{role}.model_args.dtype={wanted}, or remove it"
            yield Violation(f"{path}.{name}.enabled", expected, fix, enabled)
    types = options.data_types or {}
    yield from _unknown(f"{path}.data_types", types, frozenset({"grad_accum_dtype"}), types)
    kind = types.get("grad_accum_dtype", "fp32")
    if kind not in ("fp32", "bf16") or (kind == "bf16" and (dtype != "bf16" or options.stage == 0)):
        expected = "fp32, or bf16 with model_args.dtype bf16 and ZeRO"
        yield Violation(f"{path}.data_types.grad_accum_dtype", expected, "remove it", kind)


def _sizes(path: str, role: str, worker: TrainConfig, options: DeepSpeedConfig, limit: float) -> Iterator[Violation]:
    args, ranks = worker.training_args, worker.data_parallel
    rows, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    product = f"{role}'s per_device_train_batch_size {rows} x gradient_accumulation_steps {passes} x {ranks} rank(s)"
    clipping = "the pipeline's max_grad_norm" if limit else "max_grad_norm null, which is no clipping"
    wanted = {
        "train_batch_size": (rows * passes * ranks, product),
        "train_micro_batch_size_per_gpu": (rows, f"{role}.training_args.per_device_train_batch_size"),
        "gradient_accumulation_steps": (passes, f"{role}.training_args.gradient_accumulation_steps"),
        "gradient_clipping": (limit, clipping),
    }
    for name, (value, source) in wanted.items():
        value_set = getattr(options, name)
        if value_set not in (None, "auto", value):
            yield Violation(f"{path}.{name}", f"{value:g} ({source}), or auto", f"{path}.{name}=auto", value_set)


def _division(path: str, options: DeepSpeedConfig) -> Iterator[Violation]:
    """Check division by the number of ranks, before or after a sum: DeepSpeed asserts in some places and errs in
    others."""
    factor, early = options.gradient_predivide_factor, options.prescale_gradients
    for name, value in (("prescale_gradients", early), ("gradient_predivide_factor", factor)):
        if not value or (value == 1.0 and value is not True):
            continue
        if options.stage == 3:
            yield no_effect(f"{path}.{name}", " with stage 3, which always divides before the sum", "remove it", value)
        elif options.stage and options.zero_optimization.get("reduce_scatter", True):
            why = " with reduce_scatter, which divides before the sum"
            yield no_effect(f"{path}.{name}", why, f"{path}.zero_optimization.reduce_scatter=false", value)
    if early and factor is not None:
        why = " with prescale_gradients, which divides by all ranks before the sum"
        yield no_effect(f"{path}.gradient_predivide_factor", why, "keep one of the two", factor)


def _optimizer(path: str, source: str, worker: TrainConfig, options: DeepSpeedConfig) -> Iterator[Violation]:
    """Accept it as far as it repeats `training_args`."""
    section = options.optimizer
    if section is None:
        return
    yield from _unknown(path, section, frozenset({"type", "params"}), section)
    if section.get("type", "AdamW") not in ("Adam", "AdamW"):
        yield Violation(f"{path}.type", "AdamW, the optimizer of deepspeed_train", "remove it", section["type"])
    args = worker.training_args
    wanted = {
        "lr": args.learning_rate,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "adam_w_mode": True,
    }
    params = section.get("params", {})
    if not isinstance(params, Mapping):
        yield Violation(f"{path}.params", "a section with keys", "remove it", params)
        return
    yield from _unknown(f"{path}.params", params, frozenset(wanted), params)
    for name, value in wanted.items():
        value_set = params.get(name, "auto")
        if isinstance(value_set, tuple):
            value_set = list(value_set)
        if value_set not in ("auto", value):
            yield Violation(f"{path}.params.{name}", f"{value}, as {source} says, or auto", "remove it", value_set)


def _is_count(value: Any) -> bool:
    """Whole, also as 5e8, which YAML reads as a fraction."""
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
