"""What a start would prove of a model, tried on a small one of its configuration: for `roll check`, without weights.

The small model has layers of every kind, few experts, narrow matrices and random weights, drawn so wide that
differences show. It goes through the code of a start, so that check refuses what the start would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import TrainSpec
from roll.strategies.engines.hf.hf_infer import ready_alone, require_cached_layers
from roll.strategies.hf.first_layers import parameters_on_meta, small_config
from roll.strategies.hf.hf_build import make_ready, module_around
from roll.strategies.hf.start_check import check_sampled_rows
from roll.strategies.training.pretrained import attention_option, context_length, language_model_class, load_config

_MOST = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "dff", "n_inner"), 64),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "n_group"), 2),
    "topk_group": 1,
}
"""Fields of configurations, and the most that a small model has of each."""
_HEADS, _SHARED = 2, 4
"""Heads with keys and values, and the most query heads that share one."""
_PARAMETERS = 250_000_000
"""Of the largest model that is built for a check."""
_SPREAD = 1.7
"""Standard deviation of what a matrix makes of inputs with a standard deviation of 1."""
_SEEDS = (0, 1)
"""A refusal holds for both: where experts are chosen, one of two tokens near a tie may go elsewhere."""


def trainer_refusal(spec: TrainSpec) -> str:
    """Return why the start of a role would refuse its model; empty if it wouldn't, or nobody can tell beforehand."""
    args = replace(
        spec.worker.model_args,
        use_liger=False,
        use_fused_kernels=False,
        lora_rank=0,
        freeze_vision_tower=False,
        freeze_projector=False,
        torch_compile=False,
        freeze_module_prefix=(),
    )
    spec = replace(spec, worker=replace(spec.worker, model_args=args))
    cpu = torch.device("cpu")

    def start(model: Any) -> None:
        module = module_around(model, spec)
        make_ready(module, module, spec, torch.float32, torch.float32, cpu)

    return _refusal(spec.worker.model_args, spec.kind, start)


def sampler_refusal(args: ModelArgs, longest: int) -> str:
    """Return why `hf_infer` would refuse a model; empty if it wouldn't, or nobody can tell beforehand."""

    def start(model: Any) -> None:
        context_length(model)
        alone = ready_alone(model, model, longest)
        require_cached_layers(model)
        check_sampled_rows(alone)

    return _refusal(args, "policy", start)


def _refusal(args: ModelArgs, kind: str, start: Callable[[Any], None]) -> str:
    refusal = ""
    for seed in _SEEDS:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = _small_model(args, kind)
            refusal = "" if model is None else _outcome(model, start)
        if not refusal:
            return ""
    return refusal


def _outcome(model: Any, start: Callable[[Any], None]) -> str:
    try:
        start(model)
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a model raises there, a run would end with
        return f"{type(model).__name__} can't be used: {type(error).__name__}: {error}".rstrip(": .")
    return ""


def _small_model(args: ModelArgs, kind: str) -> Any:
    """Return a random model of a role's configuration that transformers can run; None if there is none."""
    from transformers import AutoModel

    if args.attn_implementation == "fa2":
        return None  # this machine may not have it
    config = load_config(args)
    maker = AutoModel if kind == "value" else language_model_class(config)
    if getattr(config, "quantization_config", None) is not None:
        return None
    for shrink in (_narrow, small_config, copy.deepcopy):
        try:
            model = _drawn(maker, shrink(config), args)
        except Exception:  # noqa: BLE001 - sizes that don't fit together: of ours, not of the user's model
            continue
        if model is not None:
            return model
    return None


def _drawn(maker: Any, config: Any, args: ModelArgs) -> Any:
    """Return a random model of a configuration; None for one that is too large, or whose numbers aren't finite."""
    options: dict[str, Any] = {"dtype": torch.float32, **attention_option(args, config)}
    with parameters_on_meta():
        empty = maker.from_config(copy.deepcopy(config), **options)
    if sum(parameter.numel() for parameter in empty.parameters()) > _PARAMETERS:
        return None
    model = maker.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(std=_SPREAD * parameter.shape[-1] ** -0.5)
        output = model(input_ids=torch.tensor([[3, 10, 17, 24, 31]]), use_cache=False)
    numbers = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return model if bool(numbers.isfinite().all()) else None


def _narrow(config: Any) -> Any:
    """Return the configuration of a model with few layers, heads and experts, and narrow matrices."""
    config = small_config(config)
    text = config.get_text_config()
    for name, most in _MOST.items():
        value = getattr(text, name, None)
        if isinstance(value, int):
            setattr(text, name, min(value, most))
        elif isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            setattr(text, name, [min(one, most) for one in value])
    heads, hidden = text.num_attention_heads, text.hidden_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if hidden % heads == 0 and heads % kv_heads == 0:
        shared = min(kv_heads, _HEADS)
        fewer = shared * min(heads // kv_heads, _SHARED)
        text.hidden_size, text.num_attention_heads = hidden // heads * fewer, fewer
        if getattr(text, "num_key_value_heads", None):
            text.num_key_value_heads = shared
    return config
