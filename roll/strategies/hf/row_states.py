"""Recurrent layers and short convolutions over rows laid end to end, or over a tree of rows.

Attention is told where rows end. A recurrent layer of transformers runs on from one row into the next: without its
kernels it takes no boundaries. So rows are cut out of the line for it. Those of about one length are computed together,
padded at the right, where nothing before it notices. In a tree of rows, a segment begins with the states that the one
before it has left; segments that others continue are computed to their last token and no further.

Projections, norms and MLPs around these layers stay packed; so does attention.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from roll.configs.catalog.family_ways import CACHE_ARGUMENTS
from roll.strategies.attention.attention import TreePlan
from roll.strategies.attention.varlen_kernel import RowPlan
from roll.strategies.hf.cache_layers import StateLayer

_CALL_TOKENS = 64
"""Tokens that are computed in the time that a call of a layer takes by itself."""
_CHUNK = 64
"""Tokens up to which most recurrent layers pad rows themselves."""
_CACHES = ("cache_params", *CACHE_ARGUMENTS)
"""What layers call their cache."""


def cut_rows(decoder: nn.Module) -> None:
    """Let the recurrent layers and convolutions of a transformers decoder compute the rows of a packed line apart.

    Padded rows are computed as before. Calling it once more changes nothing.
    """
    for parent in decoder.modules():
        mixers = [child for child in parent.children() if _is_recurrent(child) and "forward" not in vars(child)]
        if not mixers:
            continue
        told = _Told()
        parent.register_forward_pre_hook(told.hear, with_kwargs=True)
        for mixer in mixers:
            # A compiler would make a version for every set of lengths.
            mixer.forward = torch.compiler.disable(partial(_mixed_rows, _Mixer(mixer, told)))  # type: ignore[method-assign]


def _is_recurrent(module: nn.Module) -> bool:
    """Return whether a module mixes the tokens of a row by a convolution, and by states if it has more."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


class _Told:
    """What a decoder layer is told of its rows, for the mixers in it, to which not all layers pass it on.

    A layer is told once more where its activations are computed again.
    """

    rows: Any = None

    def hear(self, _layer: nn.Module, _args: Any, options: dict[str, Any]) -> None:
        self.rows = options.get("packed_rows")


