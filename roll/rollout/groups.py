"""Groups on their way: starting the episodes of a task, and judging the group when the last one has ended."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roll.rollout.engines import Engines
from roll.rollout.episode import EpisodeKey, EpisodePlayer
from roll.strategies.base import SamplingParams
from roll.types.episode import Group, Task, Trajectory
from roll.types.metrics import Metrics


class FilterBudgetExhausted(RuntimeError):
    """Too many groups were dropped; the message shows why and what they scored."""


class TaskSource(Protocol):
    """Where tasks come from."""

    def take(self, n: int) -> list[Task]:
        """Up to `n` next tasks; fewer means that the last epoch has ended."""

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Hand back tasks that were not played to their end; they come first next time."""


class ResumableTaskSource(TaskSource, Protocol):
    """A source whose cursor goes into checkpoints."""

    def state_dict(self, unfinished: Sequence[Task] = ()) -> dict[str, Any]:
        """The cursor, as plain JSON values, as if the `unfinished` tasks had been put back."""


GroupFilter = Callable[[Group], str | None]
"""None keeps a group; a text names the reason to drop it."""


@dataclass(eq=False)
class OpenGroup:
    """A task whose episodes are being played."""

    position: int
    """In the order of the plan; unique among the groups of one scheduler."""
    task: Task
    members: list[Trajectory | None]
    names: list[str]
    """Of its episodes."""
    version: int = 0
    """Weight version when it was started: none of its tokens is older."""
    missing: int = field(init=False)
    """Episodes that haven't ended."""

    def __post_init__(self) -> None:
        self.missing = len(self.members)

    def group(self) -> Group:
        """What has been played."""
        return Group(task=self.task, trajectories=tuple(m for m in self.members if m is not None))


class GroupStarter:
    """Starts all episodes of a task and says when the last has ended. Lives on the engines' event loop."""

    def __init__(
        self,
        engines: Engines,
        player: EpisodePlayer,
        *,
        seed: int,
        purpose: str,
        group_size: int,
        params: SamplingParams,
        completed: Callable[[OpenGroup], None],
    ) -> None:
        self._engines = engines
        self._player = player
        self._seed = seed
        self._purpose = purpose
        self._group_size = group_size
        self._params = params
        self._completed = completed
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._ending = False

    def start(self, task: Task, *, position: int, step: int, version: int = 0) -> OpenGroup:
        """Start a group; `completed` is called with it when all of its episodes have ended."""
        keys = [
            EpisodeKey(seed=self._seed, purpose=self._purpose, step=step, position=position, member=member)
            for member in range(self._group_size)
        ]
        group = OpenGroup(
            position=position,
            task=task,
            members=[None] * self._group_size,
            names=[key.name(task) for key in keys],
            version=version,
        )
        for key in keys:
            self._start_episode(group, key)
        return group

    def _start_episode(self, group: OpenGroup, key: EpisodeKey) -> None:
        name = group.names[key.member]
        # Live from this moment, not from when its coroutine runs: lockstep engines must wait for it.
        self._engines.busy(name, "starting")

        async def play() -> None:
            try:
                group.members[key.member] = await self._player.play(group.task, key, self._params)
                group.missing -= 1
                if group.missing == 0:
                    self._completed(group)
            except asyncio.CancelledError:
                if not self._ending:
                    self._fail(RuntimeError(f"{name} was cancelled from within: by its rollout, or by a reward"))
                raise
            except Exception as error:
                self._fail(error)
                raise
            finally:
                self._engines.ended(name)  # wakes whoever looks for failures

        task = asyncio.get_running_loop().create_task(play())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, or asyncio would complain

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def raise_failed(self) -> None:
        """A bug in the player must not look like a group that never completes."""
        if self._failure is not None:
            raise self._failure

    async def end(self) -> None:
        """Cancel what is still played, and wait for it."""
        self._ending = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Judge:
    """Decides about finished groups: enough survivors? does the filter pass? Counts what it drops.

    Args:
        min_survivors: groups with fewer trainable members are dropped; 0 keeps every group and asks no filter.
        keep: dynamic filter, asked for groups with enough survivors.
        on_drop: told of every dropped group and the reason.
    """

    def __init__(self, *, min_survivors: int, keep: GroupFilter, on_drop: Callable[[Group, str], None]) -> None:
        self._min_survivors = min_survivors
        self._keep = keep
        self._on_drop = on_drop
        self._dropped_means: list[float] = []
        self._reasons: dict[str, int] = {}
        self._first_failure = ""

    @property
    def dropped(self) -> int:
        """Groups dropped so far."""
        return sum(self._reasons.values())

    def accepts(self, group: Group, metrics: Metrics) -> bool:
        """Whether the group is trained on; if not, it is counted in `metrics` and reported."""
        for trajectory in group.trajectories:
            if not trajectory.trainable:
                metrics.add_sum(f"rollout/failed_{trajectory.status}", 1)
                self._first_failure = self._first_failure or f"{trajectory.id}: {trajectory.error}"
        if len(group.survivors) < self._min_survivors:
            reason = f"fewer than {self._min_survivors} usable responses"
            metrics.add_sum("rollout/failed_groups", 1)
        else:
            kept_out = self._keep(group) if self._min_survivors else None
            if kept_out is None:
                return True
            reason = kept_out
            metrics.add_sum("rollout/filtered_groups", 1)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if group.survivors:
            self._dropped_means.append(statistics.fmean(t.reward for t in group.survivors))
        self._on_drop(group, reason)
        return False

    def exhausted(self, *, step: int, started: int, kept: int, needed: int) -> FilterBudgetExhausted:
        """The error that ends a step whose budget is spent."""
        reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(self._reasons.items()))
        failure = f" The first response that failed, {self._first_failure}" if self._first_failure else ""
        return FilterBudgetExhausted(
            f"step {step}: started {started} prompts (the budget, max_num_gen_batches x "
            f"rollout_batch_size) and kept {kept} of the {needed} groups needed. Dropped: "
            f"{reasons}. Mean scores of dropped groups: {histogram(self._dropped_means)}. Use tasks of another "
            f"difficulty, loosen query_filter_config, or raise max_num_gen_batches.{failure}"
        )


def histogram(values: Sequence[float], bins: int = 5) -> str:
    """Counts of `values` in equal bins as text, e.g. `[0, 0.5): 7, [0.5, 1]: 1`."""
    if not values:
        return "none"
    low, high = min(values), max(values)
    if low == high:
        return f"all {len(values)} at {low:g}"
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    closing = [")"] * (bins - 1) + ["]"]
    return ", ".join(f"[{edges[i]:.3g}, {edges[i + 1]:.3g}{closing[i]}: {n}" for i, n in enumerate(counts) if n)
