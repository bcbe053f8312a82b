"""Which layers of a model get adapters, of which rank and scale, and how peft's `adapter_config.json` says it.

The configuration of a folder is kept as it was read and is written again like that: a field may be text, a list or a
table, and peft changes some of them while it builds adapters. Where peft would take names for other weights than the
layers they belong to (the projections of dense layers and shared experts, for the routed ones), new adapters are
described by the weights' whole names (`target_parameters`), which peft reads as they are.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from roll.configs.catalog.family_table import family_of
from roll.configs.checks.adapter_checks import CONFIG_FILE, check_folder
from roll.configs.schema.worker_config import ALL_LINEAR, ModelArgs

if TYPE_CHECKING:
    from peft import LoraConfig

DEFAULT_ALPHA = 16.0
SCORE = "score.weight"
"""The head of a reward model: it has no adapters, it trains."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Layers that get adapters, and the configuration that says so."""

    sizes: dict[str, tuple[int, float]]
    """Name of a layer -> rank and alpha, in the model's order."""
    rank_stabilized: bool
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""
    written: dict[str, Any]
    """`adapter_config.json`, but for the base model's name."""

    def document(self, base: str | None) -> dict[str, Any]:
        """Return what to write for adapters of the model `base`."""
        moved = self.written.get("base_model_name_or_path") != base
        revision = None if moved else self.written.get("revision")
        return {**self.written, "base_model_name_or_path": base, "revision": revision, "inference_mode": True}


def adapter_config(model: nn.Module, args: ModelArgs) -> AdapterConfig:
    """Return the configuration that the keys ask for, or that of the folder in `adapter_name_or_path`.

    Raises `ValueError` for layers that the model doesn't have, and for keys that say something else than the folder.
    """
    wanted = chosen_layers(model, args.lora_target) if args.lora_target or args.adapter_name_or_path is None else None
    if args.adapter_name_or_path is None:
        assert wanted is not None
        return _new(model, args, wanted)
    folder = Path(args.adapter_name_or_path).expanduser()
    config = _saved(model, args, folder)
    if wanted is not None and set(config.sizes) != set(wanted):
        own = ", ".join(leaves(config.sizes))
        raise ValueError(f"lora_target: {folder} adapts other layers, {own}; remove lora_target")
    return config


# --- which layers -----------------------------------------------------------------------------------------------------


def leaves(names: Iterable[str]) -> list[str]:
    """Return the last parts of dotted names, each once."""
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))


def _linear_layers(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    modules = dict(model.named_modules())
    # A class of its own may compute something else than a product: routers do.
    linear = [name for name, module in modules.items() if type(module) is nn.Linear and module is not head]
    unused = {leaf for leaf in leaves(linear) if not _is_adaptable(model, leaf)}
    return [
        name
        for name, (parent, _, leaf) in ((name, name.rpartition(".")) for name in linear)
        if leaf not in unused and f"{name}.weight" != SCORE and not _is_read(modules[parent].__class__, leaf)
    ]


@cache
def _is_read(parent: type[nn.Module], leaf: str) -> bool:
    """Return whether a module takes the weight of a layer of its own without calling it, as state-space layers and
    their kernels do: adapters beside that layer would be left out."""
    try:
        source = inspect.getsource(parent)
    except (OSError, TypeError):  # a class without a file
        return False
    return re.search(rf"\bself\.{re.escape(leaf)}\.weight\b(?!\.(dtype|device|shape)\b)", source) is not None


def _is_adaptable(model: nn.Module, leaf: str) -> bool:
    """Return whether peft puts adapters beside layers of this name."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, leaf)
    except ValueError:
        return False
    return True


def chosen_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return names of the layers that `lora_target` means: a target is a name, or what a name ends with after a dot.

    Those of a tower are meant where the language model has none of that name.
    """
    layers = _linear_layers(model)
    if not layers:
        raise ValueError(
            f"lora_rank: {type(model).__name__} has no linear layers below its head that adapters could be put beside "
            f"({', '.join(_other_layers(model)) or 'none at all'}); train it whole, without lora_rank"
        )
    names = family_of(getattr(getattr(model, "config", None), "model_type", None)).pictures
    outside = layers if names is None else [name for name in layers if not name.startswith(names.tower)]
    if not targets or tuple(targets) == (ALL_LINEAR,):
        return outside
    chosen = set()
    for target in targets:
        # A tower has layers of the same names; whoever means them names what only it has.
        candidates = [[name for name in each if name == target or name.endswith(f".{target}")]
                      for each in (outside, layers)]  # fmt: skip
        matches = candidates[0] or candidates[1]
        if not matches:
            fused = any(parameter.dim() == 3 for parameter in model.parameters())
            note = "; fused experts are one 3-D parameter, not linear layers" if fused else ""
            raise ValueError(
                f"lora_target: {type(model).__name__} has no linear layer {target!r} that can be adapted; expected "
                f"{ALL_LINEAR} or some of {', '.join(leaves(layers))}{note}"
            )
        chosen.update(matches)
    return [name for name in layers if name in chosen]


def _other_layers(model: nn.Module) -> list[str]:
    """Return classes of modules with a matrix of their own."""
    kinds = (type(module).__name__ for module in model.modules() if getattr(module, "weight", None) is not None)
    return sorted(set(kinds))


# --- new adapters -----------------------------------------------------------------------------------------------------


def _new(model: nn.Module, args: ModelArgs, chosen: list[str]) -> AdapterConfig:
    from peft import LoraConfig

    alpha = DEFAULT_ALPHA if args.lora_alpha is None else args.lora_alpha
    others = [name for name in leaves(chosen) if _means_experts(model, name)]
    parameters = [f"{name}.weight" for name in chosen if name.rsplit(".", 1)[-1] in others]
    modules = [name for name in chosen if f"{name}.weight" not in set(parameters)]
    # peft finds layers by what their names end with: short names where those mean the same, they are portable.
    short = leaves(modules)
    meant = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in short}
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft has whole numbers in mind and computes with any
        lora_dropout=0.0 if parameters else args.lora_dropout,  # peft drops nothing before a parameter's adapters
        target_modules=short if meant == set(modules) else modules,
        target_parameters=parameters or None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    # A set would be written in an order that changes from process to process.
    written = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    sizes = dict.fromkeys(chosen, (args.lora_rank, alpha))
    return AdapterConfig(sizes=sizes, rank_stabilized=False, written=written)


