"""Writing a role's weights as a folder that transformers (or peft) loads."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.hf.lora import IDENTITY, check_same_base, layer_checksum, peft_name
from roll.strategies.merging.read_states import module_weights
from roll.strategies.training.model_folder import ABOUT, DESCRIPTION
from roll.strategies.training.picture_folder import is_picture_model, language_config, write_picture_model
from roll.strategies.training.pretrained import (
    DTYPES,
    language_model_class,
    load_backbone,
    load_causal_lm,
    load_new_classifier,
    load_tokenizer,
    named_tensors,
    quiet_transformers,
)

_OWNERS = {"policy": "lm.", "value": "backbone.", "reward": "classifier."}
_SIDE_FILES = (ABOUT, "config.json", "generation_config.json", "adapter_config.json")


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What to write."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of the weights. None: as the checkpoint has them."""
    max_shard_size: str | None = None
    """Largest file, such as `5GB`. None: transformers' own limit."""
    adapters_only: bool = False
    """Of a role with LoRA write the adapters alone, as peft loads them onto the base model."""
    base: str | None = None
    """Model that the role started from: for LoRA, and for a checkpoint without a description. None: as recorded."""


@dataclass(frozen=True)
class PictureRest:
    """What is around a language model in the folder that is written."""

    config: Any
    """Of the picture model."""
    source: str
    """Folder or hub id that the other weights are copied from."""


def merge_states(folder: Path, target: Path, merge: Merge, kind: str = "policy") -> None:
    """Write the model of a role's folder in a checkpoint to `target`, its tokenizer included.

    A policy becomes a causal language model, a reward model a sequence classifier, a critic a token classifier with
    one output (`score`). `kind` is that of a role whose checkpoint has no description.

    Raises:
        ValueError: the states can't be read or don't fit, or the base model isn't there.
    """
    from transformers import AutoConfig

    about = _about(folder, merge, kind)
    description = folder / DESCRIPTION if (folder / DESCRIPTION).is_dir() else Path(about["base_model"])
    if not (description / "config.json").is_file() and description.is_absolute():
        raise ValueError(f"there is no model in {description}, which says what {folder} is; name one with --base")
    whole = AutoConfig.from_pretrained(str(description))
    picture = copy.deepcopy(whole) if is_picture_model(whole) and about["kind"] == "policy" else None
    config = language_config(whole)
    weights: Mapping[str, Tensor] = module_weights(folder, config, about["kind"])
    owner = _OWNERS[about["kind"]]
    if (folder / IDENTITY).is_file():
        identity = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
        if merge.adapters_only:
            _write_adapters(folder, weights, identity, owner, merge, target)
            return
        weights = _merged(folder, weights, identity, owner, about)
    elif merge.adapters_only:
        raise ValueError(f"{folder} was saved without LoRA: there are no adapters to write")
    rest = None if picture is None else PictureRest(picture, about["base_model"])
    _write(weights, owner, about["kind"], config, merge, target, rest)
    _copy_description(description, target)


def _about(folder: Path, merge: Merge, kind: str) -> dict[str, Any]:
    file = folder / DESCRIPTION / ABOUT
    about: dict[str, Any] = {"kind": kind, "base_model": None}
    if file.is_file():
        about.update(json.loads(file.read_text(encoding="utf-8")))
    about["base_model"] = merge.base or about["base_model"]
    if about["base_model"] is None:
        raise ValueError(f"{folder} has no {DESCRIPTION}: an earlier version wrote it. Name its model with --base")
    return about


def _write(
    weights: Mapping[str, Tensor],
    owner: str,
    kind: str,
    config: Any,
    merge: Merge,
    target: Path,
    rest: PictureRest | None,
) -> None:
    tensors = {name.removeprefix(owner): tensor for name, tensor in weights.items() if name.startswith(owner)}
    if kind == "value":
        head, prefix = weights["value_head.weight"], empty_model(config, kind, torch.float32).base_model_prefix
        tensors = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
        tensors.update({"score.weight": head, "score.bias": head.new_zeros(1)})
    write_tensors(tensors, config, kind, merge, target, rest)


