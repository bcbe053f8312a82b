"""From a role's configuration to the module that gives log-probs or values of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from roll.strategies.base import TrainSpec
from roll.strategies.hf.compile import compile_blocks
from roll.strategies.hf.fused import require_liger, use_liger_layers
from roll.strategies.hf.half_stream import use_half_stream
from roll.strategies.hf.hf_model import PolicyModel, ValueModel, load_backbone, load_causal_lm
from roll.strategies.hf.hf_packing import SequenceGroup, pack
from roll.strategies.hf.hf_reward_model import ScoreModel, build_reward_model, build_score_model
from roll.strategies.hf.lora import add_adapters
from roll.strategies.hf.prefix_sharing import use_prefix_sharing
from roll.strategies.hf.selective import keep_products
from roll.strategies.hf.streamed import StreamedWeights

RoleModule: TypeAlias = PolicyModel | ValueModel | ScoreModel


def build_module(
    spec: TrainSpec,
    stored: torch.dtype,
    computed: torch.dtype,
    device: torch.device,
    sequence: SequenceGroup | None = None,
    weights: StreamedWeights | None = None,
) -> RoleModule:
    """Return the module of a role on `device`, its weights in `stored`, ready to be wrapped by a backend.

    With `sequence`, whose ranks must all call this, its layouts are shards of packed lines. With `weights` it is their
    empty module, on the host: to be sharded and then filled.
    """
    args = spec.worker.model_args
    for key in ("use_liger", "use_fused_kernels"):
        if getattr(args, key):
            require_liger(f"{spec.role}.model_args.{key}", device)
    module = _loaded(spec, stored) if weights is None else _around(weights.module, spec)
    model: Any = hf_module(module)
    freeze_parameters(model, args.freeze_module_prefix if spec.trains else ("",))
    if spec.trains and not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(f"{spec.role}: freeze_module_prefix leaves nothing to train")
    if spec.trains and not args.disable_gradient_checkpointing:
        _recompute_activations(model, selective=args.recompute_granularity == "selective")
    tried = module if weights is None else _around(weights.small, spec)
    if args.use_liger:
        use_liger_layers(model)
        if tried is not module:
            use_liger_layers(hf_module(tried))
    if args.uses_lora:
        add_adapters(model, spec)  # after the model's own dropout is gone
    use_half_stream(model, device, stored, computed)
    tried.to(device)
    with torch.autocast(device.type, computed, enabled=computed != stored):
        if isinstance(tried, PolicyModel):
            tried.check()
        if spec.worker.use_sequence_packing or sequence is not None:
            flash = args.attn_implementation == "fa2"
            pack(_decoder(tried), flash=flash, sequence=sequence, half=computed != torch.float32)
        module.shares_prefixes = use_prefix_sharing(_decoder(tried), spec, sequence, half=computed != torch.float32)
    if weights is not None:
        _attend_alike(_decoder(module), _decoder(tried))
        weights.small = None
    if args.torch_compile:
        compile_blocks(model)  # after the check, whose sizes nothing else has
    return module


def _loaded(spec: TrainSpec, stored: torch.dtype) -> RoleModule:
    """Return the module of a role as its folder has it, on the CPU."""
    args = spec.worker.model_args
    if spec.kind != "reward":
        return _around(load_causal_lm(args, stored) if spec.kind == "policy" else load_backbone(args, stored), spec)
    return build_score_model(args, stored) if spec.trains else build_reward_model(spec, stored)


def _around(model: Any, spec: TrainSpec) -> PolicyModel | ValueModel:
    """Return the module of a role around its causal language model (a policy's), or its backbone."""
    if spec.kind == "policy":
        return PolicyModel(model, spec.temperature, fused=spec.worker.model_args.use_fused_kernels)
    return ValueModel(model)


def _attend_alike(decoder: Any, other: Any) -> None:
    """Give a decoder the attention function that was verified on another one of its class."""
    name = other.config._attn_implementation
    if decoder.config._attn_implementation != name:
        decoder.set_attn_implementation(name)


def hf_module(module: RoleModule) -> nn.Module:
    """Return the transformers model inside a role's module."""
    if isinstance(module, ScoreModel):
        return module.classifier
    return module.lm if isinstance(module, PolicyModel) else module.backbone


def _decoder(module: RoleModule) -> nn.Module:
    """Return the part of it that makes hidden states from tokens."""
    decoder: nn.Module = module.lm.get_decoder() if isinstance(module, PolicyModel) else module.backbone
    return decoder


def _recompute_activations(model: Any, *, selective: bool) -> None:
    how: dict[str, Any] = {"use_reentrant": False}
    if selective:
        how["context_fn"] = keep_products
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    # transformers recomputes only in train mode; dropout would make the ratio of old and new log-probs noise.
    _disable_dropout(model)
    model.train()


def freeze_parameters(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Take the parameters whose names begin so out of training."""
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise ValueError(f"freeze_module_prefix: no parameter begins with {prefix!r}; the first is {names[0]!r}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes)))


def _disable_dropout(model: nn.Module) -> None:
    """Zero every probability of dropping or jittering, as a module or as a number that a module keeps."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
