"""Memory of engines: weights and KV cache of `hf_infer`, `vllm` and `sglang`."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.schema.engine_config import EngineConfig, SglangConfig, VllmConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.configs.schema.worker_config import WorkerConfig
from roll.workbench.planning.activations import MicroBatchShape, Numbers, forward_bytes
from roll.workbench.planning.architecture import Architecture
from roll.workbench.planning.items import RoleMemory, lasting, passing
from roll.workbench.planning.machines import GIB
from roll.workbench.planning.parameters import BYTES
from roll.workbench.planning.training import CONTEXT, CPU_PROCESS, HOST_PROCESS
from roll.workbench.planning.weight_sync import ENGINE, weight_sync

BLOCK = 64
"""Positions by which the cache of `hf_infer` grows."""
PREFILL = 8192
"""Tokens of one prefill of `hf_infer`."""
BATCHED = 8192
"""Tokens of a pass of vLLM and SGLang, where the user says nothing."""
GRAPHS = int(0.8 * GIB)
"""CUDA graphs of an engine, outside its share of the device."""
CPU_KV_CACHE = 2 * GIB
"""Of vLLM without an accelerator."""
STATIC = 0.85
"""Share that SGLang chooses by itself, about."""


@dataclass(frozen=True, kw_only=True)
class EngineRole:
    """What the plan of one device of an engine is made from."""

    config: RunConfig
    role: str
    worker: WorkerConfig
    arch: Architecture
    on_accelerator: bool
    device_bytes: int

    @property
    def width(self) -> int:
        """Return bytes of a number of its weights and cache."""
        return BYTES[self.worker.model_args.dtype]

    @property
    def longest(self) -> int:
        """Return tokens of prompt and response."""
        return self.config.max_sequence_length

    @property
    def requests(self) -> int:
        """Return responses that one engine works on at once, at most."""
        config = self.config
        if not isinstance(config, RLConfig):
            return 1
        step = -(-config.groups_per_step * (config.group_size + config.redundancy) // self.worker.ranks)
        more = config.max_additional_running_prompts * config.group_size if config.is_use_additional_prompts else 0
        return max(1, min(config.max_running_requests, step + more))

    @property
    def waits(self) -> bool:
        """Return whether a step has more responses than an engine works on at once."""
        config = self.config
        if not isinstance(config, RLConfig):
            return False
        total = -(-config.groups_per_step * (config.group_size + config.redundancy) // self.worker.ranks)
        return config.is_use_additional_prompts or total > self.requests or config.async_generation_ratio > 0

    def cache_per_token(self, devices: int = 1) -> int:
        """Return bytes of keys and values of a position on one device; fewer key heads than devices are repeated."""
        heads = max(1, self.arch.kv_heads // devices)
        return 2 * self.arch.attending * heads * self.arch.head_dim * self.width

    @property
    def states_per_row(self) -> int:
        """Return bytes of what recurrent layers keep of a row: states in float32, and the last tokens."""
        mixer = self.arch.mixer
        return 0 if mixer is None else 4 * mixer.states * sum(self.arch.recurrent)


def engine_memory(role: EngineRole) -> RoleMemory:
    """Return the memory of one device of an engine."""
    options = role.worker.strategy_args.strategy_config
    if isinstance(options, EngineConfig):
        return _served(role, options)
    return _hf_infer(role)


def _hf_infer(role: EngineRole) -> RoleMemory:
    arch, width, rows = role.arch, role.width, role.requests
    weights = arch.count() * width
    prompt = role.config.prompt_length if isinstance(role.config, RLConfig) else role.longest
    # The last token of a response is never fed. Where the first block is large enough, only what may come has room.
    blocks = -(-(role.longest - 1) // BLOCK) * BLOCK
    positions = min(role.longest, blocks) if prompt + 1 > blocks - BLOCK else blocks
    cache = rows * (positions * role.cache_per_token() + role.states_per_row)
    # Keys and then values of a layer are copied where they grow. Rows of different lengths need a mask, with which an
    # accelerator's kernel gets them repeated for every query head; the CPU's doesn't
    # (`strategies/engines/hf/shared_heads.py`).
    layer = rows * positions * role.cache_per_token() // max(1, arch.attending)
    repeated = layer * arch.heads // arch.kv_heads if role.on_accelerator else layer // 2
    fill = max(prompt, min(PREFILL, rows * prompt))
    at_once = MicroBatchShape(rows=max(1, fill // prompt), width=prompt, tokens=fill, scored=0)
    numbers = Numbers(computed=width, residual=width)
    prefill = forward_bytes(arch, numbers, at_once, kind="value")
    drawing = rows * arch.vocab * (width + 3 * 4)
    decoding = max(repeated, drawing)
    # Where more responses wait, prompts are read while others are at their end.
    begins = cache * prompt // role.longest + prefill
    working = max(decoding, prefill) if role.waits else max(decoding, begins - cache)
    process = CONTEXT if role.on_accelerator else CPU_PROCESS
    own = 0 if (borrows := _borrows(role)) else weights
    awake = lasting(("weights", own), ("process", process))
    return RoleMemory(
        role=role.role,
        awake=awake,
        asleep=lasting(("process", process)) if role.on_accelerator else awake,
        phases={
            **({"start": passing(("weights", weights))} if borrows else {}),
            "generate": passing(
                ("KV cache", cache),
                ("activations", 0 if working == drawing else working),
                ("logits", drawing if working == drawing else 0),
            ),
            "sync": passing(("sync buffers", _largest(arch) * 4 + _buckets(role))),
        },
        host_awake=HOST_PROCESS if role.on_accelerator else 0,
        host_asleep=HOST_PROCESS + weights if role.on_accelerator else 0,
        host_start=HOST_PROCESS + weights if role.on_accelerator else 0,
        notes=(f"room for {rows} responses of {role.longest} tokens at once",),
    )


def _borrows(role: EngineRole) -> bool:
    """Return whether it computes with the trainer's weights from the first sync on, as `Fsdp2Strategy.lend_weights`."""
    config, trainer = role.config, role.config.roles.get("actor_train")
    if trainer is None or role.role != ENGINE or role.on_accelerator or config.executor != "inline":
        return False
    options = trainer.strategy_args.strategy_config
    if not isinstance(options, Fsdp2Config) or trainer.model_args.uses_lora:
        return False
    takes_turns = isinstance(config, RLConfig) and config.async_generation_ratio == 0 and not config.only_validates
    computed = options.param_dtype or trainer.model_args.dtype
    return takes_turns and role.worker.model_args.dtype == computed == "fp32"


