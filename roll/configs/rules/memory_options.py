"""Rules about switches for memory and speed: which roles and backends they act in, and what they need."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation
from roll.configs.schema.deepspeed_config import QUANTIZED_KEYS, DeepSpeedConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.configs.schema.worker_config import TrainConfig, WorkerConfig

LIGER_MISSING = "liger-kernel is not installed: pip install -e '.[liger]'"
FLASH_MISSING = "flash-attn is not installed: pip install flash-attn --no-build-isolation"


def memory_rules(config: RunConfig) -> Iterator[Violation]:
    """Each configured role by itself."""
    for role, worker in config.roles.items():
        yield from _switch_rules(role, worker)
        options = worker.strategy_args.strategy_config
        if isinstance(options, Fsdp2Config):
            yield from _fsdp_rules(role, worker, options)


def _switch_rules(role: str, worker: WorkerConfig) -> Iterator[Violation]:
    if worker.model_args.torch_compile and worker.model_args.use_liger:
        expected = "one of torch_compile and use_liger: the compiler makes fused norms and MLPs of its own"
        yield Violation(f"{role}.model_args.use_liger", expected, "remove one of them", True)


def _fsdp_rules(role: str, worker: WorkerConfig, options: Fsdp2Config) -> Iterator[Violation]:
    path = f"{role}.strategy_args.strategy_config"
    if options.offload_policy and worker.ranks == 1:
        expected = "false with one rank, which isn't sharded; model_args.activation_offload saves memory there"
        yield Violation(f"{path}.offload_policy", expected, "more ranks, or remove it", True)
    if isinstance(worker, TrainConfig) and options.reduce_dtype == "fp16":
        expected = "fp32 or bf16: small gradients vanish in fp16, and there is no loss scaling"
        yield Violation(f"{path}.reduce_dtype", expected, f"{path}.reduce_dtype=bf16", "fp16")


def accelerator_needs(config: RunConfig) -> Iterator[tuple[str, object, str | None, str]]:
    """What only runs on an accelerator: (key, its value, package it needs or None, what to say without the package)."""
    for role, worker in config.roles.items():
        args, options = worker.model_args, worker.strategy_args.strategy_config
        for key in ("use_liger", "use_fused_kernels"):
            if getattr(args, key):
                yield f"{role}.model_args.{key}", True, "liger_kernel", LIGER_MISSING
        if args.attn_implementation == "fa2":
            yield f"{role}.model_args.attn_implementation", "fa2", "flash_attn", FLASH_MISSING
        if isinstance(options, Fsdp2Config) and options.offload_policy:
            yield f"{role}.strategy_args.strategy_config.offload_policy", True, None, ""
        if isinstance(options, DeepSpeedConfig):
            for key in QUANTIZED_KEYS:
                if options.zero_optimization.get(key) is True:
                    yield f"{role}.strategy_args.strategy_config.zero_optimization.{key}", True, None, ""
