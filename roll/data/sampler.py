"""The order in which tasks are played: domains in exact proportion, epochs shuffled by key, a cursor that resumes.

Each domain is a stream of its tasks, epoch after epoch, each epoch in an order that depends on (seed, domain, epoch)
alone. Which domain gives the next task follows the quota method of Balinski and Young (1975): among the domains behind
their upper quota, the one with the smallest (drawn + 1) / share. After any number of tasks, every domain has been drawn
from less than one task more or less than its share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.configs.schema.worker_config import CurriculumArgs
from roll.data.curriculum import SuccessRates, by_difficulty, shuffled
from roll.data.task_ids import base_id, epoch_of, with_epoch
from roll.data.task_tables import ListTable, TaskTable
from roll.types.trajectory import Task
from roll.utils.rows import DataError
from roll.utils.seeding import stable_hash

_STATE_VERSION = 1
EPOCH_IN_ID = "task ids must not end in @e<number>: that suffix marks repeats"


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
        curriculum: CurriculumArgs | None = None,
        difficulty: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Start at the first epoch of every domain; ids are unique over all of them.

        Args:
            probs: the domains' shares (`domain_interleave_probs`), above 0 and on any scale.
            curriculum: the order within an epoch.
            difficulty: with a curriculum by column, that of each domain's tasks.
        """
        self._domains = {
            name: tasks if isinstance(tasks, TaskTable) else ListTable(tasks) for name, tasks in domains.items()
        }
        self._curriculum, self._difficulty = curriculum or CurriculumArgs(), difficulty or {}
        self._success = SuccessRates(self._curriculum, seed) if self._curriculum.by == "success" else None
        self._shares = _shares(self._domains, probs)
        self._seed, self._shuffle, self._num_train_epochs = seed, shuffle, num_train_epochs
        self._check_ids(domains)
        self._identity: dict[str, Any] = {
            "tasks": {name: self._domains[name].fingerprint for name in self._shares},
            "seed": seed,
            "shuffle": shuffle,
            "domain_interleave_probs": {name: str(share) for name, share in self._shares.items()},
        }
        if self._curriculum.by is not None:
            self._identity["curriculum"] = asdict(self._curriculum)
            self._identity["difficulty"] = {name: stable_hash(*map(str, of)) for name, of in self._difficulty.items()}
        self._drawn = dict.fromkeys(self._shares, 0)
        self._passed_over = 0
        self._returned: deque[Task] = deque()
        self._orders: dict[str, tuple[int, NDArray[np.int64]]] = {}
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
            task = self._draw(domain)
            if task is not None:
                tasks.append(task)
        return tasks

    def observe(self, task_id: str, success: float) -> None:
        """Tell a curriculum by success which share of a group's responses solved its task. It acts from `apply` on."""
        if self._success is not None:
            self._success.observe(base_id(task_id), success)

    def apply_observed(self) -> dict[str, float]:
        """Let what was observed act from the next draw on; return metrics."""
        if self._success is None:
            return {}
        self._success.apply()
        mean = self._success.mean
        return {} if mean is None else {"data/success_rate": mean, "data/passed_over": float(self._passed_over)}

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
        state = {
            "version": _STATE_VERSION,
            "identity": self._identity,
            "drawn": dict(self._drawn),
            "quota_drawn": dict(self._quota_drawn),
            "returned": [task.id for task in (*unfinished, *self._returned)],
        }
        if self._success is not None:
            state["success"] = {**self._success.state_dict(), "passed_over": self._passed_over}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; raises `DataError` when the data or its order isn't the same."""
        if state.get("version") != _STATE_VERSION:
            raise DataError(f"data cursor has version {state.get('version')!r}, this program reads {_STATE_VERSION}")
        mine, saved = self._identity, state["identity"]
        different = [key for key in {**mine, **saved} if mine.get(key) != saved.get(key)]
        if different:
            key = different[0]
            raise DataError(
                f"the data cursor was saved with {key} = {saved.get(key)!r}, this run has {mine.get(key)!r}: resuming "
                "would skip or repeat prompts. Restore the data and its settings, or start without the checkpoint"
            )
        for task_id in state["returned"]:
            self._check_known(task_id)
        self._drawn = {name: int(state["drawn"][name]) for name in self._shares}
        self._quota_drawn = {name: int(n) for name, n in state["quota_drawn"].items()}
        self._returned = deque(self.task(task_id) for task_id in state["returned"])
        if self._success is not None:
            self._success.load_state_dict(state["success"])
            self._passed_over = int(state["success"]["passed_over"])

    def _check_ids(self, domains: Mapping[str, Sequence[Task]]) -> None:
        """Raise `DataError` for ids that repeat, and such that look like a repeat's. Tables that stream were checked
        row by row."""
        lists = [tasks for tasks in domains.values() if not isinstance(tasks, TaskTable)]
        counts = Counter(task.id for tasks in lists for task in tasks)
        twice = [task_id for task_id, n in counts.items() if n > 1]
        if twice:
            raise DataError(f"{len(twice)} task ids are not unique over all domains, e.g. {twice[0]!r}")
        if any(epoch_of(task_id) for task_id in counts):
            raise DataError(EPOCH_IN_ID)

    def _check_known(self, task_id: str) -> None:
        if all(table.index_of(base_id(task_id)) is None for table in self._domains.values()):
            raise ValueError(f"task {task_id!r} is not one of this source")

    def task(self, task_id: str) -> Task:
        """Return the task of this id; raises `ValueError` for one that isn't of this source."""
        for table in self._domains.values():
            index = table.index_of(base_id(task_id))
            if index is not None:
                return replace(table[index], id=task_id)
        raise ValueError(f"task {task_id!r} is not one of this source")

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

    def _draw(self, domain: str) -> Task | None:
        """Return the domain's next task; None when the curriculum passes over all that are left of the last epoch."""
        tasks = self._domains[domain]
        passed = 0
        while not self._finished(domain):
            epoch, position = divmod(self._drawn[domain], len(tasks))
            self._drawn[domain] += 1
            task = tasks[int(self._order(domain, epoch)[position])]
            # Rows that are passed over for a whole epoch come after all: a draw always ends.
            if self._success is not None and passed < len(tasks) and self._success.passes_over(task.id, epoch):
                passed += 1
                self._passed_over += 1
                continue
            self._quota_drawn[domain] += 1
            return replace(task, id=with_epoch(task.id, epoch))
        return None

    def _order(self, domain: str, epoch: int) -> NDArray[np.int64]:
        cached = self._orders.get(domain)
        if cached is None or cached[0] != epoch:
            count = len(self._domains[domain])
            if self._curriculum.by == "column":
                difficulty = self._difficulty[domain]
                order = by_difficulty(difficulty, self._curriculum.window, self._seed, domain, epoch)
            else:
                order = shuffled(count, self._seed, domain, epoch) if self._shuffle else np.arange(count)
            self._orders[domain] = cached = (epoch, order)
        return cached[1]


def _shares(domains: Mapping[str, TaskTable], probs: Mapping[str, float]) -> dict[str, Fraction]:
    """Return the exact share of each domain, in the order of `domains`; raises `DataError` for one without tasks."""
    # 0.1 is meant as 1/10, not as the nearest binary fraction.
    exact = {name: Fraction(str(probs[name])) for name in domains}
    empty = [name for name in exact if not domains[name]]
    if empty:
        others = ", ".join(f"{name}: {1 / (len(exact) - len(empty)):.3g}" for name in exact if name not in empty)
        fix = f"; if it is for validation alone, leave it out: domain_interleave_probs: {{{others}}}" if others else ""
        raise DataError(f"domain {empty[0]!r} of rewards has no training rows{fix}")
    total = sum(exact.values())
    return {name: prob / total for name, prob in exact.items()}