def _means_experts(model: nn.Module, name: str) -> bool:
    """Return whether peft takes a layer's name for a family's routed experts."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it stands for a part of a fused tensor
        return True
    return bool(config.target_parameters)


# --- adapters of a folder ---------------------------------------------------------------------------------------------


def _saved(model: nn.Module, args: ModelArgs, folder: Path) -> AdapterConfig:
    """Return what the folder says of its adapters, with this run's dropout."""
    from peft import LoraConfig

    key = "adapter_name_or_path"
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{key}: {folder} has no {CONFIG_FILE}; expected a folder of peft's")
    try:
        document = check_folder(folder)
        config = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from None
    assert isinstance(config, LoraConfig)
    own_sizes = {"lora_rank": (args.lora_rank, config.r), "lora_alpha": (args.lora_alpha, config.lora_alpha)}
    for name, (wanted, own) in own_sizes.items():
        if wanted and wanted != own:
            raise ValueError(f"{name}: {wanted:g}, but the adapters in {folder} have {own:g}; remove {name}")
    try:
        sizes = _saved_sizes(model, config, folder)
    except re.error as error:
        raise ValueError(f"{key}: {folder} has a pattern that is no regular expression: {error}") from None
    dropout = 0.0 if config.target_parameters else args.lora_dropout
    return AdapterConfig(sizes=sizes, rank_stabilized=config.use_rslora, written={**document, "lora_dropout": dropout})


def _saved_sizes(model: nn.Module, config: LoraConfig, folder: Path) -> dict[str, tuple[int, float]]:
    """Return a layer's rank and alpha by name, by peft's own reading of names and patterns."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    linear, sizes = set(_linear_layers(model)), {}
    fit = f"adapter_name_or_path: {folder} doesn't fit {type(model).__name__}"
    config = _resolved(model, config, fit)
    parameters = [f".{name}" for name in config.target_parameters or ()]
    ranks, alphas = dict(config.rank_pattern or {}), dict(config.alpha_pattern or {})
    for name, module in model.named_modules():
        # peft's key is the module's name, or the whole name of a parameter.
        direct = bool(name) and bool(check_target_module_exists(config, name))
        keys = [name] if direct else []
        if parameters:
            own = (f"{name}.{part}" for part, _ in module.named_parameters(recurse=False))
            keys += [key for key in own if f".{key}".endswith(tuple(parameters))]
        for key in keys:
            if name not in linear or key not in (name, f"{name}.weight"):
                raise ValueError(
                    f"{fit}: it adapts {key} ({type(module).__name__}), which is no linear layer below the head; only "
                    "those can be trained and merged"
                )
            rank = ranks.get(get_pattern_key(list(ranks), key), config.r)
            alpha = alphas.get(get_pattern_key(list(alphas), key), config.lora_alpha)
            sizes[name] = (rank, alpha)
    if not sizes:
        raise ValueError(f"{fit}: none of its layers is what target_modules means, {config.target_modules!r}")
    return sizes


def _resolved(model: nn.Module, config: LoraConfig, fit: str) -> LoraConfig:
    """Return the configuration with names or an expression where it leaves the choice of layers to peft."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    config = copy.copy(config)
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        config.target_modules = sorted(_linear_layers(model))
    elif config.target_modules is None and not config.target_parameters:
        family = str(model.config.model_type)  # type: ignore[union-attr]
        if family not in DEFAULTS:
            raise ValueError(f"{fit}: it names no target_modules, and peft has no default for {family}")
        config.target_modules = sorted(DEFAULTS[family])
    return config
