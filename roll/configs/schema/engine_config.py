"""Options of `vllm` and `sglang`: what this project acts on is declared, the rest is handed on to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from roll.configs.schema.fields import number
from roll.configs.schema.strategy_options import StrategyConfig

SGLANG_COLDEST = 1e-6
"""Below this temperature SGLang is greedy, and tells log-probs at temperature 1."""

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; another one takes the next of these."""

_RESERVED = {
    "write actor_infer.model_args.model_name_or_path": ("model model_weights hf_config_path", "model_path"),
    "write actor_infer.model_args.dtype": ("dtype", "dtype"),
    "write actor_infer.model_args.trust_remote_code": ("trust_remote_code", "trust_remote_code"),
    "write actor_infer.model_args.model_config_kwargs": ("hf_overrides", "json_model_override_args"),
    "write seed at the top level; every response has a key of its own": ("seed", ""),
    "prompts and responses are token ids; the tokenizer is that of actor_train's model": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds tokens_only",
        "tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init",
    ),
    "the engine is called directly, there is no server": (
        "served_model_name",
        "served_model_name host port api_key admin_api_key",
    ),
    "it always generates": ("runner convert pooler_config", "is_embedding"),
    "log-probs are those of the distribution that tokens are drawn from, on every engine": (
        "max_logprobs logprobs_mode return_sampling_mask",
        "sampling_mask_max_tokens",
    ),
    "sampling is what generating_args say, and nothing else": ("generation_config", ""),
    "write actor_infer.generating_args": ("override_generation_config", ""),
    "weights come from the trainer; see weight_transport": (
        "weight_transfer_config worker_cls worker_extension_cls",
        "weight_version custom_weight_loader checkpoint_engine_wait_weights_before_ready",
    ),
    "write router_replay at the top level": (
        "enable_return_routed_experts aux_output_config",
        "enable_return_routed_experts",
    ),
    "write sleep_level": ("enable_sleep_mode", ""),
    "write actor_infer.device_mapping": ("device_ids", "base_gpu_id gpu_id_step"),
    "an engine's devices are processes of its own on one machine": ("distributed_executor_backend", ""),
    "engines don't span machines: give each machine its own ranks": (
        "nnodes node_rank master_addr master_port",
        "nnodes node_rank dist_init_addr nccl_port",
    ),
    "a rank of actor_infer is one engine: give it more ranks": (
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend",
        "dp_size",
    ),
    "engines get the trainer's merged weights, or with lora_sync: adapters what those need is set by the run": (
        "enable_lora max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules "
        "default_mm_loras",
        "enable_lora lora_paths max_lora_rank lora_target_modules max_loras_per_batch",
    ),
    "metrics are those of the run, see docs/metrics.md": ("disable_log_stats", ""),
    "aborts and weight updates must know every token": (
        "stream_interval",
        "stream_interval incremental_streaming_output",
    ),
    "the trainer's log-probs wouldn't know them": ("logits_processors", "enable_custom_logit_processor"),
    "write seed at the top level; SGLang has no key per response": ("", "random_seed"),
    "responses are free text": ("", "grammar_backend"),
    "write actor_train.data_args.template": ("", "chat_template"),
    "write tensor_parallel_size": ("", "tp_size"),
    "it is the run's sequence_length": ("", "context_length"),
    "write max_running_requests at the top level": ("", "max_running_requests"),
    "it is the accelerator of the rank's slots, or the CPU where there is none": ("", "device"),
    "it is on where there is an accelerator: roles on one device take turns": ("", "enable_memory_saver"),
    "the rank of actor_infer is what Ray places": ("", "use_ray"),
}
"""What to write instead of arguments that the run sets itself, or why there is nothing to write, with the names that
vLLM has for them and SGLang's."""