def _mixed_rows(mixer: _Mixer, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    """Run the forward pass of a mixer: hidden states [1, N, D] of a packed line, or [B, T, D] as ever."""
    packed = mixer.told.rows
    if packed is None:
        return mixer.whole(hidden_states, *args, **options)
    if packed.group is not None or not isinstance(packed.rows, RowPlan | TreePlan):
        raise ValueError(f"{mixer.name} needs its rows whole, and sequence parallelism gives every rank a part of them")
    segments = _segments(packed.rows, hidden_states.device)
    if segments.continued and mixer.cache is None:
        raise ValueError(f"{mixer.name} takes no states that another row has left")
    return mixer.over(segments, hidden_states[0])[None]


class _Mixer:
    """A recurrent layer or convolution that computes rows by themselves."""

    def __init__(self, module: nn.Module, told: _Told) -> None:
        self._module, self.told, self.name = module, told, type(module).__name__
        self.whole: Callable[..., Any] = module.forward
        """The pass over padded rows."""
        names = inspect.signature(module.forward).parameters
        self.cache = next((name for name in _CACHES if name in names), None)
        """What it calls its cache; None: it takes none."""

    def over(self, segments: _Segments, line: Tensor) -> Tensor:
        """Return [N, D] for the tokens [N, D] of a line."""
        left: dict[int, StateLayer] = {}
        """By segment that others continue, its states, one row each."""
        outputs = []
        for call in segments.calls:
            cache = self._begun(call, left)
            hidden = line.index_select(0, call.index.flatten()).unflatten(0, call.index.shape)
            out = self._mixed(hidden, call.mask, cache)
            if call.keeps and cache is not None:
                for row, segment in enumerate(call.segments):
                    left[segment] = _copied(cast(StateLayer, cache.layers[-1]), lambda states, row=row: states[row])
            outputs.append(out.flatten(0, 1).index_select(0, call.real))
        return torch.cat(outputs).index_select(0, segments.order)

    def _begun(self, call: _Call, left: dict[int, StateLayer]) -> Cache | None:
        """Return a cache with the states that a call's segments continue, or for those that they leave."""
        if call.keeps or call.continues:
            states = StateLayer()
            if call.continues:
                each = [left[segment] for segment in call.continues]
                states = _copied(each[0], lambda _, *own: torch.stack(own), *each)
            return Cache(layers=[states] * (int(getattr(self._module, "layer_idx", 0)) + 1))
        return None

    def _mixed(self, hidden: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        options: dict[str, Any] = {"attention_mask": mask}
        if self.cache is not None:
            options[self.cache] = cache
        out = self.whole(hidden, **options)
        if not isinstance(out, Tensor) or out.shape[:2] != hidden.shape[:2]:
            raise ValueError(f"{self.name} gives something else than a hidden state per token")
        return out


def _copied(layer: StateLayer, change: Callable[..., Tensor], *others: StateLayer) -> StateLayer:
    """Return a layer whose states are `change` of those of another one, and of `others`."""
    copy = StateLayer(layer.number_of_states)
    copy.has_previous_state = dict(layer.has_previous_state)
    copy.conv_kernel_size = dict(layer.conv_kernel_size)
    for name in ("conv_states", "recurrent_states"):
        for number, states in getattr(layer, name).items():
            if states is not None:
                getattr(copy, name)[number] = change(states, *(getattr(other, name)[number] for other in others))
    return copy


@dataclass(frozen=True, eq=False)
class _Call:
    """Segments that a mixer computes together."""

    segments: tuple[int, ...]
    index: Tensor
    """int64 [B, T], the place in the line of each token; padding stands for any."""
    real: Tensor
    """int64, those of the B * T tokens whose output is taken, row by row."""
    mask: Tensor | None
    """int64 [B, T], 0 at padding, where it is at the left; None: it is at the right, or there is none."""
    continues: tuple[int, ...] = ()
    """The segment that each continues; empty: they begin rows."""
    keeps: bool = False
    """Whether others continue them."""


class _Segments:
    """The calls for a line, each after those that it continues. The segments of packed rows are the rows.

    A segment of one token that others continue is computed once more in front of each of them: steps of one token are
    other code in transformers, which writes into states and needn't round as passes do.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> None:
        self._lengths, self._device = lengths, device
        self._starts = list(accumulate(lengths, initial=0))
        self._before: list[tuple[int, ...]] = []
        """Of each segment, places of tokens that are computed in front of it."""
        self._parents: list[int] = []
        depths: list[int] = []
        for parent in parents:
            before: tuple[int, ...] = ()
            if parent >= 0 and lengths[parent] == 1:
                before, parent = (*self._before[parent], self._starts[parent]), self._parents[parent]
            self._before.append(before)
            self._parents.append(parent)
            depths.append(0 if parent < 0 else depths[parent] + 1)
        inner = set(self._parents)
        self.continued = any(parent >= 0 for parent in self._parents)
        """Whether a segment continues another."""
        sizes = [len(before) + length for before, length in zip(self._before, lengths, strict=True)]
        waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
        for segment, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
            if segment not in inner:
                waiting[len(lengths) if depth else 0, 0].append(segment)  # those that continue others come last
            else:  # without padding, which the states behind it would notice; before a row's first token they don't
                waiting[depth, size if depth else -1].append(segment)
        self.calls = [
            self._call(part, keeps=part[0] in inner)
            for (_, size), segments in sorted(waiting.items())
            for part in ([segments] if size > 0 else _alike(segments, sizes))
        ]
        line = torch.cat([call.index.flatten()[call.real] for call in self.calls])
        self.order = line.argsort()
        """int64 [N], where the output of each token of the line is among those of all calls."""

    def _call(self, segments: list[int], *, keeps: bool) -> _Call:
        parents = tuple(self._parents[segment] for segment in segments)
        continues = parents if parents[0] >= 0 else ()
        rows = [
            torch.tensor([*self._before[segment], *range(self._starts[segment], self._starts[segment + 1])])
            for segment in segments
        ]
        width = max(2 if continues else 1, *map(len, rows))
        index, real = torch.zeros(2, len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(real)
        for number, (segment, row) in enumerate(zip(segments, rows, strict=True)):
            first = width - len(row) if keeps else 0
            index[number] = row[0]
            index[number, first : first + len(row)] = row
            mask[number, first : first + len(row)] = 1
            real[number, first + len(self._before[segment]) : first + len(row)] = 1
        return _Call(
            segments=tuple(segments),
            index=index.to(self._device),
            real=real.flatten().nonzero()[:, 0].to(self._device),
            mask=mask.to(self._device) if keeps and not bool(mask.all()) else None,
            continues=continues,
            keeps=keeps,
        )


def _alike(segments: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return segments in groups of so similar lengths that padding costs less than further calls would."""
    ordered = sorted(segments, key=lambda segment: (-lengths[segment], segment))
    chunks = [-(-lengths[segment] // _CHUNK) * _CHUNK for segment in ordered]
    sizes = sorted(set(chunks), reverse=True)
    counts = [sum(chunk >= size for chunk in chunks) for size in sizes]  # of each size or a longer one
    best: list[tuple[int, int]] = [(0, 0)]  # (cost of the segments of the first sizes, where their last group begins)
    for end in range(1, len(sizes) + 1):
        before = [0, *counts]
        best.append(
            min(
                (best[begin][0] + _CALL_TOKENS + sizes[begin] * (before[end] - before[begin]), begin)
                for begin in range(end)
            )
        )
    groups, end = [], len(sizes)
    while end:
        begin = best[end][1]
        groups.append(ordered[([0, *counts])[begin] : counts[end - 1]])
        end = begin
    return groups[::-1]


_PLANS: WeakKeyDictionary[RowPlan | TreePlan, _Segments] = WeakKeyDictionary()


def _segments(rows: RowPlan | TreePlan, device: torch.device) -> _Segments:
    """Return the calls for a line, which all layers of a micro-batch share."""
    if rows not in _PLANS:
        if isinstance(rows, RowPlan):
            _PLANS[rows] = _Segments(rows.lengths, [-1] * len(rows.lengths), device)
        else:
            _PLANS[rows] = _Segments(rows.tree.lengths, rows.tree.parents, device)
    return _PLANS[rows]