def write_tensors(
    tensors: Mapping[str, Tensor], config: Any, kind: str, merge: Merge, target: Path, rest: PictureRest | None = None
) -> None:
    """Have transformers write tensors under the names of its module, with the `rest` of a picture model around them;
    `ValueError` where they aren't that model's."""
    dtype = DTYPES[merge.dtype] if merge.dtype else _main_type(tensors)
    model = empty_model(config, kind, dtype)
    wanted = dict(named_tensors(model))
    missing = sorted(name for name in wanted if name not in tensors)
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}")
    state_dict = {}
    for name, empty in wanted.items():
        if tensors[name].shape != empty.shape:
            shape = tuple(tensors[name].shape)
            raise ValueError(f"{name} has shape {shape} in the checkpoint, and the model has {tuple(empty.shape)}")
        state_dict[name] = tensors[name].to(dtype).contiguous() if empty.is_floating_point() else tensors[name]
    sizes = {"max_shard_size": merge.max_shard_size} if merge.max_shard_size else {}
    with quiet_transformers():
        if rest is None:
            model.save_pretrained(target, state_dict=state_dict, **sizes)
        else:
            write_picture_model(model, state_dict, rest.config, rest.source, target, **sizes)


def _main_type(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the type of most numbers."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def empty_model(config: Any, kind: str, dtype: torch.dtype) -> Any:
    """Return the module without memory for its weights."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = copy.deepcopy(config)
    if kind != "policy":
        config.num_labels = 1
    makers = {
        "policy": language_model_class(config),
        "reward": AutoModelForSequenceClassification,
        "value": AutoModelForTokenClassification,
    }
    with torch.device("meta"):
        return makers[kind].from_config(config, dtype=dtype)


def _copy_description(description: Path, target: Path) -> None:
    """Put the tokenizer into the folder, and what else transformers' own folder had and the model didn't write."""
    if description.is_dir() and (description / ABOUT).is_file():
        for file in description.iterdir():
            if file.is_dir():  # further chat templates
                shutil.copytree(file, target / file.name, dirs_exist_ok=True)
            elif file.name not in _SIDE_FILES:
                shutil.copy2(file, target / file.name)
        generation = description / "generation_config.json"
        if generation.is_file() and (target / generation.name).is_file():
            shutil.copy2(generation, target / generation.name)
        return
    write_tokenizer(str(description), target)


def write_tokenizer(model: str, target: Path) -> None:
    """Put a model's tokenizer into a folder."""
    load_tokenizer(ModelArgs(model_name_or_path=model)).save_pretrained(target)


def _merged(
    folder: Path, weights: Mapping[str, Tensor], identity: dict[str, Any], owner: str, about: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the base model's weights + scaling * B A, in float32 where there are adapters; what trains beside them."""
    base = about["base_model"]
    loaders = {"policy": load_causal_lm, "reward": load_new_classifier, "value": load_backbone}
    model = loaders[about["kind"]](ModelArgs(model_name_or_path=base), torch.float32)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model)}
    layers = {name: tensors[f"{name}.weight"] for name in identity["layers"] if f"{name}.weight" in tensors}
    mine = {"checksum": layer_checksum(layers), "base_model": base}
    check_same_base(folder, identity, mine)
    for name, (_, scaling) in identity["layers"].items():
        a, b = _product(weights, owner, name)
        tensors[f"{name}.weight"] = layers[name].float() + scaling * (b.float() @ a.float())
    heads = {name: tensor for name, tensor in weights.items() if ".lora_" not in name}
    return {**{owner + name: tensor for name, tensor in tensors.items()}, **heads}


def _product(weights: Mapping[str, Tensor], owner: str, layer: str) -> tuple[Tensor, Tensor]:
    a, b = (weights[f"{owner}{layer}.lora_{part}.default.weight"] for part in "AB")
    return a, b


def _write_adapters(
    folder: Path, weights: Mapping[str, Tensor], identity: dict[str, Any], owner: str, merge: Merge, target: Path
) -> None:
    from safetensors.torch import save_file

    config = folder / DESCRIPTION / "adapter_config.json"
    if not config.is_file():
        raise ValueError(f"{folder} has no {DESCRIPTION}/{config.name}: an earlier version wrote it; export it merged")
    dtype = DTYPES[merge.dtype or "fp32"]
    tensors = {}
    for layer in identity["layers"]:
        for part, tensor in zip("AB", _product(weights, owner, layer), strict=True):
            tensors[peft_name(layer, part)] = tensor.to(dtype).contiguous()
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copy2(config, target / config.name)
    shutil.copy2(folder / IDENTITY, target / IDENTITY)