def _served(role: EngineRole, options: EngineConfig) -> RoleMemory:
    """Return the memory of vLLM or SGLang, which take a share at the start and keep what is left of it as KV cache."""
    arch, width, devices = role.arch, role.width, options.devices
    kind = options.quantization if isinstance(options, VllmConfig) else options.engine_args.get("quantization")
    quantised = str(kind).startswith(("fp8", "int8", "bitsandbytes"))
    weights = -(-arch.count() * (1 if quantised else width) // devices)
    batched = options.engine_args.get("chunked_prefill_size")
    if isinstance(options, VllmConfig):
        batched = options.max_num_batched_tokens
    tokens = batched if isinstance(batched, int) and batched > 0 else BATCHED
    numbers = Numbers(computed=width, residual=width)
    at_once = MicroBatchShape(rows=1, width=tokens, tokens=tokens, scored=0, packed=True)
    passes = forward_bytes(arch, numbers, at_once, kind="value", shared=options.tensor_parallel_size)
    passes += role.requests * arch.vocab * 4 * 2
    share, inside = _share(role, options)
    cache = max(0, share - weights - (passes if inside else 0))
    room = cache // max(1, role.cache_per_token(options.tensor_parallel_size) * role.longest)
    graphs = GRAPHS if role.on_accelerator and not _eager(options) else 0
    process = (CONTEXT if role.on_accelerator else CPU_PROCESS) + graphs
    awake = lasting(("weights", weights), ("KV cache", cache), ("process", process))
    adapters = isinstance(role.config, RLConfig) and role.config.lora_sync == "adapters"
    level = options.level_of_sleep(adapters=adapters) if isinstance(options, VllmConfig) else 2
    sleeps = role.on_accelerator and level > 0
    low = weights + (passes if inside else 0) + role.longest * role.cache_per_token(options.tensor_parallel_size)
    return RoleMemory(
        role=role.role,
        awake=awake,
        asleep=lasting(("process", process)) if sleeps else awake,
        phases={
            "generate": passing(("activations", passes)),
            "sync": passing(("sync buffers", _largest(arch) * width + _buckets(role))),
        },
        host_awake=HOST_PROCESS if role.on_accelerator else 0,
        host_asleep=HOST_PROCESS + (weights if level == 1 else 0) if role.on_accelerator else 0,
        limit=share if low > share else None,
        notes=(
            f"room for {room} responses of {role.longest} tokens at once"
            + (f", {role.requests} are asked for: others wait" if room < role.requests else ""),
        ),
    )


def _share(role: EngineRole, options: EngineConfig) -> tuple[int, bool]:
    """Return (bytes of a device that weights and KV cache get, whether passes are inside them, too)."""
    if isinstance(options, VllmConfig):
        explicit_cache = options.engine_args.get("kv_cache_memory_bytes")
        if isinstance(explicit_cache, int) or not role.on_accelerator:
            cache = explicit_cache if isinstance(explicit_cache, int) else CPU_KV_CACHE
            return cache + -(-role.arch.count() * role.width // options.devices), False
        return int(options.gpu_memory_utilization * role.device_bytes), True
    assert isinstance(options, SglangConfig)
    most = options.engine_args.get("max_total_tokens")
    if isinstance(most, int) or not role.on_accelerator:
        tokens = most if isinstance(most, int) else role.requests * role.longest
        cache = tokens * role.cache_per_token(options.tensor_parallel_size)
        return cache + -(-role.arch.count() * role.width // options.devices), False
    return int((options.mem_fraction_static or STATIC) * role.device_bytes), False


def _eager(options: EngineConfig) -> bool:
    if isinstance(options, VllmConfig):
        return bool(options.enforce_eager)
    return bool(options.engine_args.get("disable_cuda_graph"))


def _buckets(role: EngineRole) -> int:
    """Return bytes of weights on their way; a judge keeps the weights that it has."""
    sync = weight_sync(role.config, role.arch, on_accelerator=role.on_accelerator) if role.role == ENGINE else None
    return 0 if sync is None else sync.in_engine()


def _largest(arch: Architecture) -> int:
    """Return numbers of the largest tensor, which travels in one piece."""
    return max(weight.size for weight in arch.parameters())
