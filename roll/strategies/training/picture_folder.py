"""Folders of picture models of which the language model alone is loaded, trained and sampled.

transformers has a class for that language model, whose weights have other names in such a folder than by themselves.
What else a folder has (the tower, layers that draft) isn't loaded; an export copies it bit by bit, so that the folder
that it writes is one of the picture model again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.configs.catalog.family_table import family_of
from roll.strategies.training.safetensor_files import StoredTensors, safetensors_files

_ALONE = "model."
"""What names of the decoder's weights begin with in a language model by itself."""


@dataclass(frozen=True)
class LanguageNames:
    """Names of the language model's weights in the files of a picture model."""

    decoder: str
    """What those of its decoder begin with."""
    head: str
    """What that of its head begins with."""

    def stored(self, name: str) -> str:
        """Return the name in these files of a weight that the files of the language model alone call `name`."""
        return self.decoder + name.removeprefix(_ALONE) if name.startswith(_ALONE) else self.head + name

    def has(self, stored: str) -> bool:
        """Return whether a weight in these files is the language model's."""
        return stored.startswith((self.decoder, f"{self.head}lm_head."))


NAMES = LanguageNames("model.language_model.", "")
"""As transformers writes them; engines take them."""
_EARLIER = LanguageNames("language_model.model.", "language_model.")
"""As transformers 4 wrote them."""
RENAMED = {
    r"^model\.language_model\.": _ALONE, r"^language_model\.model\.": _ALONE, r"^language_model\.lm_head\.": "lm_head.",
}  # fmt: skip
"""What makes transformers find the weights of a language model in the files of a picture model."""


def language_names(stored: Iterable[str]) -> LanguageNames | None:
    """Return how the files of a picture model name its language model; None where these names aren't a picture
    model's."""
    names = list(stored)
    return next((each for each in (NAMES, _EARLIER) if any(name.startswith(each.decoder) for name in names)), None)


def is_picture_model(config: Any) -> bool:
    """Return whether a configuration is that of a picture model whose language model is loaded by itself."""
    return family_of(config.model_type).trained_as_text and config.get_text_config() is not config


def language_config(config: Any) -> Any:
    """Return the configuration of the language model that is loaded from the folder of a picture model; of another
    model the configuration itself."""
    if not is_picture_model(config):
        return config
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings  # by which the picture model's class ties its head
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def require_copies(source: str) -> None:
    """Raise `ValueError` unless the tower of a picture model can be copied when the model is exported."""
    if not safetensors_files(source):
        raise ValueError(f"{source} has no safetensors files, of which an export copies what isn't trained; convert it")


def write_picture_model(
    model: Any, weights: Mapping[str, Tensor], picture: Any, source: str, target: Path, max_shard_size: str = "50GB"
) -> None:
    """Write a folder of a picture model with other weights of its language model.

    Args:
        model: the language model, which needs no weights; its configuration and generation settings are written.
        weights: its tensors, under its own names.
        picture: configuration of the picture model.
        source: folder or hub id that everything else is copied from.
        target: folder to write to.
        max_shard_size: the largest file, such as `5GB`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    from roll.utils.picture_tokens import copy_processor

    try:
        files = StoredTensors(safetensors_files(source))
    except OSError as error:
        raise ValueError(
            f"{source} can't be read ({error}): all but the language model is copied from there. Put it back, or have "
            "roll export read another folder of this model (--base)"
        ) from error
    names = language_names(files.shapes)
    if names is None:
        raise ValueError(
            f"{source} has no weights of a language model in a picture model, so nothing is copied from it"
        )
    bare = copy.copy(model)
    bare._weight_conversions = None  # of files of the language model alone
    tensors = {names.stored(name): tensor for name, tensor in revert_weight_conversion(bare, dict(weights)).items()}
    tensors |= {name: files.read(name) for name in files.shapes if not names.has(name)}
    target.mkdir(parents=True, exist_ok=True)
    _write_files(tensors, target, max_shard_size)
    write_picture_config(model, picture, target)
    if model.can_generate():
        model.generation_config.save_pretrained(target)
    copy_processor(source, target)


def _write_files(tensors: Mapping[str, Tensor], target: Path, max_shard_size: str) -> None:
    """Write tensors, which may be parts of each other's memory, as safetensors files, with an index if there are
    several."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    sizes = {name: tensor.to("meta") for name, tensor in tensors.items()}
    split = split_torch_state_dict_into_shards(
        sizes, max_shard_size=max_shard_size, filename_pattern="model{suffix}.safetensors"
    )
    for file, names in split.filename_to_tensors.items():
        own = {name: _own_memory(tensors[name]) for name in names}
        save_file(own, target / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _own_memory(tensor: Tensor) -> Tensor:
    part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if part else tensor.contiguous()


def write_picture_config(model: Any, picture: Any, target: Path) -> None:
    """Write the configuration of a picture model with that of its language model, `model`."""
    picture = copy.deepcopy(picture)
    picture.text_config = copy.deepcopy(model.config)
    picture.dtype = picture.text_config.dtype = model.dtype
    picture.save_pretrained(target)
