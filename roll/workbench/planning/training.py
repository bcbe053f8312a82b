"""Memory of roles on training backends: the policy, the critic, references, teachers, reward models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.configs.schema.worker_config import ForwardConfig, TrainConfig
from roll.workbench.planning.activations import Activations, MicroBatchShape, Numbers, activations, forward_bytes
from roll.workbench.planning.architecture import Architecture
from roll.workbench.planning.items import Item, RoleMemory, lasting, passing
from roll.workbench.planning.machines import GIB
from roll.workbench.planning.megatron_activations import megatron_activations, megatron_forward_bytes
from roll.workbench.planning.parameters import BYTES, Parameter, role_parameters
from roll.workbench.planning.role_states import states_of
from roll.workbench.planning.states import States
from roll.workbench.planning.weight_sync import TRAINER, weight_sync

CONTEXT = int(0.6 * GIB)
"""Of an accelerator, what CUDA and its libraries take in each process."""
COLLECTIVES = int(0.4 * GIB)
"""Of an accelerator, what NCCL takes in a process that has peers."""
HOST_PROCESS = int(2.0 * GIB)
"""Of the host, a process with torch and CUDA."""
CPU_PROCESS = int(0.5 * GIB)
"""Of the host, a process with torch alone."""


@dataclass(frozen=True, kw_only=True)
class TrainedRole:
    """What the plan of one rank is made from."""

    config: RunConfig
    role: str
    worker: ForwardConfig
    arch: Architecture
    rank: int
    on_accelerator: bool

    @property
    def kind(self) -> str:
        """Return what its model gives: `policy`, `value` or `reward`."""
        return self.config.kind_of(self.role)

    @property
    def trains(self) -> bool:
        """Return whether it has an optimizer."""
        return self.role in self.config.trained_roles and not self.config.only_validates

    @cached_property
    def parameters(self) -> list[Parameter]:
        """Return parameters of the whole Hugging Face module."""
        return role_parameters(self.arch, self.worker.model_args, self.kind, trains=self.trains, role=self.role)

    @cached_property
    def states(self) -> States:
        """Return what the rank holds."""
        l2 = self.role == "actor_train" and self.config.l2_coef > 0
        return states_of(
            self.arch, self.worker, role=self.role, kind=self.kind, trains=self.trains, rank=self.rank, l2=l2
        )

    @property
    def numbers(self) -> Numbers:
        """Return the numbers of activations: autocast keeps the stream between layers in the type of the weights."""
        options, args = self.worker.strategy_args.strategy_config, self.worker.model_args
        computed = BYTES[args.dtype]
        if isinstance(options, Fsdp2Config) and options.param_dtype:
            computed = BYTES[options.param_dtype]
        residual = 4 if self.autocast else computed
        return Numbers(computed=computed, residual=residual, on_accelerator=self.on_accelerator)

    @property
    def autocast(self) -> bool:
        """Return whether float32 weights compute in another type without a copy of their own."""
        options, half = self.worker.strategy_args.strategy_config, self.worker.model_args.dtype != "fp32"
        if isinstance(options, Fsdp2Config):
            half = (options.param_dtype or self.worker.model_args.dtype) != "fp32"
            return half and self.trains and self.worker.ranks == 1
        return half and self.trains and isinstance(options, DeepSpeedConfig) and options.stage == 0

    @property
    def streams(self) -> bool:
        """Return whether ranks read what they keep into an empty module, and never the whole model to throw it away."""
        options = self.worker.strategy_args.strategy_config
        if isinstance(options, DeepSpeedConfig):
            return options.fills_shares and self.kind != "reward"
        return isinstance(options, Fsdp2Config) and self.worker.ranks > 1 and self.kind != "reward"

    @property
    def keeps_unsharded(self) -> bool:
        """Return whether weights and gradients stay whole from one micro-batch to the next."""
        options = self.worker.strategy_args.strategy_config
        if not isinstance(options, Fsdp2Config) or options.shard_between_micro_batches:
            return False
        return self.trains and self.worker.ranks > 1 and self.micro_batches > 1

    def waits(self, key: str) -> bool:
        """Return whether a switch of FSDP2 keeps states on the host while nobody uses them."""
        return self.on_accelerator and bool(getattr(self.worker.strategy_args.strategy_config, key, False))

    def batch(self, *, training: bool) -> MicroBatchShape:
        """Return the largest micro-batch that the configuration allows."""
        worker, longest = self.worker, self.config.max_sequence_length
        dynamic, rows, budget = worker.use_dynamic_batching_in_infer, worker.infer_batch_size, None
        multiple = worker.sequence_length_round_in_infer
        if dynamic:
            budget = worker.max_tokens_per_microbatch_in_infer
        if training and isinstance(worker, TrainConfig):
            dynamic, rows = worker.use_dynamic_batching_in_train, worker.training_args.per_device_train_batch_size
            budget = worker.max_tokens_per_microbatch_in_train if dynamic else None
            multiple = worker.sequence_length_round_in_train
        else:
            # A step has no more rows than that.
            rows = min(rows, max(1, -(-self.config.batch.rows // max(1, worker.data_parallel))))
        width = -(-longest // multiple) * multiple
        split = worker.model_args.sequence_ranks
        packed = worker.use_sequence_packing or split > 1
        if dynamic and budget:
            rows = max(1, budget // width)
            tokens = max(budget, width) if packed else rows * width
        else:
            tokens = rows * width
        answered = self.config.response_length if isinstance(self.config, RLConfig) else longest - 1
        scored = min(tokens, -(-tokens // longest) * answered)
        shared = isinstance(worker.strategy_args.strategy_config, Fsdp2Config | DeepSpeedConfig | MegatronConfig)
        if shared and worker.use_prefix_sharing is not False:
            scored = tokens  # answers to one prompt may fill a pass
        return MicroBatchShape(
            rows=rows, width=width, tokens=-(-tokens // split), scored=-(-scored // split), packed=packed
        )

    @property
    def micro_batches(self) -> int:
        """Return forward and backward passes of an optimizer step."""
        assert isinstance(self.worker, TrainConfig)
        args = self.worker.training_args
        if not self.worker.use_dynamic_batching_in_train:
            return args.gradient_accumulation_steps
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return -(-rows // self.batch(training=True).rows)


def training_memory(role: TrainedRole) -> RoleMemory:
    """Return the memory of one rank of a role that trains or scores."""
    states, on_device = role.states, role.on_accelerator
    process = (CONTEXT + (COLLECTIVES if role.worker.ranks > 1 else 0)) if on_device else CPU_PROCESS
    # What waits on the host comes to the device for as long as it is used.
    waiting = states.weights if role.waits("param_offload") else 0
    stepped = states.optimizer if role.waits("optimizer_offload") else 0
    awake = lasting(
        ("weights", states.weights - waiting),
        ("gradients", states.retained_gradients),
        ("optimizer", states.optimizer - stepped),
        ("sync buffers", states.buffers),
        ("process", process),
    )
    score = _forward(role)
    phases = {
        "start": passing(("weights", _built(role) if on_device else _read(role))),
        "score": passing(("weights", waiting), ("activations", score), ("gathered weights", states.gathered)),
    }
    host_phases: dict[str, int] = {}
    if role.trains:
        made = _activations(role)
        phases["train"] = (*passing(("weights", waiting)), *_train(role, states, made, stepped))
        host_phases["train"] = made.host
        # New weights go from this role to the engines; a critic has no engine.
        sync = weight_sync(role.config, role.arch, on_accelerator=on_device) if role.role == TRAINER else None
        if sync is not None:
            phases["sync"] = passing(("weights", waiting), ("sync buffers", sync.in_trainer(role.rank)))
    moved = states.weights + states.optimizer if on_device else 0
    return RoleMemory(
        role=role.role,
        awake=awake,
        asleep=lasting(("process", process)) if on_device else awake,
        phases=phases,
        host_awake=states.host + waiting + stepped + (HOST_PROCESS if on_device else 0),
        host_asleep=states.host + (HOST_PROCESS + moved if on_device else 0),
        host_start=HOST_PROCESS + _read(role) if on_device else 0,
        host_phases=host_phases,
    )


def _forward(role: TrainedRole) -> int:
    options = role.worker.strategy_args.strategy_config
    batch = role.batch(training=False)
    if isinstance(options, MegatronConfig):
        return megatron_forward_bytes(role.arch, options, role.numbers, batch, kind=role.kind)
    shared = role.worker.model_args.ulysses_size
    return forward_bytes(role.arch, role.numbers, batch, kind=role.kind, shared=shared if shared > 1 else 1)


def _activations(role: TrainedRole) -> Activations:
    options, args = role.worker.strategy_args.strategy_config, role.worker.model_args
    checkpointed, batch = not args.disable_gradient_checkpointing, role.batch(training=True)
    if isinstance(options, MegatronConfig):
        stage = role.rank // max(1, role.worker.ranks // options.pipeline_model_parallel_size)
        return megatron_activations(
            role.arch, options, role.numbers, batch, kind=role.kind, checkpointed=checkpointed, stage=stage,
            micro_batches=role.micro_batches,
        )  # fmt: skip
    return activations(
        role.arch, role.numbers, batch, kind=role.kind, checkpointed=checkpointed, offloaded=args.activation_offload,
        selective=args.recompute_granularity == "selective",
    )  # fmt: skip


def _train(role: TrainedRole, states: States, made: Activations, stepped: int) -> tuple[Item, ...]:
    """Return what the worst moment of an optimizer step adds: in the backward pass, or while weights change.

    `stepped`: bytes of the optimizer that are on the device only while it steps.
    """
    options = role.worker.strategy_args.strategy_config
    gradients = states.gradients - states.retained_gradients
    backward = made.total + states.gathered + states.passing + _unreduced(role) + _casts(role)
    # Gradients of earlier micro-batches are there; those of the only one grow while activations go.
    beside = gradients if role.micro_batches > 1 or isinstance(options, MegatronConfig) else 0
    stepping = _step(role, states) + stepped
    if backward + beside >= gradients + stepping:
        return passing(
            ("gradients", beside + _unreduced(role) + states.passing),
            ("activations", made.saved + (made.moment if made.moment >= made.logits else 0) + _casts(role)),
            ("logits", made.logits if made.logits > made.moment else 0),
            ("gathered weights", states.gathered),
        )
    return passing(("gradients", gradients), ("optimizer", stepping))


def _unreduced(role: TrainedRole) -> int:
    """Return gradients that aren't reduced yet: of the layer that FSDP sums, or of all that ZeRO 1 will sum."""
    options, parameters = role.worker.strategy_args.strategy_config, role.parameters
    trained = [parameter for parameter in parameters if parameter.trains]
    computed = role.numbers.computed
    if isinstance(options, Fsdp2Config) and role.worker.ranks > 1:
        groups: dict[int | None, int] = {}
        for parameter in trained:
            groups[parameter.block] = groups.get(parameter.block, 0) + parameter.size
        largest, reduced = max(groups.values(), default=0), BYTES[options.reduce_dtype]
        unsharded = sum(groups.values()) if role.keeps_unsharded else 0
        return largest * (computed + reduced) + unsharded * reduced
    if isinstance(options, DeepSpeedConfig) and options.stage in (1, 2):
        size = sum(parameter.size for parameter in trained)
        most = options.zero_optimization.get("reduce_bucket_size", 500_000_000) if options.stage == 2 else size
        return min(size, most if isinstance(most, int) else 500_000_000) * computed
    return max((parameter.size for parameter in trained), default=0) * computed


