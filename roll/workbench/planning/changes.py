"""What could be changed so that a run fits, or uses what is free: keys with values, tried on the plan itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.configs.schema.batch_plan import divisors
from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.engine_config import VllmConfig
from roll.configs.schema.key_values import changed
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config, HfInferConfig
from roll.configs.schema.worker_config import ForwardConfig, TrainConfig, WorkerConfig
from roll.workbench.planning.machines import Machines
from roll.workbench.planning.plan import MemoryPlan, plan_memory

_ROUNDS = 12
"""Changes on top of each other that are tried."""


@dataclass(frozen=True)
class Change:
    """Keys with their new values."""

    keys: Mapping[str, Any]
    cost: int
    """How much it takes away: 0 nothing, 1 a little time, 2 time, 3 numbers change by rounding."""

    def __str__(self) -> str:
        return " ".join(f"{key}={yaml_value(value)}" for key, value in self.keys.items())

    def __add__(self, other: Change) -> Change:
        return Change({**self.keys, **other.keys}, max(self.cost, other.cost))


def yaml_value(value: Any) -> str:
    """Return a value as an override on the command line has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {yaml_value(entry)}" for key, entry in value.items()) + "}"
    return str(value)


# --- what there is to change ------------------------------------------------------------------------------------------


def smaller(config: RunConfig, machines: Machines) -> Iterator[Change]:
    """Yield changes that take less memory, one at a time, without another mini-batch."""
    for role, worker in config.roles.items():
        options = worker.strategy_args.strategy_config
        if isinstance(worker, TrainConfig) and role in config.trained_roles:
            yield from _of_training(config, role, worker)
        if isinstance(worker, ForwardConfig):
            yield from _of_passes(config, role, worker)
            yield from _of_backend(config, role, worker, machines)
        if isinstance(options, VllmConfig):
            yield from _of_vllm(role, worker, options)
        if isinstance(options, HfInferConfig) and isinstance(config, RLConfig) and config.max_running_requests > 1:
            yield Change({"max_running_requests": config.max_running_requests // 2}, 1)
        if worker.model_args.dtype in ("fp32", "auto"):
            yield Change({f"{role}.model_args.dtype": "bf16"}, 3)
    if isinstance(config, RLConfig) and config.model_update_buffer_size_mb > 64:
        yield Change({"model_update_buffer_size_mb": 64}, 1)


def _of_training(config: RunConfig, role: str, worker: TrainConfig) -> Iterator[Change]:
    args = worker.training_args
    if worker.model_args.disable_gradient_checkpointing:
        yield Change({f"{role}.model_args.disable_gradient_checkpointing": False}, 2)
    elif worker.model_args.recompute_granularity == "selective":
        yield Change({f"{role}.model_args.recompute_granularity": "full"}, 2)
    longest = config.max_sequence_length
    if worker.use_dynamic_batching_in_train:
        budget = worker.max_tokens_per_microbatch_in_train or longest
        if budget > longest:
            yield Change({f"{role}.max_tokens_per_microbatch_in_train": max(longest, budget // 2)}, 1)
    else:
        rows = args.per_device_train_batch_size
        for fewer in [count for count in divisors(rows) if count < rows][-2:]:
            yield micro_batch(role, worker, fewer)


def micro_batch(role: str, worker: TrainConfig, rows: int) -> Change:
    """Return the change to `rows` per pass with the same mini-batch."""
    args = worker.training_args
    product = args.per_device_train_batch_size * args.gradient_accumulation_steps
    path = f"{role}.training_args"
    return Change(
        {f"{path}.per_device_train_batch_size": rows, f"{path}.gradient_accumulation_steps": product // rows}, 1
    )


def _of_passes(config: RunConfig, role: str, worker: ForwardConfig) -> Iterator[Change]:
    if worker.use_dynamic_batching_in_infer:
        longest = config.max_sequence_length
        budget = worker.max_tokens_per_microbatch_in_infer or longest
        if budget > longest:
            yield Change({f"{role}.max_tokens_per_microbatch_in_infer": max(longest, budget // 2)}, 1)
    elif worker.infer_batch_size > 1:
        yield Change({f"{role}.infer_batch_size": worker.infer_batch_size // 2}, 1)


def _of_backend(config: RunConfig, role: str, worker: ForwardConfig, machines: Machines) -> Iterator[Change]:
    options, path = worker.strategy_args.strategy_config, f"{role}.strategy_args.strategy_config"
    trains, on_accelerator = role in config.trained_roles, machines.device is not None
    if isinstance(options, Fsdp2Config) and worker.ranks > 1 and (options.fsdp_size or worker.ranks) < worker.ranks:
        yield Change({f"{path}.fsdp_size": None}, 1)
    if isinstance(options, Fsdp2Config) and trains and not options.shard_between_micro_batches:
        yield Change({f"{path}.shard_between_micro_batches": True}, 1)
    if isinstance(options, Fsdp2Config) and on_accelerator and not options.offload_policy:
        if trains and not options.optimizer_offload:
            yield Change({f"{path}.optimizer_offload": True}, 2)
        if worker.ranks > 1 and not (options.param_offload or options.optimizer_offload):
            yield Change({f"{path}.offload_policy": True}, 2)
    if isinstance(options, DeepSpeedConfig):
        yield from _of_deepspeed(path, options, trains=trains, on_accelerator=on_accelerator)
    if isinstance(options, MegatronConfig):
        yield from _of_megatron(path, worker, options)
    elif trains and on_accelerator and not worker.model_args.activation_offload:
        yield Change({f"{role}.model_args.activation_offload": True}, 2)


def _of_deepspeed(path: str, options: DeepSpeedConfig, *, trains: bool, on_accelerator: bool) -> Iterator[Change]:
    zero, options_of_zero = f"{path}.zero_optimization", options.zero_optimization
    if options.stage < 3 and (trains or options.stage == 0):
        yield Change({f"{zero}.stage": options.stage + 1 if trains else 3}, 1)
    if trains and options.stage and not options.offloads("offload_optimizer") and on_accelerator:
        yield Change({f"{zero}.offload_optimizer": {"device": "cpu"}}, 2)
    if options.stage == 3 and not options.offloads("offload_param") and on_accelerator:
        yield Change({f"{zero}.offload_param": {"device": "cpu"}}, 2)
    if trains and options.stage and options_of_zero.get("reduce_bucket_size", 500_000_000) == 500_000_000:
        yield Change({f"{zero}.reduce_bucket_size": 50_000_000}, 1)


def _of_megatron(path: str, worker: WorkerConfig, options: MegatronConfig) -> Iterator[Change]:
    if not options.use_distributed_optimizer:
        yield Change({f"{path}.use_distributed_optimizer": True}, 0)
    room = worker.ranks // worker.model_parallel_size
    if room % 2:
        return
    tensor, stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    if tensor < 8:
        yield Change({f"{path}.tensor_model_parallel_size": 2 * tensor, f"{path}.sequence_parallel": True}, 1)
    yield Change({f"{path}.pipeline_model_parallel_size": 2 * stages}, 1)


def _of_vllm(role: str, worker: WorkerConfig, options: VllmConfig) -> Iterator[Change]:
    path = f"{role}.strategy_args.strategy_config"
    share = options.gpu_memory_utilization
    for other in (share + 0.1, share - 0.1, share - 0.2, share - 0.3):
        if 0.15 < other < 0.96:
            yield Change({f"{path}.gpu_memory_utilization": round(other, 2)}, 1)
    if options.sleep_level == 0:
        yield Change({f"{path}.sleep_level": None}, 1)
    tensor, slots = 2 * options.tensor_parallel_size, len(worker.slots)
    if tensor <= 8 and slots % tensor == 0 and worker.num_gpus_per_worker == options.devices:
        yield Change({f"{path}.tensor_parallel_size": tensor, f"{role}.num_gpus_per_worker": 2 * options.devices}, 1)


# --- the search -------------------------------------------------------------------------------------------------------

Accepted = Callable[[Mapping[str, Any]], bool]
"""Whether `roll check` takes these keys."""


def lacking(plan: MemoryPlan) -> int:
    """Return by how many bytes a plan doesn't fit, over all kinds of places; 0: it fits."""
    return sum(p.missing for p in (*plan.devices, *plan.hosts)) + sum(plan.too_small.values())


def remedies(config: RunConfig, machines: Machines, accepted: Accepted, *, most: int = 3) -> list[Change]:
    """Return single changes that make a run fit, the gentlest first."""
    changes = []
    for change in sorted(smaller(config, machines), key=lambda change: change.cost):
        plan = _tried(config, machines, change)
        if plan is not None and plan.fits and accepted(change.keys):
            changes.append(change)
        if len(changes) == most:
            break
    return changes


def make_fit(config: RunConfig, machines: Machines, accepted: Accepted) -> Change | None:
    """Return changes that together make a run fit: in each round the gentlest that suffices, or the most useful one."""
    applied = Change({}, 0)
    for _ in range(_ROUNDS):
        now = changed(config, applied.keys)
        before = lacking(plan_memory(now, machines))
        if before == 0:
            return applied
        best: tuple[float, Change] | None = None
        for change in smaller(now, machines):
            plan = _tried(now, machines, change)
            if plan is None or not accepted((applied + change).keys):
                continue
            after = lacking(plan)
            gain = (before - after) / (1 + change.cost) + (1e15 / (1 + change.cost) if after == 0 else 0)
            if gain > 0 and (best is None or gain > best[0]):
                best = (gain, change)
        if best is None:
            return None
        applied = applied + best[1]
    return None


def fill(config: RunConfig, machines: Machines, accepted: Accepted) -> Change:
    """Return larger passes that still fit: rows or tokens of a micro-batch, rows of a scoring pass."""
    applied = Change({}, 0)
    for role, worker in config.roles.items():
        if not isinstance(worker, ForwardConfig):
            continue
        for change in _larger(config, role, worker):
            plan = _tried(config, machines, applied + change)
            if plan is None or not plan.fits:
                break
            if accepted((applied + change).keys):
                applied = applied + change
    return applied


def _larger(config: RunConfig, role: str, worker: ForwardConfig) -> Iterator[Change]:
    """Yield larger micro-batches of a role, one after the other."""
    longest = config.max_sequence_length
    if isinstance(worker, TrainConfig) and role in config.trained_roles:
        args = worker.training_args
        rows = args.per_device_train_batch_size
        if worker.use_dynamic_batching_in_train:
            budget = worker.max_tokens_per_microbatch_in_train or longest
            most = rows * args.gradient_accumulation_steps * longest
            while budget < most:
                budget = min(2 * budget, most)
                yield Change({f"{role}.max_tokens_per_microbatch_in_train": budget}, 0)
        else:
            for more in divisors(rows * args.gradient_accumulation_steps):
                if more > rows:
                    yield micro_batch(role, worker, more)


def _tried(config: RunConfig, machines: Machines, change: Change) -> MemoryPlan | None:
    """Return the plan with a change; None where there is none, as with a size that ranks don't divide."""
    try:
        return plan_memory(changed(config, change.keys), machines)
    except (ValueError, ZeroDivisionError):
        return None
