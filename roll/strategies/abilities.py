"""What only some training backends and engines can do: small protocols, which a backend has by having their methods.

Workers ask `isinstance(strategy, Sleeps)`, and do without where it isn't. A table in docs/backends.md says which of the
bundled backends have which; one of your own adds the methods that it can offer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from roll.configs.schema.checkpoint_config import STATE_CONTENTS, CheckpointContent
from roll.distributed.weights import WeightPart
from roll.strategies.base import EngineCounters, NamedWeights
from roll.strategies.state_files import StateFiles


class _AbilityType(type(Protocol)):  # type: ignore[misc]
    """Let `isinstance(backend, Sleeps)` ask the object itself, not its class.

    It has an ability if it has all its members, none of them None or False, and its methods take the keyword-only
    parameters of the ability's. So a backend of one's own may leave out a parameter, inherits nothing, and may pass
    calls on to another backend by `__getattr__`, which a plain `Protocol` doesn't see from Python 3.12 on.
    """

    def __instancecheck__(cls, backend: object) -> bool:
        return all(_has(backend, name, member) for name, member in vars(cls).items() if not name.startswith("_"))

    __subclasscheck__ = __instancecheck__  # of a class: whether its objects may have it


def _has(backend: object, name: str, member: Any) -> bool:
    own: Any = getattr(backend, name, None)
    if not own or not callable(member):
        return bool(own)
    added = {key for key, value in signature(member).parameters.items() if value.kind is Parameter.KEYWORD_ONLY}
    return not added or added <= signature(own).parameters.keys()


# --- of trainers and engines ------------------------------------------------------------------------------------------


@runtime_checkable
class Sleeps(Protocol, metaclass=_AbilityType):
    """A trainer or engine that gives device memory back for a while; others stay resident."""

    def sleep(self, parts: Sequence[Any]) -> int:
        """Take these parts (`StatePart` or `EnginePart`) off the device until `wake`; bytes freed there.

        Nothing may run in an engine.
        """

    def wake(self, parts: Sequence[Any]) -> None:
        """Bring these parts back; what is awake stays. Gradients come back empty, weights of an engine with whatever
        content: an update must follow."""


# --- of trainers ------------------------------------------------------------------------------------------------------


@runtime_checkable
class SavesContents(Protocol, metaclass=_AbilityType):
    """A trainer whose checkpoints may hold less than everything."""

    def save(self, path: Path, *, contents: Sequence[CheckpointContent] = STATE_CONTENTS) -> None:
        """Write these only: `model` (weights), `optimizer` (its state, if the role trains) and `extra` (position in
        the learning-rate schedule)."""

    def load(self, path: Path, *, contents: Sequence[CheckpointContent] = STATE_CONTENTS) -> None:
        """Restore these of what `save` wrote; the rest stays as it was built."""


@runtime_checkable
class SavesToFiles(Protocol, metaclass=_AbilityType):
    """A trainer that writes through `StateFiles`: to the disk, or into memory from where a thread writes it later."""

    def save(
        self, path: Path, *, contents: Sequence[CheckpointContent] = STATE_CONTENTS, files: StateFiles | None = None
    ) -> None:
        """Write to `files`; None: to the disk."""

    def export(self, path: Path, *, files: StateFiles | None = None) -> None:
        """Write to `files`."""


@runtime_checkable
class CastsWeights(Protocol, metaclass=_AbilityType):
    """A trainer that sends weights in the type that an engine computes in; engines cast what others send."""

    def named_weights(self, part: WeightPart = "merged", *, dtype: torch.dtype | None = None) -> NamedWeights:
        """Cast weights before they are gathered, but no buffers and adapters. None: they stay as they are."""


@runtime_checkable
class SendsFromEveryRank(Protocol, metaclass=_AbilityType):
    """A trainer whose `named_weights` yields the same whole tensors on every rank, so that each can send a part of
    them; of others rank 0 sends all. A class that has a `named_weights` of its own says so itself."""

    sends_from_every_rank: bool = True


@runtime_checkable
class GathersOnHost(Protocol, metaclass=_AbilityType):
    """A trainer whose `named_weights` yields tensors of the host also where an accelerator computes."""

    @property
    def gathers_on_host(self) -> bool:
        """Return whether it does with these options."""


@runtime_checkable
class ResidentWeights(Protocol, metaclass=_AbilityType):
    """A trainer with tensors that it sends as they lie."""

    def resident_weights(self, dtype: torch.dtype | None) -> Iterable[Tensor]:
        """Return tensors of this rank that `named_weights(dtype=dtype)` hands out as is: full, on the host, uncast.

        Their memory may be exchanged for some that engines can read, see `shm_places.share`.
        """


@runtime_checkable
class LendsWeights(Protocol, metaclass=_AbilityType):
    """A trainer whose weights an engine of its process can compute with while it stands still."""

    def lend_weights(self, dtype: torch.dtype | None) -> Mapping[str, Tensor]:
        """Return the tensors that `named_weights(dtype=dtype)` hands out as they are, by their names.

        They stay the trainer's, whose steps change them. How they lie in memory doesn't depend on whether they are
        lent: sums are rounded in the order in which numbers lie.
        """


# --- of engines -------------------------------------------------------------------------------------------------------


@runtime_checkable
class TakesAdapters(Protocol, metaclass=_AbilityType):
    """An engine that was built for LoRA adapters and samples only once it has weights and adapters."""

    def update_adapters(self, version: int, adapters: Iterable[tuple[str, Tensor]]) -> None:
        """Update LoRA adapters, as `update_weights` does, over the base weights that came with its last call."""


@runtime_checkable
class LoadedWeights(Protocol, metaclass=_AbilityType):
    """An engine whose model lies in this process."""

    def loaded_weights(self) -> NamedWeights | None:
        """Return the tensors that the model holds, under the names of `update_weights`; None: unknown."""


@runtime_checkable
class BorrowsWeights(Protocol, metaclass=_AbilityType):
    """An engine that can compute with the tensors of a trainer in its process."""

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these in place of its own of the same type, shape and strides, by the names of `update_weights`.

        They change while nothing is sampled; `update_weights` then comes before the next request.
        """


@runtime_checkable
class CountsUpdates(Protocol, metaclass=_AbilityType):
    """An engine that counts what weight updates did to responses on their way."""

    def take_counters(self) -> EngineCounters:
        """Return the counts since the last call."""
