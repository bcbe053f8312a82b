"""From a role's configuration to the module that gives log-probs or values of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roll.configs.catalog.family_table import family_of
from roll.strategies.base import TrainSpec
from roll.strategies.hf.first_layers import first_layers
from roll.strategies.hf.fused import require_liger, use_liger_layers
from roll.strategies.hf.hf_model import PolicyModel, ValueModel
from roll.strategies.hf.hf_packing import SequenceGroup, pack
from roll.strategies.hf.hf_reward_model import ScoreModel, build_reward_model, build_score_model
from roll.strategies.hf.lora import add_adapters
from roll.strategies.hf.prefix_sharing import use_prefix_sharing
from roll.strategies.hf.recomputation import recompute_activations
from roll.strategies.hf.rotations import fix_rotations
from roll.strategies.hf.row_states import cut_rows
from roll.strategies.hf.start_check import RowsAlone, check_scored_rows, usable
from roll.strategies.hf.streamed import StreamedWeights
from roll.strategies.training.micro import ReadsBeside
from roll.strategies.training.pretrained import load_backbone, load_causal_lm


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that transformers itself names as the ones that stay on one device: decoder layers, mostly."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return (module for module in model.modules() if type(module).__name__ in names)


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile every decoder layer in place; parameters and modules keep their names.

    Layer by layer: equal layers share one compilation, and gradient checkpointing and FSDP, which wrap layers, stay
    outside. Sizes are dynamic. Raises `ValueError` if the model doesn't name its layers.
    """
    layers = list(blocks(model))
    if not layers:
        raise ValueError(f"torch_compile: {type(model).__name__} doesn't name its decoder layers (_no_split_modules)")
    for block in layers:
        block.compile(dynamic=True, backend=backend)


def narrows_stream(device: torch.device, stored: torch.dtype, computed: torch.dtype) -> bool:
    """Return whether a role with weights in `stored` that computes in `computed` has its stream cast on `device`.

    On a host half precision is emulated, and saves no time.
    """
    return device.type != "cpu" and stored == torch.float32 and computed == torch.bfloat16


def use_half_stream(model: nn.Module, device: torch.device, stored: torch.dtype, computed: torch.dtype) -> None:
    """Call `narrow_stream` where that pays."""
    if narrows_stream(device, stored, computed):
        narrow_stream(model, computed)


