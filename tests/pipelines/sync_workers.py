"""Workers that have weights and no model, for the tests of weight sync; importable in another process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch

from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.transports import Sent, TransferSummary, Transport, receive, send
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.transports.shm_places import share
from roll.distributed.weights import weights_checksum
from roll.distributed.worker import Worker, WorkerInfo


def weights_of(step: int, count: int = 12) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(count):
        yield f"layer.{i}", torch.full((3000,), step + i / 100)


class FakeTrainer(Worker):
    """Its weights are those of `weights_of(step)`; every rank goes through them."""

    def __init__(self, info: WorkerInfo, trouble: tuple[str, int, int] = ("", 0, 0)) -> None:
        super().__init__(info)
        self.step = 0
        self.trouble = trouble
        self.seen = 0
        self.placed: dict[str, torch.Tensor] = {}
        self.copy = WeightCopy()

    @dispatch(Dispatch.ONE_TO_ALL)
    def weight_copy(self) -> str:
        return self.copy.name

    @dispatch(Dispatch.ONE_TO_ALL)
    def sends_from_every_rank(self) -> bool:
        return True

    @dispatch(Dispatch.ONE_TO_ALL)
    def lend_weights(self, dtype: str) -> dict[str, torch.Tensor]:
        del dtype
        return {}

    @dispatch(Dispatch.ONE_TO_ALL)
    def gathers_on_host(self) -> bool:
        return False

    @dispatch(Dispatch.ONE_TO_ALL)
    def train(self) -> None:
        self.step += 1
        for name, tensor in weights_of(self.step) if self.placed else ():
            self.placed[name].copy_(tensor)

    @dispatch(Dispatch.ONE_TO_ALL)
    def place(self) -> None:
        """Keep the weights in shared memory from now on, as a trainer of one rank does."""
        self.placed = dict(weights_of(self.step))
        share(self.placed.values())

    @dispatch(Dispatch.ONE_TO_ALL)
    def arm(self, trouble: tuple[str, int, int]) -> None:
        """(what, rank, at which tensor)"""
        self.trouble = trouble

    def watched(self, stream: Any) -> Iterator[tuple[str, torch.Tensor]]:
        what, rank, at = self.trouble
        for i, (name, tensor) in enumerate(stream):
            if what and rank == self.info.rank and i == at:
                self.trouble = ("", 0, 0)
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "raise":
                    raise KeyError(f"{name} is unknown")
                if what == "flip":
                    tensor = tensor + 1
            yield name, tensor

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_weights(self, transport: Transport, delta: Delta | None = None) -> Sent:
        step = 0 if transport.transfer.part == "base" else self.step  # the base is frozen

        def weights() -> Iterator[tuple[str, torch.Tensor]]:  # some transports ask twice
            return self.watched(self.placed.items() if self.placed else weights_of(step))

        return send(transport, weights, self.info.rank, delta=delta, copy=self.copy)

    @dispatch(Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        return weights_checksum(weights_of(self.step))


class FakeEngine(FakeTrainer):
    """Keeps what it is sent."""

    weights: dict[str, torch.Tensor] = {}
    version = -1
    log: list[tuple[str, int]] = []
    """(part, version) of everything that was loaded."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def update_weights(self, transport: Transport, handles: list[Any], delta: Delta | None = None) -> TransferSummary:
        with receive(transport, handles, self.info.rank, delta=delta, copy=self.copy) as incoming:
            self.weights = {name: tensor.clone() for name, tensor in self.watched(incoming)}
        self.version = transport.transfer.version
        self.log = [*self.log, (transport.transfer.part, self.version)]
        return incoming.summary()

    @dispatch(Dispatch.ONE_TO_ALL)
    def forget(self) -> None:
        self.weights, self.version, self.log, self.copy = {}, -1, [], WeightCopy()

    @dispatch(Dispatch.ONE_TO_ALL)
    def loaded(self) -> tuple[list[tuple[str, int]], str]:
        return self.log, weights_checksum(self.weights.items())

    @dispatch(Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[int, str]:
        return self.version, weights_checksum(self.weights.items())