_GONE = {
    "vLLM no longer moves KV blocks to host memory; it computes them again": ("swap_space", ""),
    "there is one block manager": ("use_v2_block_manager", ""),
    "it has no such switch any more": ("disable_async_output_proc num_scheduler_steps", ""),
    "write max_cudagraph_capture_size, or enforce_eager": ("max_seq_len_to_capture", ""),
    "it is the accelerator of the rank's slots, or the CPU where there is none": ("device", ""),
    "write tensor_parallel_size": ("tp_size", ""),
    "requests aren't logged; see enable_log_requests": ("disable_log_requests", ""),
    "that is SGLang's word: write gpu_memory_utilization": ("mem_fraction_static", ""),
    "write pp_size": ("", "pipeline_parallel_size"),
    "that is vLLM's word: write mem_fraction_static": ("", "gpu_memory_utilization"),
    "it is the run's sequence_length": ("", "max_model_len"),
    "write max_running_requests at the top level": ("", "max_num_seqs"),
    "for false write disable_radix_cache: true": ("", "enable_prefix_caching"),
    "for true write disable_cuda_graph: true": ("", "enforce_eager"),
    "it gives back weights and KV cache while others use its device": ("", "sleep_level"),
}
"""What to say about words that vLLM, and that SGLang doesn't have (any more)."""


def _by_name(texts: Mapping[str, tuple[str, str]], engine: int) -> dict[str, str]:
    """Return what to say about each name; `engine` is its column."""
    return {name: text for text, names in texts.items() for name in names[engine].split()}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(StrategyConfig):
    """What the options of both engines have in common."""

    pipeline_key: ClassVar[str]
    """The engine's own name for the number of pipeline stages, an entry of `engine_args`."""
    reserved: ClassVar[Mapping[str, str]]
    """Arguments that the run sets itself, and what to write instead, or why there is nothing to write."""
    gone: ClassVar[Mapping[str, str]]
    """Words that the engine doesn't have (any more), and what to say about each."""
    argument_names: ClassVar[Mapping[str, str | None]] = {"engine_args": None}
    """Declared options that the engine has under another name, or with None not as an argument of its own."""

    tensor_parallel_size: int = number(1, ge=1)
    """Devices that share every matrix of one engine; divides the attention heads. `num_gpus_per_worker` is this number
    times the engine's pipeline stages."""
    load_format: str = "auto"
    """How weights are read at the start; `dummy` reads none: the first update from the trainer fills them. Not with
    `val_only`."""
    engine_args: dict[str, Any] = field(default_factory=dict, metadata={"open": True})
    """Any other argument of the engine, which may as well stand next to this key. A name that the installed engine
    doesn't have, or that another key of the run sets, is refused."""

    def knows(self, key: str) -> bool:
        """Return whether there is something to say about an entry of `engine_args` itself."""
        return key in self.reserved or key in self.gone

    @property
    def declared_arguments(self) -> dict[str, Any]:
        """Return the declared options that aren't null or an empty text, under the engine's names."""
        names = {spec.name: self.argument_names.get(spec.name, spec.name) for spec in fields(self)}
        values = {name: getattr(self, option) for option, name in names.items() if name is not None}
        return {name: value for name, value in values.items() if value not in (None, "")}

    @property
    def devices(self) -> int:
        """Devices of one engine."""
        stages = self.engine_args.get(self.pipeline_key, 1)
        return self.tensor_parallel_size * (stages if type(stages) is int else 1)


