"""Tasks of environments: an endless numbered sequence of (tag, seed), the same whoever asks and in whatever order.

Task `n` of a split is a function of (seed of the run, split, n) and the partition alone, so nothing of the sequence is
ever stored but how far it has been taken. Training tasks have even seeds and validation tasks odd ones: an environment
never meets a validation seed in training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll.configs.errors import did_you_mean
from roll.types.trajectory import Task
from roll.utils.readers import DataError
from roll.utils.seeding import keyed_shuffle, stable_hash

Split = Literal["train", "val"]

_STATE_VERSION = 1
_KIND = "environments"


class EnvTasks:
    """The task source of environments: endless, and it resumes.

    Out of any `sum(partition)` tasks in a row, `partition[i]` are of `tags[i]`; tags alternate as evenly as that
    allows.

    Args:
        tags: names of the environments (`custom_envs`).
        partition: groups of each tag (`num_groups_partition`).
        env_types: by tag, the environment's id; becomes `Task.source`.
        split: `train` and `val` never share a seed.
        options: what every `reset` gets.
        rows: by tag, what its tasks are, for kinds of environments with a list of them. Training goes through a list
            again and again, each time in another order of the seed's; validation in the order of the list.
    """

    def __init__(
        self,
        tags: Sequence[str],
        partition: Sequence[int],
        env_types: Mapping[str, str],
        *,
        seed: int,
        split: Split,
        options: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        self._env_types = {tag: env_types[tag] for tag in tags}
        self._slots = _spread(tags, partition)
        self._seed = seed
        self._split: Split = split
        self._options = dict(options or {})
        self._rows = {tag: of for tag, of in (rows or {}).items() if of}
        self._orders: dict[str, tuple[int, list[int]]] = {}  # By tag, the last pass over its rows that was asked for
        self._next = 0
        self._returned: deque[Task] = deque()

    def take(self, n: int) -> list[Task]:
        """Return the next `n` tasks: those put back first."""
        if n < 0:
            raise ValueError(f"can't take {n} tasks")
        tasks = [self._returned.popleft() for _ in range(min(n, len(self._returned)))]
        first, self._next = self._next, self._next + n - len(tasks)
        return tasks + [self._numbered(number, self._split) for number in range(first, self._next)]

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Take back tasks that were not used: the next `take` gives them again, in this order."""
        waiting = {task.id for task in self._returned}
        for task in tasks:
            if self._parse(task.id)[1] >= self._next:
                raise ValueError(f"task {task.id!r} is put back, but was never taken")
            if task.id in waiting:
                raise ValueError(f"task {task.id!r} was put back twice")
            waiting.add(task.id)
        self._returned.extendleft(reversed(tasks))

    @property
    def remaining(self) -> None:
        return None

    def task(self, task_id: str) -> Task:
        """Return the task of this id; raises `ValueError` for one that isn't of this source."""
        tag, number = self._parse(task_id)
        return self._task(tag, number, self._split)

    def validation_tasks(self, n: int) -> list[Task]:
        """Return the first `n` tasks of the split `val`: the same in every validation of every run with this seed."""
        return [self._numbered(number, "val") for number in range(n)]

    def state_dict(self, unfinished: Sequence[Task] = ()) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "version": _STATE_VERSION,
            "identity": self._identity,
            "next": self._next,
            "returned": [task.id for task in (*unfinished, *self._returned)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Tags and their partition may differ from those of the run that saved: the numbers go on, so no seed comes twice.
        Raises `DataError` if the seed or the split differs, or a task is left of a tag that is gone.
        """
        if (state.get("kind"), state.get("version")) != (_KIND, _STATE_VERSION):
            raise DataError(
                f"the checkpoint's cursor is of {state.get('kind', 'datasets')!r}, version {state.get('version')!r}; "
                f"this run reads {_KIND!r}, version {_STATE_VERSION}. Resume with the pipeline that saved it"
            )
        mine, saved = self._identity, state["identity"]
        for key in mine:
            if mine[key] != saved.get(key):
                raise DataError(
                    f"the cursor was saved with {key} = {saved.get(key)!r}, this run has {mine[key]!r}: resuming would "
                    "play other tasks. Restore the setting, or start without the checkpoint"
                )
        self._returned = deque(self.task(task_id) for task_id in state["returned"])
        self._next = int(state["next"])

    @property
    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "split": self._split}

    def _parse(self, task_id: str) -> tuple[str, int]:
        tag, _, rest = task_id.rpartition(f"-{self._split}-")
        if not rest.isdecimal() or str(int(rest)) != rest:
            raise DataError(f"task {task_id!r} is not one of this source: expected <tag>-{self._split}-<number>")
        if tag not in self._env_types:
            raise DataError(
                f"task {task_id!r} is of a tag that this run doesn't have ({did_you_mean(tag, self._env_types)}); "
                "add the tag, or start without the checkpoint"
            )
        return tag, int(rest)

    def _numbered(self, number: int, split: Split) -> Task:
        return self._task(self._slots[number % len(self._slots)], number, split)

    def _task(self, tag: str, number: int, split: Split) -> Task:
        # 62 bits of the hash and one for the split: a seed fits a signed 64-bit integer.
        drawn = stable_hash(self._seed, "env", split, tag, number) >> 2
        return Task(
            id=f"{tag}-{split}-{number}",
            source=self._env_types[tag],
            payload={**self._options, **self._row(tag, number, split)},
            seed=2 * drawn + (split == "val"),
            tag=tag,
            domain=tag,
        )

    def _row(self, tag: str, number: int, split: Split) -> Mapping[str, Any]:
        """Return what a task is, for a tag with a list."""
        rows = self._rows.get(tag)
        if not rows:
            return {}
        positions = [position for position, other in enumerate(self._slots) if other == tag]
        cycle, position = divmod(number, len(self._slots))
        before = cycle * len(positions) + sum(other < position for other in positions)  # Tasks of this tag
        if split == "val":
            return rows[before % len(rows)]
        epoch, i = divmod(before, len(rows))
        known = self._orders.get(tag)
        if known is None or known[0] != epoch:
            known = (epoch, keyed_shuffle(range(len(rows)), self._seed, "env rows", tag, epoch))
            self._orders[tag] = known
        return rows[known[1][i]]


def _spread(tags: Sequence[str], partition: Sequence[int]) -> tuple[str, ...]:
    """Return the tag of every slot, each tag's groups at equal distances: any part of them has its share of all."""
    positions = [
        ((2 * k + 1) / (2 * groups), i, tag)
        for i, (tag, groups) in enumerate(zip(tags, partition, strict=True))
        for k in range(groups)
    ]
    return tuple(tag for _, _, tag in sorted(positions))
