"""Stand-in for Triton: kernels can be declared and not launched.

SGLang decorates many GPU kernels at import. A CPU runs none of them; the real wheel works as well and takes 1 GB.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "3.0.0"


class _Absent:
    """Any name of Triton: modules of SGLang use them at import, as types, constants and decorators."""

    def __init__(self, name: str, *args: object, **kwargs: object) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return _Absent(self.__name__)

    def __getitem__(self, grid: object) -> _Absent:
        return self

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: object) -> _Absent:
        return self

    __ror__ = __or__


class _Kernel(_Absent):
    """A function under `@jit`: launching it raises."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{self.__name__} needs the real Triton and a GPU; this is a stand-in for tests")


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """`@jit`, `@jit(...)`, `@autotune(...)`, `@heuristics(...)`."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return _Kernel(getattr(args[0], "__name__", "kernel"))
    return lambda fn: _Kernel(getattr(fn, "__name__", "kernel"))


jit = autotune = heuristics = _decorator


class Config:
    """Settings that an autotuned kernel lists at import."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.kwargs = kwargs or {}


def cdiv(x: int, y: int) -> int:
    """x / y rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that isn't below n."""
    return 1 << max(0, n - 1).bit_length()


class _Driver(types.ModuleType):
    """As real Triton without a GPU driver: whoever asks for the device gets a RuntimeError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("0 active drivers ([]). There should only be one.")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "driver":
            return _Driver(f"{self.__name__}.driver")
        if name in ("jit", "autotune", "heuristics"):
            return _decorator
        if name[:1].isupper() and not name.isupper():
            # torch asks `isinstance(x, JITFunction)`.
            return type(name, (), {})
        return _Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every `triton.a.b` can be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("triton."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Driver(spec.name) if spec.name == "triton.runtime.driver" else _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(_Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"triton.{name}")


for _name in ("language", "runtime", "testing"):
    importlib.import_module(f"triton.{_name}")  # `from triton import ...` would find `__getattr__` first
