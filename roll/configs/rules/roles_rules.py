"""Rules about roles: placement, backends, models. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.catalog.entries import OWN_PATH
from roll.configs.catalog.strategy_table import strategies_for
from roll.configs.errors import Violation, no_effect, problem
from roll.configs.rules.layout_rules import layout_rules, sharing_rules
from roll.configs.schema.engine_config import EngineConfig
from roll.configs.schema.judge_config import JudgeConfig
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.configs.schema.worker_config import ALL_LINEAR, ForwardConfig, TrainConfig, WorkerConfig


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


def role_rules(config: RunConfig) -> Iterator[Violation]:
    """Check each configured role by itself."""
    for role, worker in config.sections.items():
        if isinstance(worker, JudgeConfig) and worker.endpoint is not None:
            continue  # nothing of it is started
        name = worker.strategy_args.strategy_name
        kind = "actor_train" if isinstance(worker, TrainConfig) else "reference"
        allowed = strategies_for(role) or strategies_for(kind)  # a role of the user's own does the work of its kind
        if name not in allowed and not OWN_PATH.match(name):
            path = f"{role}.strategy_args.strategy_name"
            expected = f"{' or '.join(allowed)}, which can do the work of {role}"
            twin = [other for other in allowed if other.split("_")[0] == name.split("_")[0]]
            yield Violation(path, expected, f"{path}={(twin or allowed)[0]}", name)
        yield from _model_rules(config, role, worker)
        yield from _size_rules(config, role, worker)
        yield from layout_rules(role, worker)
        if isinstance(worker, ForwardConfig):
            yield from sharing_rules(role, worker)
        if isinstance(worker, TrainConfig):
            yield from training_rules(role, worker)


def _model_rules(config: RunConfig, role: str, worker: WorkerConfig) -> Iterator[Violation]:
    args, path = worker.model_args, f"{role}.model_args"
    if args.model_name_or_path is None and not config.default_model(role):
        key = "reward_pretrain" if role.startswith("reward_model") else "pretrain"
        if isinstance(worker, JudgeConfig):
            key = f"{path}.model_name_or_path"
            yield Violation(key, "the judge's model, because judge.endpoint is null", f"{key}=<folder or hub id>", None)
            return
        expected = f"a model: neither this nor {key} names one"
        yield Violation(f"{path}.model_name_or_path", expected, f"{key}=<folder or hub id>", None)
    options = worker.strategy_args.strategy_config
    param_dtype = options.param_dtype if isinstance(options, Fsdp2Config) else None
    if isinstance(worker, TrainConfig) and "fp16" in (args.dtype, param_dtype):
        expected = "bf16 or fp32 where a role trains: small gradients vanish in fp16, and there is no loss scaling"
        key = f"{path}.dtype" if args.dtype == "fp16" else f"{role}.strategy_args.strategy_config.param_dtype"
        yield Violation(key, expected, f"{key}=bf16", "fp16")
    if ALL_LINEAR in args.lora_target and len(args.lora_target) > 1:
        key, expected = f"{path}.lora_target", f"{ALL_LINEAR} alone, or names of layers alone"
        yield Violation(key, expected, f"{key}={ALL_LINEAR}", list(args.lora_target))
    if args.attn_implementation == "fa2" and args.dtype == "fp32":
        what = "flash attention computes in half precision, and dtype is fp32"
        yield problem(f"{path}.attn_implementation", what, f"{path}.dtype=bf16, or sdpa", "fa2")


def _size_rules(config: RunConfig, role: str, worker: WorkerConfig) -> Iterator[Violation]:
    mapping, per_rank = worker.device_mapping, worker.num_gpus_per_worker
    options = worker.strategy_args.strategy_config
    needed = options.devices if isinstance(options, EngineConfig) else 1
    if per_rank != needed:
        yield _devices(role, worker, needed)
    elif mapping and len(mapping) % per_rank:
        expected = f"slots for whole engines, {per_rank} each: {len(mapping)} leave {len(mapping) % per_rank} over"
        fix = f"{len(mapping) // per_rank * per_rank or per_rank} slots"
        yield Violation(f"{role}.device_mapping", expected, fix, list(mapping))
    elif mapping and worker.world_size is not None and worker.world_size * per_rank != len(mapping):
        expected = f"{len(mapping) // per_rank}, the number of slots in device_mapping"
        yield Violation(f"{role}.world_size", expected, "remove it: device_mapping says enough", worker.world_size)
    if config.executor == "inline" and worker.ranks > 1:
        expected = f"one rank with executor inline, not {worker.ranks}"
        yield Violation(f"{role}.device_mapping", expected, "executor=ray, or one slot", _placement_of(worker))
    if isinstance(options, Fsdp2Config):
        yield from _fsdp_rules(role, worker, options)
    beyond = [slot for slot in worker.slots if slot >= config.num_nodes * config.num_gpus_per_node]
    if beyond:
        slots = f"{config.num_nodes} x {config.num_gpus_per_node} = {config.num_nodes * config.num_gpus_per_node}"
        expected = f"slots below num_nodes x num_gpus_per_node = {slots}; {beyond[0]} isn't there"
        fix = f"num_gpus_per_node={-(-(beyond[-1] + 1) // config.num_nodes)}, or fewer slots"
        yield Violation(f"{role}.device_mapping", expected, fix, _placement_of(worker))


def _fsdp_rules(role: str, worker: WorkerConfig, options: Fsdp2Config) -> Iterator[Violation]:
    path = f"{role}.strategy_args.strategy_config"
    if options.fsdp_size and worker.ranks % options.fsdp_size:
        expected = f"a divisor of the role's {worker.ranks} rank(s)"
        yield Violation(f"{path}.fsdp_size", expected, "remove it", options.fsdp_size)
    if options.offload_policy and worker.ranks == 1:
        expected = "false with one rank, which isn't sharded; model_args.activation_offload saves memory there"
        yield Violation(f"{path}.offload_policy", expected, "more ranks, or remove it", True)
    if isinstance(worker, TrainConfig) and options.reduce_dtype == "fp16":
        expected = "fp32 or bf16: small gradients vanish in fp16, and there is no loss scaling"
        yield Violation(f"{path}.reduce_dtype", expected, f"{path}.reduce_dtype=bf16", "fp16")


def _devices(role: str, worker: WorkerConfig, needed: int) -> Violation:
    """Devices per rank against what the backend uses."""
    key, options = f"{role}.num_gpus_per_worker", worker.strategy_args.strategy_config
    name = worker.strategy_args.strategy_name
    if not isinstance(options, EngineConfig):
        return Violation(key, f"1: {name} uses one device per rank", "use more ranks", worker.num_gpus_per_worker)
    tensor, path = options.tensor_parallel_size, f"{role}.strategy_args.strategy_config"
    sizes = f"tensor_parallel_size {tensor} x {options.pipeline_key} {needed // tensor}"
    expected = f"{needed}, the devices of one engine: {sizes} = {needed}"
    fix = f"{key}={needed}, or {path}.tensor_parallel_size={worker.num_gpus_per_worker}"
    return Violation(key, expected, fix, worker.num_gpus_per_worker)


def placement_rules(config: RunConfig) -> Iterator[Violation]:
    """Check ranks against nodes."""
    cpus, slots = config.ray_init.num_cpus, config.num_nodes * config.num_gpus_per_node
    if cpus is not None and 100 * cpus < slots:
        expected = f"at least {-(-slots // 100)}: each of the {slots} device slots takes 1/100 of a CPU"
        yield Violation("ray_init.num_cpus", expected, f"ray_init.num_cpus={-(-slots // 100)}", cpus)
    if config.executor == "inline" and config.num_nodes > 1:
        yield Violation("num_nodes", "1 with executor inline", "executor=ray", config.num_nodes)
    for role, rank in config.placement.split_ranks():
        expected = f"ranks within one node; rank {rank} has slots on two"
        yield Violation(f"{role}.device_mapping", expected, "reorder the slots", _placement_of(config.roles[role]))


def _placement_of(worker: WorkerConfig) -> object:
    return list(worker.device_mapping) if worker.device_mapping else f"world_size {worker.ranks}"