def narrow_stream(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the embeddings and norms of a transformers model, whose weights are float32, hand on `dtype`."""

    def cast(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.to(dtype) if isinstance(output, Tensor) and output.dtype == torch.float32 else None

    for module in model.modules():
        if isinstance(module, nn.Embedding) or _is_norm(module):
            module.register_forward_hook(cast)


def _is_norm(module: nn.Module) -> bool:
    """Return whether all weights of its own have one dimension: a norm, of whatever class."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.dim() == 1 for parameter in own)


RoleModule: TypeAlias = PolicyModel | ValueModel | ScoreModel


def build_module(
    spec: TrainSpec,
    stored: torch.dtype,
    computed: torch.dtype,
    device: torch.device,
    sequence: SequenceGroup | None = None,
    weights: StreamedWeights | None = None,
) -> tuple[RoleModule, bool]:
    """Return (the module of a role on `device`, its weights in `stored`, ready to be wrapped by a backend; whether it
    computes tokens that rows have in common at their beginnings once, which a check has then found to be right).

    With `sequence`, whose ranks must all call this, its layouts are shards of packed lines. With `weights` it is their
    empty module, on the host: to be sharded and then filled.
    """
    args = spec.worker.model_args
    for key in ("use_liger", "use_fused_kernels"):
        if getattr(args, key):
            require_liger(f"{spec.role}.model_args.{key}", device)
    module = _loaded(spec, stored) if weights is None else module_around(weights.module, spec)
    tried = _tried(module, spec) if weights is None else module_around(weights.small, spec)
    shares_prefixes = make_ready(module, tried, spec, stored, computed, device, sequence, on_host=weights is not None)
    if weights is not None:
        weights.small = None
    return module, shares_prefixes


def make_ready(
    module: RoleModule,
    tried: RoleModule,
    spec: TrainSpec,
    stored: torch.dtype,
    computed: torch.dtype,
    device: torch.device,
    sequence: SequenceGroup | None = None,
    *,
    on_host: bool = False,
) -> bool:
    """Change a role's module for its work and put it on `device`, unless it stays `on_host`; return whether it computes
    what rows have in common at their beginnings once.

    `tried` is the module, or a smaller one that computes alike: on it is proved that all rows are computed as
    transformers computes each of them alone. Raises `ValueError` where that isn't so.
    """
    args = spec.worker.model_args
    models: list[Any] = [hf_module(each) for each in dict.fromkeys((module, tried))]
    for each in models:
        fix_rotations(each, spec.max_sequence_length)
    tried.to(device)
    with torch.autocast(device.type, computed, enabled=computed != stored):
        asked = tried.lm if isinstance(tried, PolicyModel) else tried.backbone
        alone = RowsAlone(asked, longest=spec.max_sequence_length, temperature=spec.temperature)
    model = models[0]
    freeze_parameters(model, args.freeze_module_prefix if spec.trains else ("",))
    if args.freezes_pictures:
        from roll.strategies.hf.picture_model import freeze_tower

        freeze_tower(model, tower=args.freeze_vision_tower, projector=args.freeze_projector)
    if spec.trains and not any(parameter.requires_grad for parameter in module.parameters()):
        keys = "freeze_vision_tower and freeze_projector" if args.freezes_pictures else "freeze_module_prefix"
        raise ValueError(f"{spec.role}: {keys} leaves nothing to train")
    for each in models:
        _change(each, spec)
        use_half_stream(each, device, stored, computed)
    padded, half = not (spec.worker.use_sequence_packing or sequence is not None), computed != torch.float32
    with torch.autocast(device.type, computed, enabled=computed != stored):
        if isinstance(tried, PolicyModel):
            usable(tried.lm, tried.check)
        check_scored_rows(tried, alone, padded=padded, half=half, role=spec.role)
    if args.uses_lora:
        add_adapters(model, spec)
    tried.to(device)
    if not on_host:
        module.to(device)
    with torch.autocast(device.type, computed, enabled=computed != stored):
        if not padded:
            pack(_decoder(tried), flash=args.attn_implementation == "fa2", sequence=sequence, half=half)
        shares_prefixes = use_prefix_sharing(_decoder(tried), spec, sequence, half=half)
    if tried is not module:
        _attend_alike(_decoder(module), _decoder(tried))
        if not padded or shares_prefixes:
            cut_rows(_decoder(module))
    if args.torch_compile:
        compile_blocks(model)  # after the check, whose sizes nothing else has
    return shares_prefixes


def _tried(module: RoleModule, spec: TrainSpec) -> RoleModule:
    """Return a role's module to prove things of: itself, or one of its first layers."""
    if isinstance(module, ScoreModel):
        return module
    model = hf_module(module)
    with torch.random.fork_rng(devices=[]):
        first = first_layers(model)
        return module if first is model else module_around(first, spec)


def _change(model: Any, spec: TrainSpec) -> None:
    """Change how a transformers model computes, and not what."""
    args = spec.worker.model_args
    if spec.trains and not args.disable_gradient_checkpointing:
        recompute_activations(model, selective=args.recompute_granularity == "selective")
    if args.use_liger:
        use_liger_layers(model)


def _loaded(spec: TrainSpec, stored: torch.dtype) -> RoleModule:
    """Return the module of a role as its folder has it, on the CPU."""
    args = spec.worker.model_args
    if spec.kind != "reward":
        return module_around(
            load_causal_lm(args, stored) if spec.kind == "policy" else load_backbone(args, stored), spec
        )
    return build_score_model(args, stored) if spec.trains else build_reward_model(spec, stored)


def module_around(model: Any, spec: TrainSpec) -> PolicyModel | ValueModel:
    """Return the module of a role around its causal language model (a policy's), or its backbone."""
    if spec.kind == "policy":
        if family_of(model.config.model_type).pictures is not None:
            from roll.strategies.hf.picture_model import PicturePolicyModel

            return PicturePolicyModel(model, spec.temperature, fused=spec.worker.model_args.use_fused_kernels)
        return PolicyModel(model, spec.temperature, fused=spec.worker.model_args.use_fused_kernels)
    return ValueModel(model)


def reads_beside(module: RoleModule, spec: TrainSpec, ranks: int, *, shares_rows: bool) -> ReadsBeside | None:
    """Return what lays out what a role's model reads beside tokens; None: it reads nothing else.

    `ranks`: of the role; `shares_rows`: several of them compute a row. Raises `ValueError` for a model with a tower in
    a role that can't give it pictures.
    """
    model: Any = hf_module(module)
    names = family_of(model.config.model_type).pictures
    if names is None:
        return None
    name, args = type(model).__name__, spec.worker.model_args
    if not isinstance(module, PolicyModel):
        raise ValueError(f"{spec.role}: {name} reads pictures, which only roles that write text are given")
    if shares_rows:
        raise ValueError(f"{spec.role}: {name} reads pictures, whose rows can't be cut: write ulysses_size: 1 and "
                         "ring_attention_size: 1")  # fmt: skip
    from roll.strategies.hf.picture_rows import PictureRows
    from roll.utils.picture_tokens import PictureTokens

    tokens = PictureTokens.load(str(args.model_name_or_path), trust_remote_code=args.trust_remote_code)
    trains = any(p.requires_grad for n, p in model.named_parameters() if n.startswith(names.tower))
    return PictureRows(tokens, model, runs_always=trains or ranks > 1, role=spec.role)


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


def freeze_parameters(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Take the parameters whose names begin so out of training; those that a model itself never trains stay out."""
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise ValueError(f"freeze_module_prefix: no parameter begins with {prefix!r}; the first is {names[0]!r}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(tuple(prefixes)))
