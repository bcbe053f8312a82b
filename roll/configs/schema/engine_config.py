"""Options of `vllm` and `sglang`: what this project acts on is declared, the rest is handed on to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.configs.schema.fields import number, open_section
from roll.configs.schema.strategy_options import StrategyConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig(StrategyConfig):
    """What the options of both engines have in common."""

    pipeline_key: ClassVar[str]
    """The engine's own name for the number of pipeline stages, an entry of `engine_args`."""
    tensor_parallel_size: int = number(1, ge=1)
    """Devices that share every matrix of one engine; divides the attention heads. `num_gpus_per_worker` is this number
    times the engine's pipeline stages."""
    load_format: str = "auto"
    """How weights are read at the start; `dummy` reads none: the first update from the trainer fills them. Not with
    `val_only`."""
    engine_args: dict[str, Any] = field(default_factory=dict, metadata=open_section())
    """Any other argument of the engine, which may as well stand next to this key. A name that the installed engine
    doesn't have, or that another key of the run sets, is refused."""

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
    sleep_level: Literal[0, 1, 2] = 1
    """What the engine gives back while others use its device: 0 nothing, 1 the KV cache, with the weights kept in host
    memory, 2 weights and KV cache. The weights of the next step come from the trainer either way. Without an
    accelerator there is nothing to give back."""
    quantization: str | None = None
    """How the engine quantises the weights it gets, e.g. `fp8`: faster, and further from the trainer's log-probs. null:
    not at all."""


@dataclass(frozen=True, kw_only=True)
class SglangConfig(EngineConfig):
    """SGLang, one engine per rank of the role. Its arguments are those of SGLang's `ServerArgs`, such as
    `max_total_tokens`, `chunked_prefill_size`, `sampling_backend` or `pp_size`."""

    pipeline_key: ClassVar[str] = "pp_size"

    mem_fraction_static: float | None = number(None, gt=0, lt=1)
    """Share of a device's memory for weights and KV cache. null: the engine's choice."""
    attention_backend: str | None = None
    """Attention kernels, e.g. `flashinfer`, `fa3`, `torch_native`. null: the engine's choice."""


