"""The order in which tasks are played: domains in exact proportion, epochs shuffled by key, a cursor that resumes.

Each domain is a stream of its tasks, epoch after epoch, each epoch in an order that depends on (seed, domain, epoch)
alone. Which domain gives the next task follows the quota method of Balinski and Young (1975): among the domains behind
their upper quota, the one with the smallest (drawn + 1) / share. After any number of tasks, every domain has been drawn
from less than one task more or less than its share.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from roll.data.task_ids import base_id, epoch_of, with_epoch
from roll.types.episode import Task
from roll.utils.readers import DataError
from roll.utils.seeding import keyed_shuffle, stable_hash

_STATE_VERSION = 1


class TaskSource:
    """An endless (or, with `num_train_epochs`, finite) sequence of tasks.

    The n-th pass over a domain gives its tasks the id suffix `@e<n>` (none in the first pass), so an id never occurs
    twice. With `num_train_epochs` every task is drawn exactly that often: a domain that has had its passes drops out,
    the others share what it leaves; `take` then returns fewer tasks than asked for, and `[]` at the end.
    """

    def __init__(
        self,
        domains: Mapping[str, Sequence[Task]],
        *,
        seed: int,
        probs: Mapping[str, float],
        shuffle: bool = True,
        num_train_epochs: int | None = None,
    ) -> None:
        """Start at the first epoch of every domain; ids are unique over all of them.

        `probs` (`domain_interleave_probs`) are the domains' shares, above 0 and on any scale.
        """
        self._domains = {name: tuple(tasks) for name, tasks in domains.items()}
        self._shares = _shares(self._domains, probs)
        self._seed, self._shuffle, self._num_train_epochs = seed, shuffle, num_train_epochs
        self._by_id = {task.id: task for tasks in self._domains.values() for task in tasks}
        counts = Counter(task.id for tasks in self._domains.values() for task in tasks)
        twice = [task_id for task_id, n in counts.items() if n > 1]
        if twice:
            raise DataError(f"{len(twice)} task ids are not unique over all domains, e.g. {twice[0]!r}")
        if any(epoch_of(task_id) for task_id in self._by_id):
            raise DataError("task ids must not end in @e<number>: that suffix marks repeats")
        self._identity = {
            "tasks": {name: _fingerprint(self._domains[name]) for name in self._shares},
            "seed": seed,
            "shuffle": shuffle,
            "domain_interleave_probs": {name: str(share) for name, share in self._shares.items()},
        }
        self._drawn = dict.fromkeys(self._shares, 0)
        self._returned: deque[Task] = deque()
        self._orders: dict[str, tuple[int, list[int]]] = {}
        # Quotas count from the last time that a domain dropped out.
        self._quota_drawn = dict.fromkeys(self._shares, 0)

    def take(self, n: int) -> list[Task]:
        """Return the next `n` tasks: those put back first. Fewer, or none, when `num_train_epochs` are over."""
        if n < 0:
            raise ValueError(f"can't take {n} tasks")
        tasks = [self._returned.popleft() for _ in range(min(n, len(self._returned)))]
        while len(tasks) < n:
            domain = self._next_domain()
            if domain is None:
                break
            tasks.append(self._draw(domain))
        return tasks

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Take back tasks that were not used: the next `take` gives them again, in this order. Quotas count draws, so
        they don't change."""
        waiting = {task.id for task in self._returned}
        for task in tasks:
            self._check_known(task.id)
            if task.id in waiting:
                raise ValueError(f"task {task.id!r} was put back twice")
            waiting.add(task.id)
        self._returned.extendleft(reversed(tasks))

    @property
    def remaining(self) -> int | None:
        """Tasks until the end, including those put back; None when there is no end."""
        if self._num_train_epochs is None:
            return None
        left = sum(len(self._domains[name]) * self._num_train_epochs - n for name, n in self._drawn.items())
        return left + len(self._returned)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes done by each domain, in fractions."""
        return {name: n / len(self._domains[name]) for name, n in self._drawn.items()}

    def state_dict(self, unfinished: Sequence[Task] = ()) -> dict[str, Any]:
        """Return the cursor, as plain JSON values, as if the `unfinished` tasks had been put back."""
        return {
            "version": _STATE_VERSION,
            "identity": self._identity,
            "drawn": dict(self._drawn),
            "quota_drawn": dict(self._quota_drawn),
            "returned": [task.id for task in (*unfinished, *self._returned)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; raises `DataError` when the data or its order isn't the same."""
        if state.get("version") != _STATE_VERSION:
            raise DataError(f"data cursor has version {state.get('version')!r}, this program reads {_STATE_VERSION}")
        mine, saved = self._identity, state["identity"]
        different = [key for key in mine if mine[key] != saved.get(key)]
        if different:
            key = different[0]
            raise DataError(
                f"the data cursor was saved with {key} = {saved.get(key)!r}, this run has {mine[key]!r}: resuming "
                "would skip or repeat prompts. Restore the data and its settings, or start without the checkpoint"
            )
        for task_id in state["returned"]:
            self._check_known(task_id)
        self._drawn = {name: int(state["drawn"][name]) for name in self._shares}
        self._quota_drawn = {name: int(n) for name, n in state["quota_drawn"].items()}
        self._returned = deque(self.task(task_id) for task_id in state["returned"])

    def _check_known(self, task_id: str) -> None:
        if base_id(task_id) not in self._by_id:
            raise ValueError(f"task {task_id!r} is not one of this source")

    def task(self, task_id: str) -> Task:
        """Return the task of this id; raises `ValueError` for one that isn't of this source."""
        self._check_known(task_id)
        return replace(self._by_id[base_id(task_id)], id=task_id)

    def _next_domain(self) -> str | None:
        active = {name: self._shares[name] for name in self._shares if not self._finished(name)}
        if not active:
            return None
        if set(active) != set(self._quota_drawn):
            self._quota_drawn = dict.fromkeys(active, 0)
        scale = sum(active.values())
        upto = sum(self._quota_drawn.values()) + 1
        behind = [name for name in active if self._quota_drawn[name] * scale < active[name] * upto]
        return min(behind, key=lambda name: (self._quota_drawn[name] + 1) / active[name])  # ties: the first

    def _finished(self, domain: str) -> bool:
        if self._num_train_epochs is None:
            return False
        return self._drawn[domain] >= len(self._domains[domain]) * self._num_train_epochs

    def _draw(self, domain: str) -> Task:
        tasks = self._domains[domain]
        epoch, position = divmod(self._drawn[domain], len(tasks))
        self._drawn[domain] += 1
        self._quota_drawn[domain] += 1
        task = tasks[self._order(domain, epoch)[position]]
        return replace(task, id=with_epoch(task.id, epoch))

    def _order(self, domain: str, epoch: int) -> list[int]:
        cached = self._orders.get(domain)
        if cached is None or cached[0] != epoch:
            order = list(range(len(self._domains[domain])))
            if self._shuffle:
                order = keyed_shuffle(order, self._seed, "shuffle", domain, epoch)
            self._orders[domain] = cached = (epoch, order)
        return cached[1]


def _shares(domains: Mapping[str, Sequence[Task]], probs: Mapping[str, float]) -> dict[str, Fraction]:
    """Return the exact share of each domain, in the order of `domains`; raises `DataError` for one without tasks."""
    # 0.1 is meant as 1/10, not as the nearest binary fraction.
    exact = {name: Fraction(str(probs[name])) for name in domains}
    empty = [name for name in exact if not domains[name]]
    if empty:
        raise DataError(f"domain {empty[0]!r} has probability {probs[empty[0]]} but no tasks")
    total = sum(exact.values())
    return {name: prob / total for name, prob in exact.items()}


def _fingerprint(tasks: Sequence[Task]) -> str:
    """Hash the tasks, what they ask and expect, and their order."""
    content = (
        json.dumps(
            [task.id, task.payload.get("prompt"), task.payload.get("messages"), str(task.payload.get("ground_truth"))]
        )
        for task in tasks
    )
    return f"{len(tasks)} tasks, {stable_hash(*content):016x}"
