"""Looks into an engine after a weight update: what its model holds, and what it says about a few tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from torch import Tensor

from roll.distributed.weights import Checksum, WeightSyncError, weights_checksum
from roll.strategies.abilities import LoadedWeights
from roll.strategies.base import Completion, InferEngine, NamedWeights, Request
from roll.strategies.engines.responses import refused_completion


class EngineBusy(WeightSyncError):
    """An engine had no place for a probe for too long."""


class LoadedCheck:
    """Compares what arrives with what the engine's model holds afterwards, for engines that can tell."""

    def __init__(self, engine: InferEngine) -> None:
        self._engine = engine
        self._dtypes = {name: tensor.dtype for name, tensor in self._loaded() or ()}
        self._expected = Checksum()

    def _loaded(self) -> NamedWeights | None:
        return self._engine.loaded_weights() if isinstance(self._engine, LoadedWeights) else None

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> NamedWeights:
        """Yield the stream itself, each tensor hashed in the type that the model keeps it in."""
        for name, tensor in stream:
            if name in self._dtypes:
                self._expected.add(name, tensor.to(self._dtypes[name]))
            yield name, tensor

    def verify(self, rank: int, version: int) -> None:
        """Raise `WeightSyncError` if the model holds something else."""
        loaded = self._loaded()
        if loaded is None:
            return
        expected, actual = self._expected.hexdigest(), weights_checksum(loaded)
        if actual != expected:
            raise WeightSyncError(
                f"engine {rank} was sent weights of version {version} with checksum {expected}, its model now holds "
                f"tensors with checksum {actual}"
            )


class EngineProbes:
    """Keeps the completions of probes apart from those that the scheduler waits for, in whatever thread they come.

    The engine may be full: a probe then waits for a place, at most `timeout` seconds.
    """

    def __init__(self, engine: InferEngine, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._completions: dict[str, Completion] = {}
        self._held: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; the next `poll` says of those that the engine can't run why."""
        try:
            self._engine.submit(requests)
            return
        except ValueError:
            refused = [completion for request in requests if (completion := self._refusal(request)) is not None]
        with self._lock:
            self._held += refused

    def _refusal(self, request: Request) -> Completion | None:
        try:
            self._engine.submit([request])
        except ValueError as error:
            return refused_completion(request.id, str(error))
        return None

    def poll(self, budget: float) -> list[Completion]:
        """Return the engine's `poll` without probes, and with what came up while a probe ran."""
        with self._lock:
            held, self._held = self._held, []
        return held + self._without_probes(self._engine.poll(0 if held else budget))

    def sample(self, requests: Sequence[Request], patience: float | None = None) -> list[Completion]:
        """Sample these responses now, all at once, whatever else is under way.

        Raises `EngineBusy` after `patience` seconds, if that is less than the limit of any call.
        """
        ids = [request.id for request in requests]
        with self._lock:
            self._open.update(ids)
        timeout = self._timeout if patience is None else min(patience, self._timeout)
        deadline = time.monotonic() + timeout
        self._engine.submit(requests)
        while True:
            with self._lock:
                if self._completions.keys() >= set(ids):
                    return [self._completions.pop(name) for name in ids]
            if time.monotonic() > deadline:
                self._engine.abort(ids)
                tokens = sum(request.params.max_new_tokens for request in requests)
                raise EngineBusy(f"the engine didn't sample {tokens} probe tokens in {timeout:g} s")
            others = self._without_probes(self._engine.poll(1))
            with self._lock:
                self._held += others

    def _without_probes(self, completions: Sequence[Completion]) -> list[Completion]:
        with self._lock:
            probes = {completion.id: completion for completion in completions if completion.id in self._open}
            self._open -= probes.keys()
            self._completions.update(probes)
        return [completion for completion in completions if completion.id not in probes]