@dataclass(frozen=True, kw_only=True)
class VllmConfig(EngineConfig):
    """vLLM, one engine per rank of the role. Its arguments are those of vLLM's `EngineArgs`, such as
    `kv_cache_memory_bytes`, `enable_chunked_prefill`, `speculative_config` or `pipeline_parallel_size`."""

    pipeline_key: ClassVar[str] = "pipeline_parallel_size"
    reserved = _by_name(_RESERVED, 0)
    gone = _by_name(_GONE, 0)
    argument_names = {**EngineConfig.argument_names, "sleep_level": None}

    gpu_memory_utilization: float = number(0.8, gt=0, le=1)
    """Share of a device's memory that the engine takes for weights and KV cache. Roles on the same device must fit into
    the rest, or into what `sleep_level` gives back. Without an accelerator the KV cache has 2 GiB, or what
    `kv_cache_memory_bytes` or the environment's VLLM_CPU_KVCACHE_SPACE (GiB) says."""
    block_size: int | None = number(None, ge=1)
    """Tokens per block of the KV cache. null: the engine's choice."""
    max_model_len: int | None = number(None, ge=1)
    """Longest prompt plus response that the engine takes; at least that of the run. null: that of the run
    (`sequence_length`)."""
    max_num_seqs: int | None = number(None, ge=1)
    """Responses that are decoded at once; more wait inside the engine. null: `max_running_requests`, which it may not
    exceed."""
    max_num_batched_tokens: int | None = number(None, ge=1)
    """Tokens per forward pass of the engine, prompts and responses together. null: the engine's choice."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of prompts for responses that begin alike, as those of one group do. Emptied with every weight
    update."""
    enforce_eager: bool | None = None
    """Don't record CUDA graphs: starts sooner, decodes slower. null: true without an accelerator, else false."""
    sleep_level: Literal[0, 1, 2] | None = None
    """What the engine gives back while others use its device: 0 nothing, 1 weights and KV cache, with a copy of the
    weights in host memory, 2 both without a copy: the weights of the next step come from the trainer either way. null:
    2, or with `lora_sync: adapters`, which sends the base weights only once, 1. Without an accelerator there is nothing
    to give back."""
    quantization: str | None = None
    """How the engine quantises the weights it gets, e.g. `fp8`: faster, and further from the trainer's log-probs. null:
    not at all."""

    def level_of_sleep(self, *, adapters: bool) -> int:
        """Return `sleep_level`, or what null stands for; `adapters`: they come apart from the base weights."""
        return (1 if adapters else 2) if self.sleep_level is None else self.sleep_level


@dataclass(frozen=True, kw_only=True)
class SglangConfig(EngineConfig):
    """SGLang, one engine per rank of the role. Its arguments are those of SGLang's `ServerArgs`, such as
    `max_total_tokens`, `chunked_prefill_size`, `sampling_backend` or `pp_size`."""

    pipeline_key: ClassVar[str] = "pp_size"
    reserved = _by_name(_RESERVED, 1)
    gone = _by_name(_GONE, 1)
    argument_names = {**EngineConfig.argument_names, "tensor_parallel_size": "tp_size"}

    mem_fraction_static: float | None = number(None, gt=0, lt=1)
    """Share of a device's memory for weights and KV cache. null: the engine's choice."""
    attention_backend: str | None = None
    """Attention kernels, e.g. `flashinfer`, `fa3`, `torch_native`. null: the engine's choice."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(StrategyConfig):
    """A teacher behind a service, such as vLLM's or SGLang's server: it gets the student's token ids as a prompt and
    says how likely each was."""

    endpoint: str | None = None
    """Its address, such as `http://localhost:8000/v1`."""
    model: str | None = None
    """The model's name there."""
    api: Literal["prompt_logprobs", "sglang", "echo"] = "prompt_logprobs"
    """How log-probs of a prompt are asked for: completions with `prompt_logprobs` (vLLM); SGLang's own `/generate`; or
    completions with `echo` and `logprobs`, which others have, too. Where such a service writes tokens as texts and not
    as `token_id:7`, only `distill.use_as: advantage` works."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key. The key itself never stands in a file, a log or an error.
    null: no key is sent."""
    request_args: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request's body; a null takes a field out."""
    max_in_flight: int = number(32, ge=1)
    """Requests at once, each with one response."""
    request_timeout_s: float = number(120.0, gt=0)
    """Seconds for one request, from its first byte to its last."""
    request_retries: int = number(3, ge=0)
    """Further tries after a refused connection, a timeout, HTTP 408, 409, 429 or 5xx; then the run ends."""
    retry_delay_s: float = number(1.0, ge=0)
    """Seconds before the first of them; doubled each time, at most 60, and at least what `Retry-After` asks for."""
