"""How many threads compute a forward pass on a CPU.

Every operator of torch wakes its threads and waits for them, which takes tens of microseconds. A decode step of a small
model has hundreds of operators that take no longer than that by themselves.

`torch.set_num_threads` would change the results of whatever else computes in this process at that moment, by timing:
the calling thread's own number is set in OpenMP and MKL instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

_WORTH_SHARING = 8 << 20
"""Multiplications of a matrix product that pay for waking another thread: 0.2 ms of one core."""
_WORTH_SHARING_ALONE = 2 << 20
"""The same where only operators that say so are shared: the small ones between them wake no thread."""
_ROWS_OF_A_READ = 8
"""Reading a weight from memory takes about as long as multiplying it with so many tokens."""


class ForwardThreads:
    """Runs passes that are too small to share between threads on one. Depends on sizes alone, never on timing."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
        self._weights = sum(matrices) / max(len(matrices), 1)
        self._chooses = bool(matrices) and next(model.parameters()).device.type == "cpu"

    def shares(self, tokens: int) -> bool:
        """Return whether a pass over these tokens is worth all threads: by a product with a matrix of average size."""
        return not self._chooses or self._product(tokens) > _WORTH_SHARING

    def _product(self, tokens: int) -> float:
        return max(tokens, _ROWS_OF_A_READ) * self._weights

    @contextlib.contextmanager
    def of(self, tokens: int) -> Iterator[AbstractContextManager[Any]]:
        """Hold the threads of a pass over so many tokens; what it gives goes around the large operators of the pass."""
        limit, threads = _limit(), torch.get_num_threads()
        if limit is None or threads == 1 or self.shares(tokens):
            yield contextlib.nullcontext()
            return
        limit(1, 1)
        try:
            yield _All(limit, threads) if self._product(tokens) > _WORTH_SHARING_ALONE else contextlib.nullcontext()
        finally:
            limit(threads, 0)


class _All:
    """Around operators on all threads in a pass on one; not nested."""

    def __init__(self, limit: Callable[[int, int], None], threads: int) -> None:
        self._limit, self._threads = limit, threads

    def __enter__(self) -> None:
        self._limit(self._threads, 0)

    def __exit__(self, *_: object) -> None:
        self._limit(1, 1)


@functools.cache
def _limit() -> Callable[[int, int], None] | None:
    """Return what sets the threads of the calling thread's operators, in OpenMP and in MKL (0: as OpenMP), if these are
    what torch was built with."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        openmp: Any = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    mkl: Any = getattr(library, "MKL_Set_Num_Threads_Local", None)

    def limit(threads: int, products: int) -> None:
        openmp(threads)
        if mkl is not None:
            mkl(products)

    return limit