_BY_RANKS = "a rank of actor_infer is one engine: give it more ranks"
_BY_MODEL_ARGS = "write actor_infer.model_args.{}"
_OWN_TOKENS = "prompts and responses are token ids; the tokenizer is that of actor_train's model"
_PROCESSES = "engines don't span machines: give each machine its own ranks"
_LORA = "engines get the trainer's merged weights, or with lora_sync: adapters what those need is set by the run"
_LOG_PROBS = "log-probs are those of the distribution that tokens are drawn from, on every engine"
_NO_SERVER = "the engine is called directly, there is no server"
_SYNC = "weights come from the trainer; see weight_transport"

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; another one takes the next of these."""

RESERVED_VLLM: dict[str, str] = {
    "model": _BY_MODEL_ARGS.format("model_name_or_path"),
    "model_weights": _BY_MODEL_ARGS.format("model_name_or_path"),
    "dtype": _BY_MODEL_ARGS.format("dtype"),
    "trust_remote_code": _BY_MODEL_ARGS.format("trust_remote_code"),
    "hf_overrides": _BY_MODEL_ARGS.format("model_config_kwargs"),
    "hf_config_path": _BY_MODEL_ARGS.format("model_name_or_path"),
    "seed": "write seed at the top level; every response has a key of its own",
    "tokenizer": _OWN_TOKENS,
    "tokenizer_mode": _OWN_TOKENS,
    "tokenizer_revision": _OWN_TOKENS,
    "skip_tokenizer_init": _OWN_TOKENS,
    "enable_prompt_embeds": _OWN_TOKENS,
    "tokens_only": _OWN_TOKENS,
    "served_model_name": _NO_SERVER,
    "runner": "it always generates",
    "convert": "it always generates",
    "pooler_config": "it always generates",
    "max_logprobs": _LOG_PROBS,
    "logprobs_mode": _LOG_PROBS,
    "return_sampling_mask": _LOG_PROBS,
    "generation_config": "sampling is what generating_args say, and nothing else",
    "override_generation_config": "write actor_infer.generating_args",
    "weight_transfer_config": _SYNC,
    "worker_cls": _SYNC,
    "worker_extension_cls": _SYNC,
    "enable_sleep_mode": "write sleep_level",
    "device_ids": "write actor_infer.device_mapping",
    "distributed_executor_backend": "an engine's devices are processes of its own on one machine",
    "nnodes": _PROCESSES,
    "node_rank": _PROCESSES,
    "master_addr": _PROCESSES,
    "master_port": _PROCESSES,
    "data_parallel_size": _BY_RANKS,
    "data_parallel_rank": _BY_RANKS,
    "data_parallel_start_rank": _BY_RANKS,
    "data_parallel_size_local": _BY_RANKS,
    "data_parallel_address": _BY_RANKS,
    "data_parallel_rpc_port": _BY_RANKS,
    "data_parallel_hybrid_lb": _BY_RANKS,
    "data_parallel_external_lb": _BY_RANKS,
    "data_parallel_multi_port_external_lb": _BY_RANKS,
    "data_parallel_backend": _BY_RANKS,
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "fully_sharded_loras": _LORA,
    "max_cpu_loras": _LORA,
    "lora_dtype": _LORA,
    "lora_target_modules": _LORA,
    "default_mm_loras": _LORA,
    "disable_log_stats": "metrics are those of the run, see docs/metrics.md",
    "stream_interval": "aborts and weight updates must know every token",
    "logits_processors": "the trainer's log-probs wouldn't know them",
}
"""Arguments of vLLM that the run sets itself, and what to write instead, or why there is nothing to write."""

RESERVED_SGLANG: dict[str, str] = {
    "model_path": _BY_MODEL_ARGS.format("model_name_or_path"),
    "dtype": _BY_MODEL_ARGS.format("dtype"),
    "trust_remote_code": _BY_MODEL_ARGS.format("trust_remote_code"),
    "json_model_override_args": _BY_MODEL_ARGS.format("model_config_kwargs"),
    "random_seed": "write seed at the top level; SGLang has no key per response",
    "tokenizer_path": _OWN_TOKENS,
    "tokenizer_mode": _OWN_TOKENS,
    "tokenizer_backend": _OWN_TOKENS,
    "skip_tokenizer_init": _OWN_TOKENS,
    "grammar_backend": "responses are free text",
    "sampling_mask_max_tokens": _LOG_PROBS,
    "chat_template": "write actor_train.data_args.template",
    "tp_size": "write tensor_parallel_size",
    "context_length": "it is the run's sequence_length",
    "max_running_requests": "write max_running_requests at the top level",
    "device": "it is the accelerator of the rank's slots, or the CPU where there is none",
    "base_gpu_id": "write actor_infer.device_mapping",
    "gpu_id_step": "write actor_infer.device_mapping",
    "served_model_name": _NO_SERVER,
    "host": _NO_SERVER,
    "port": _NO_SERVER,
    "api_key": _NO_SERVER,
    "admin_api_key": _NO_SERVER,
    "is_embedding": "it always generates",
    "weight_version": _SYNC,
    "custom_weight_loader": _SYNC,
    "checkpoint_engine_wait_weights_before_ready": _SYNC,
    "enable_memory_saver": "it is on where there is an accelerator: roles on one device take turns",
    "use_ray": "the rank of actor_infer is what Ray places",
    "nnodes": _PROCESSES,
    "node_rank": _PROCESSES,
    "dist_init_addr": _PROCESSES,
    "nccl_port": _PROCESSES,
    "dp_size": _BY_RANKS,
    "enable_lora": _LORA,
    "lora_paths": _LORA,
    "max_lora_rank": _LORA,
    "lora_target_modules": _LORA,
    "max_loras_per_batch": _LORA,
    "stream_interval": "aborts and weight updates must know every token",
    "incremental_streaming_output": "aborts and weight updates must know every token",
    "enable_custom_logit_processor": "the trainer's log-probs wouldn't know them",
}
"""As `RESERVED_VLLM`, for SGLang."""

GONE: dict[str, dict[str, str]] = {
    "vllm": {
        "swap_space": "vLLM no longer moves KV blocks to host memory; it computes them again",
        "use_v2_block_manager": "there is one block manager",
        "disable_async_output_proc": "it has no such switch any more",
        "num_scheduler_steps": "it has no such switch any more",
        "max_seq_len_to_capture": "write max_cudagraph_capture_size, or enforce_eager",
        "device": "it is the accelerator of the rank's slots, or the CPU where there is none",
        "tp_size": "write tensor_parallel_size",
        "disable_log_requests": "requests aren't logged; see enable_log_requests",
        "mem_fraction_static": "that is SGLang's word: write gpu_memory_utilization",
    },
    "sglang": {
        "pipeline_parallel_size": "write pp_size",
        "gpu_memory_utilization": "that is vLLM's word: write mem_fraction_static",
        "max_model_len": "it is the run's sequence_length",
        "max_num_seqs": "write max_running_requests at the top level",
        "enable_prefix_caching": "for false write disable_radix_cache: true",
        "enforce_eager": "for true write disable_cuda_graph: true",
        "sleep_level": "it gives back weights and KV cache while others use its device",
    },
}
"""Words that an engine doesn't have (any more), by strategy, and what to say about each."""
