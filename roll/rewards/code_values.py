"""Plain values as JSON, for the wire between a program of the model and what checks it.

Both ends use this file: it runs inside of the sandbox too and imports the standard library alone. Numbers, texts, None
and booleans are themselves; all else is a list that begins with a tag. Decoding makes values of exactly these types, so
nothing that a program sends can carry behaviour: no `__eq__` that is always true, no `__reduce__`.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 100
MAX_VALUES = 200_000
MAX_DRAWN = 1_000
"""Items drawn from an iterator."""
_BIG = 1_000  # bits; a longer integer is written in hexadecimal, which has no limit on digits
_KINDS: tuple[type, ...] = (
    int, float, str, bool, list, tuple, dict, set, frozenset, bytes, complex, type(None), range, object
)  # fmt: skip
_TYPES = {kind.__name__: kind for kind in _KINDS}
_DATES: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}


class CannotCross(ValueError):
    """A value that has no plain form."""


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
    """Return a value as JSON. What isn't plain goes to `refer`, which returns its encoding.

    Raises `CannotCross` without `refer`, for a value that contains itself and for one that is too large.
    """
    return _Encoder(refer).encode(value, 0)


class _Encoder:
    def __init__(self, refer: Callable[[Any], Any] | None) -> None:
        self._refer, self._left = refer, MAX_VALUES

    def encode(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise CannotCross("a value that is too large, or contains itself")
        if value is None or isinstance(value, (bool, str)):
            return value if value is None or isinstance(value, bool) else str(value)
        if isinstance(value, int):
            return int(value) if value.bit_length() < _BIG else ["i", hex(value)]
        if isinstance(value, float):
            return float(value) if value - value == 0 else ["f", str(float(value))]
        encoded = self._collection(value, depth + 1) or _scalar(value)
        if encoded is not None:
            return encoded
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            return ["it", self._items(itertools.islice(value, MAX_DRAWN), depth + 1)]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist(), depth + 1)
        if self._refer is None:
            raise CannotCross(f"a value of type {type(value).__name__}, which isn't plain")
        return self._refer(value)

    def _items(self, values: Any, depth: int) -> list[Any]:
        return [self.encode(item, depth) for item in values]

    def _collection(self, value: Any, depth: int) -> list[Any] | None:
        if isinstance(value, tuple):
            return ["t", self._items(value, depth)]
        if isinstance(value, list):
            return ["l", self._items(value, depth)]
        if isinstance(value, (set, frozenset)):
            tag = "s" if isinstance(value, set) else "z"
            return [tag, sorted(self._items(value, depth), key=json.dumps)]
        if isinstance(value, dict):
            kind = "Counter" if isinstance(value, collections.Counter) else ""
            kind = "OrderedDict" if isinstance(value, collections.OrderedDict) else kind
            return ["d", [[self.encode(k, depth), self.encode(v, depth)] for k, v in value.items()], kind]
        if isinstance(value, collections.deque):
            return ["q", self._items(value, depth)]
        if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
            return ["l", self._items(value, depth)]
        return None


def _scalar(value: Any) -> list[Any] | None:
    if isinstance(value, (bytes, bytearray)):
        return ["b" if isinstance(value, bytes) else "ba", value.hex()]
    if isinstance(value, complex):
        return ["c", [encode(value.real), encode(value.imag)]]
    if isinstance(value, decimal.Decimal):
        return ["D", str(value)]
    if isinstance(value, fractions.Fraction):
        return ["F", [encode(value.numerator), encode(value.denominator)]]
    if isinstance(value, range):
        return ["r", [value.start, value.stop, value.step]]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return ["w", next(n for n in ("datetime", "date", "time") if isinstance(value, _DATES[n])), value.isoformat()]
    if isinstance(value, datetime.timedelta):
        return ["td", [value.days, value.seconds, value.microseconds]]
    if isinstance(value, BaseException):
        return encode_error(value)
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return ["T", value.__name__]
    return ["dots"] if value is ... else None


def encode_error(error: BaseException) -> list[Any]:
    """Return an exception by its name, its bases' names and its text."""
    try:
        text = str(error)[:2000]
    except Exception:  # noqa: BLE001 - a program's own exception
        text = ""
    return ["x", type(error).__name__, [base.__name__ for base in type(error).__mro__], text]


def decode(value: Any, resolve: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return the value of an encoding. References go to `resolve`. Raises `ValueError` for anything malformed."""
    try:
        return _decode(value, resolve, 0)
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not an encoded value: {error}") from error


def _decode(value: Any, resolve: Callable[[list[Any]], Any] | None, depth: int) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("not an encoded value")
        return value
    if depth > 2 * MAX_DEPTH:
        raise ValueError("an encoded value that is too deep")
    tag = value[0]
    if tag in _ITEMS:
        return _ITEMS[tag]([_decode(item, resolve, depth + 1) for item in value[1]])
    if tag == "d":
        pairs = {_decode(k, resolve, depth + 1): _decode(v, resolve, depth + 1) for k, v in value[1]}
        return _DICTS[value[2]](pairs)
    if tag in _SCALARS:
        return _SCALARS[tag](value)
    if resolve is None:
        raise ValueError("a value that isn't plain")
    return resolve(value)


def decode_error(value: list[Any]) -> BaseException:
    """Return an exception with the name and text of the encoded one, derived from its nearest built-in base."""
    import builtins

    name, bases, text = str(value[1]), value[2], str(value[3])
    for base in bases:
        known = getattr(builtins, base, None) if isinstance(base, str) else None
        if isinstance(known, type) and issubclass(known, BaseException):
            if not issubclass(known, Exception):  # SystemExit, KeyboardInterrupt: nothing to end here
                known = RuntimeError
            try:
                made = known if known.__name__ == name else type(name, (known,), {})
                return made(text)
            except TypeError:  # UnicodeDecodeError and its like want more
                return ValueError(text)
    return RuntimeError(text)


_DICTS: dict[str, Any] = {
    "": dict,
    "Counter": lambda pairs: collections.Counter(pairs),
    "OrderedDict": collections.OrderedDict,
}
_ITEMS: dict[str, Any] = {
    "t": tuple, "l": list, "s": set, "z": frozenset, "q": collections.deque, "it": iter,
}  # fmt: skip
_SCALARS: dict[str, Any] = {
    "i": lambda v: int(v[1], 16),
    "f": lambda v: float(v[1]),
    "b": lambda v: bytes.fromhex(v[1]),
    "ba": lambda v: bytearray.fromhex(v[1]),
    "c": lambda v: complex(decode(v[1][0]), decode(v[1][1])),
    "D": lambda v: decimal.Decimal(v[1]),
    "F": lambda v: fractions.Fraction(decode(v[1][0]), decode(v[1][1])),
    "r": lambda v: range(*v[1]),
    "w": lambda v: _DATES[v[1]].fromisoformat(v[2]),
    "td": lambda v: datetime.timedelta(*v[1]),
    "x": decode_error,
    "T": lambda v: _TYPES[v[1]],
    "dots": lambda v: ...,  # noqa: ARG005
}
