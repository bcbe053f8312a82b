"""A stand-in for the streams of torch.cuda that finds what they leave unordered, by vector clocks.

Everything runs on the CPU, at once. What is recorded is what an accelerator could have done in another order: two uses
of a piece of memory on two streams, one of them a write, with no wait between them; and memory that is freed, so that
the computing stream may use it again, while the other one isn't known to be done with it.
"""

from __future__ import annotations

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Stream:
    def __init__(self, streams, name):
        self.streams, self.name, self.clock = streams, name, {}

    def wait_event(self, clock):
        self.streams.log.append(("wait", self.name))
        self.clock = {name: max(self.knows(name), clock.get(name, 0)) for name in {*self.clock, *clock}}

    def wait_stream(self, other):
        self.wait_event(other.clock)

    def record_event(self):
        return dict(self.clock)

    def knows(self, name):
        return self.clock.get(name, 0)


class Streams(TorchDispatchMode):
    """Inside, operators belong to the stream that is current; `races` says what could have gone wrong."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.races, self.log, self._uses, self._host = [], [], {}, set()
        self.computing = self._current = Stream(self, "computing")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "copying"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._within)

    @contextlib.contextmanager
    def _within(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def host_bytes(self, size, *, pinned):
        """In place of `offload.host_bytes`: what torch's own allocator does with pinned memory is not its concern."""
        assert pinned, "a copy from or to memory that isn't pinned makes the host wait"
        room = torch.empty(size, dtype=torch.uint8)
        self._host.add(room.untyped_storage()._cdata)
        return room

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self._check_freed()
        made = operator(*args, **(kwargs or {}))
        if operator.is_view:
            return made
        read = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        written = [value for value in tree_iter(made) if isinstance(value, torch.Tensor)]
        here = self._current
        here.clock[here.name] = here.knows(here.name) + 1
        self.log.append((str(operator), here.name))
        for tensor in read:
            self._use(operator, tensor, write=False)
        for tensor in written:
            self._use(operator, tensor, write=True)
        return made

    def _use(self, operator, tensor, *, write):
        memory, here = tensor.untyped_storage(), self._current
        _, uses = self._uses.setdefault(memory._cdata, (StorageWeakRef(memory), []))
        for name, time, wrote in uses:
            if (write or wrote) and time > here.knows(name):
                self.races.append(f"{operator} on {here.name} doesn't wait for what {name} does")
        uses.append((here.name, here.knows(here.name), write))

    def _check_freed(self):
        for key, (memory, uses) in list(self._uses.items()):
            if not memory.expired():
                continue
            del self._uses[key]
            if key in self._host:
                self._host.discard(key)
                continue
            for name, time, _ in uses:
                if time > self.computing.knows(name):
                    self.races.append(f"memory is free for {self.computing.name} before {name} is done with it")
