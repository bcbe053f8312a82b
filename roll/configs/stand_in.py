"""What stands where a configuration has no usable value, so that the rules about everything else still run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class StandInUsed(Exception):
    """A rule has asked for the value of a key that has none, so it can't tell anything."""


def _refuse(*_: Any) -> NoReturn:
    raise StandInUsed


def _get(_: Any, name: str) -> NoReturn:
    if name == "__dict__":  # vLLM asks everything in all modules for it
        raise AttributeError(name)
    raise StandInUsed


class StandIn:
    """Raises `StandInUsed` whatever is done with it, so that no rule can draw a conclusion from it."""

    __slots__ = ()
    __class__ = property(_refuse)  # type: ignore[assignment]  # which `isinstance` asks for
    __getattr__ = _get
    __getitem__ = __iter__ = __len__ = __contains__ = __call__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __neg__ = __abs__ = __pow__ = __rpow__ = _refuse
    __int__ = __float__ = __index__ = __round__ = __format__ = __repr__ = __str__ = __fspath__ = _refuse
    __or__ = __ror__ = __and__ = __rand__ = __reversed__ = __enter__ = __exit__ = _refuse


STAND_IN: Any = StandIn()


def collect(rules: Iterable[Callable[[Any], Iterable[T]]], config: Any, *, sound: bool = True) -> list[T]:
    """Return what `rules` yield about `config`.

    Unless the configuration is `sound`, a rule that stumbles ends there with what it has found: it was about a value
    that is missing or refused already, which is the reason that users need.
    """
    results: list[T] = []
    for rule in rules:
        try:
            for one in rule(config):
                results.append(one)
        except Exception:
            if sound:
                raise
    return results
