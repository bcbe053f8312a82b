"""Names of weights in files, where a transformers module has others: by transformers' own way back.

Modules stack what files keep apart (experts), or call things otherwise; `save_pretrained` undoes what `from_pretrained`
did to names and shapes. Engines load what files have, so they get every tensor as it would be saved.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from roll.strategies.training.pretrained import UNUSABLE, named_tensors

_LAYER = re.compile(r".*?\.\d+\.")
_TRIED = 2
"""Rows and columns of the matrices with which it is found out where those of a file are in a stacked tensor."""


class CheckpointNames:
    """How the tensors of a model, which may be without memory, stand in its files.

    Most are converted one by one. Where a tensor of a file is made of several of the module, these are held until the
    last of them has come. Stacked matrices are taken apart without a copy. Raises `ValueError` for a model whose
    tensors would have to be held all together.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        conversions = get_model_conversion_mapping(model, add_legacy=False)
        self._model: Any = copy.copy(model)  # its list of conversions isn't the model's
        # A prefix is one of the module that is around a model in its file; nothing here is around this one.
        self._model._weight_conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
        self._converts = bool(self._model._weight_conversions)
        self._group_of: dict[str, tuple[str, ...]] = {}
        """Name -> names of the tensors that are converted with it, of those that can't be converted alone."""
        self._stacked: dict[str, list[tuple[str, int, int]]] = {}
        """Name -> (name in files, first index, number of the equal parts of its second dimension) of each matrix."""
        if self._converts:
            self._find({name: tensor.detach().to("meta") for name, tensor in named_tensors(model)})

    def stored(self, name: str, tensor: Tensor) -> list[tuple[str, tuple[int, ...]]]:
        """Return (name in files, shape) of a tensor's parts, which lie in it one after the other.

        Raises `ValueError` where that isn't how it is stored.
        """
        tensor = torch.empty(tensor.shape, device="meta")
        parts = list(WayBack(self).convert(name, tensor))
        same = all(part.untyped_storage()._cdata == tensor.untyped_storage()._cdata for _, part in parts)
        if name in self._stacked or (len(parts) == 1 and same and parts[0][1].is_contiguous()):
            return [(part, tuple(matrix.shape)) for part, matrix in parts]
        raise ValueError(f"its files have other numbers than {name}")

    def _find(self, tensors: Mapping[str, Tensor]) -> None:
        expected = _shapes(self._reverted(tensors))
        together: dict[str, list[str]] = {}
        for name, tensor in tensors.items():
            try:
                alone = _shapes(self._reverted({name: tensor}))
            except (ValueError, *UNUSABLE):
                alone = {}
            if not alone or not alone.items() <= expected.items():
                layer = _LAYER.match(name)
                together.setdefault(layer.group() if layer else "", []).append(name)
            elif len(alone) > 1 and (stacked := self._parts_of(name, tensor, alone)):
                self._stacked[name] = stacked
        self._group_of = {name: tuple(names) for names in together.values() for name in names}
        found: dict[str, tuple[int, ...]] = {}
        for names in dict.fromkeys(self._group_of.get(name, (name,)) for name in tensors):
            found |= _shapes(self._reverted({name: tensors[name] for name in names}))
        if found != expected:
            raise ValueError(
                f"{type(self._model).__name__}: the names of its weights in files can't be told layer by layer, which "
                "a weight update needs; sample with hf_infer"
            )

    def _parts_of(self, name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int, int]]:
        """Return where in a stacked tensor the matrices of a file are, in the order in which they lie there; nothing
        for one that isn't a stack of them."""
        each, rest = divmod(len(shapes), len(tensor))
        if tensor.dim() != 3 or rest or tensor.shape[1] % each:
            return []
        if set(shapes.values()) != {(tensor.shape[1] // each, tensor.shape[2])}:
            return []
        small = torch.arange(len(shapes) * _TRIED * _TRIED).view(len(tensor), each * _TRIED, _TRIED)
        made = self._reverted({name: small})
        order = sorted((int(matrix.flatten()[0]) // _TRIED**2, part) for part, matrix in made.items())
        parts = [(part, index // each, index % each) for index, part in order]
        whole = [index for index, _ in order] == list(range(len(shapes)))
        return parts if whole and all(torch.equal(made[one[0]], _part(small, *one[1:], each)) for one in parts) else []

    def _reverted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, dict(tensors))


class WayBack:
    """Converts the tensors of a model one after the other, each once."""

    def __init__(self, names: CheckpointNames) -> None:
        self._names = names
        self._held: dict[tuple[str, ...], dict[str, Tensor]] = {}

    @torch.no_grad()
    def convert(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a file that are complete with this one."""
        names = self._names
        if not names._converts:
            yield name, tensor
            return
        if (stacked := names._stacked.get(name)) is not None:
            each = len(stacked) // len(tensor)
            for part, row, number in stacked:
                yield part, _part(tensor, row, number, each)
            return
        group = names._group_of.get(name, (name,))
        held = self._held.setdefault(group, {})
        held[name] = tensor
        del tensor
        if len(held) == len(group):
            del self._held[group]
            yield from names._reverted(held).items()


def _part(stack: Tensor, row: int, number: int, each: int) -> Tensor:
    """Return one of `each` equal parts of the rows of a matrix in a stack of them: a view."""
    size = stack.shape[1] // each
    return stack[row, number * size : (number + 1) * size]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
