"""Token columns of responses: arrays that are read as tuples.

A step has millions of tokens. As a Python number each takes some 30 bytes, and time wherever it passes:
engine, pickle, controller, training rows. So the classes that carry responses keep a column as the bytes of an array,
which are handed on whole. Environments, rewards and agents still find a tuple, made when somebody reads the field.
Code that takes whole columns asks for `array` and copies a turn at a time.

    @dataclass(frozen=True, kw_only=True)
    class Answer(PackedColumns):
        token_ids: Column[int] = Column("q")

    answer = Answer(token_ids=[3, 5])
    answer.token_ids            # (3, 5)
    answer.array("token_ids")   # int64 [2], read-only
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar, cast, overload

import numpy as np

N = TypeVar("N", int, float)
P = TypeVar("P", bound="PackedColumns")

_BYTES = 8  # Of a number


class Column(Generic[N]):
    """A field of a `PackedColumns`: one number per token. `q`: int64; `d`: float64, so that nothing is rounded.

    It takes any sequence of numbers. Raises `OverflowError` or `TypeError` for what doesn't fit.
    """

    def __init__(self, typecode: Literal["q", "d"]) -> None:
        self.typecode = typecode
        self.dtype = np.dtype({"q": np.int64, "d": np.float64}[typecode])

    def __set_name__(self, owner: type[PackedColumns], name: str) -> None:
        self._name, self.read = name, f"_{name}"
        owner._columns = {**owner._columns, name: self}

    @overload
    def __get__(self, instance: None, owner: type) -> NoReturn: ...
    @overload
    def __get__(self, instance: PackedColumns, owner: type) -> tuple[N, ...]: ...
    def __get__(self, instance: PackedColumns | None, owner: type) -> tuple[N, ...]:
        if instance is None:
            raise AttributeError(self._name)  # says to `dataclass` that the field has no default
        state = instance.__dict__
        if self.read not in state:  # kept, or a loop over positions would make the tuple at each of them
            packed = state[self._name]
            state[self.read] = struct.unpack(f"{len(packed) // _BYTES}{self.typecode}", packed)
        return cast("tuple[N, ...]", state[self.read])

    def __set__(self, instance: PackedColumns, value: Iterable[N]) -> None:
        instance.__dict__[self._name] = self._packed(value)

    def _packed(self, value: Any) -> bytes:
        if isinstance(value, np.ndarray):
            if value.dtype == self.dtype and value.ndim == 1:
                base = value.base
                if type(base) is bytes and len(base) == value.nbytes:
                    return base  # another's `array`, whole: shared and not copied
                return value.tobytes()
            value = value.tolist()  # numpy would wrap what doesn't fit
        if isinstance(value, array) and value.typecode == self.typecode:
            return value.tobytes()
        # `array` takes `bytes` as packed numbers; as an iterator they are numbers.
        return array(self.typecode, value if isinstance(value, (list, tuple)) else iter(value)).tobytes()


class PackedColumns:
    """Base of frozen dataclasses, without slots, that have `Column` fields."""

    _columns: ClassVar[Mapping[str, Column[Any]]] = {}

    def __post_init__(self) -> None:
        """Check the fields; also called by `replace`."""

    def array(self, name: str) -> np.ndarray:
        """Return a column as a read-only array [tokens], without a copy."""
        return np.frombuffer(self.__dict__[name], self._columns[name].dtype)

    def size(self, name: str) -> int:
        """Return how many tokens a column has: quicker than `len` of the tuple or array."""
        return len(self.__dict__[name]) // _BYTES

    def replace(self: P, **changes: Any) -> P:
        """Return the same with these fields changed. As `dataclasses.replace`, which reads columns as tuples."""
        state = self.__getstate__()
        if not changes.keys() <= state.keys():
            unknown = sorted(changes.keys() - state.keys())
            raise TypeError(f"{type(self).__name__} has no fields {unknown}; known: {sorted(state)}")
        new = object.__new__(type(self))
        new.__dict__.update(state)
        for name, value in changes.items():
            object.__setattr__(new, name, value)  # as in the __init__ of a frozen dataclass
        new.__post_init__()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for pickle and copies: columns are their bytes, without the tuples that were read."""
        state = self.__dict__.copy()
        for column in self._columns.values():
            state.pop(column.read, None)
        return state