def _casts(role: TrainedRole) -> int:
    """Return copies of the weights that autocast makes: of all that compute, or of a layer that is computed again."""
    if not role.autocast:
        return 0
    matrices = [parameter for parameter in role.parameters if len(parameter.shape) > 1]
    if role.worker.model_args.disable_gradient_checkpointing:
        return 2 * sum(parameter.size for parameter in matrices)
    layer = sum(parameter.size for parameter in matrices if parameter.block == 0)
    head = role.arch.vocab * role.arch.hidden if role.kind == "policy" else 0
    return 2 * (layer + head)


def _step(role: TrainedRole, states: States) -> int:
    """Return AdamW's temporary memory: on an accelerator FSDP2's is fused, Megatron's takes all tensors at once."""
    options = role.worker.strategy_args.strategy_config
    trained = states.optimizer // 8 * 4 if role.numbers.residual == 4 else states.optimizer // 12 * 4
    if isinstance(options, DeepSpeedConfig):
        return trained if options.stage in (1, 2) and role.numbers.computed == 4 else 0
    if isinstance(role.worker, TrainConfig) and role.worker.training_args.optimizer == "muon":
        # Each matrix is whole for a moment: its update, and four products on the way to it.
        matrices = [p.size for p in role.parameters if p.trains and p.block is not None and len(p.shape) > 1]
        return 5 * 4 * max(matrices, default=0)
    if role.on_accelerator:
        return trained if isinstance(options, MegatronConfig) else 0
    largest = max((parameter.size for parameter in role.parameters if parameter.trains), default=0)
    return 2 * 4 * -(-largest // max(1, role.worker.ranks))


def _built(role: TrainedRole) -> int:
    """Return bytes on the accelerator until the backend has taken the module over."""
    options, states = role.worker.strategy_args.strategy_config, role.states
    if isinstance(options, MegatronConfig):
        return states.weights  # tensor by tensor
    if isinstance(options, DeepSpeedConfig):
        return states.weights + _largest(role) if options.stage == 3 else _module_bytes(role)
    return states.weights + _largest_unit(role) if role.streams else _module_bytes(role)


def _read(role: TrainedRole) -> int:
    """Return bytes on the host while a rank reads its weights: without an accelerator all of them are there."""
    options, states = role.worker.strategy_args.strategy_config, role.states
    if isinstance(options, MegatronConfig):
        return states.weights
    if not role.streams:
        return _module_bytes(role)
    stored = states.host_weights + (0 if role.on_accelerator else states.weights)
    if isinstance(options, Fsdp2Config):
        return stored + _largest_unit(role)
    assert isinstance(options, DeepSpeedConfig)
    if options.stage == 3:
        return stored + _largest(role)
    if options.stage and role.trains:
        return 2 * _module_bytes(
            role
        )  # flat beside itself, on the host also where the accelerator has no room for both
    return _largest(role) if role.on_accelerator else _module_bytes(role)


def _module_bytes(role: TrainedRole) -> int:
    """Return bytes of the whole module as each rank reads it: DeepSpeed makes weights that it reads narrow at once."""
    options = role.worker.strategy_args.strategy_config
    narrow = role.streams and isinstance(options, DeepSpeedConfig) and options.stage > 0
    return sum(p.size * role.numbers.computed if narrow else p.nbytes for p in role.parameters)


def _largest(role: TrainedRole) -> int:
    """Return bytes of the largest tensor in the type that computes: ZeRO 3 cuts one after the other."""
    return max(parameter.size for parameter in role.parameters) * role.numbers.computed


def _largest_unit(role: TrainedRole) -> int:
    """Return bytes of the largest layer, or of what lies outside the layers: they are sharded one after the other."""
    units: dict[int | None, int] = {}
    for parameter in role.parameters:
        units[parameter.block] = units.get(parameter.block, 0) + parameter.nbytes
    return max(units.values())
