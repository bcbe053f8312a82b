"""The rollout scheduler: turns tasks into groups of finished trajectories.

    TaskSource --take--> open groups --member episodes--> EpisodePlayer <--> engines, environments, rewards
        ^                     |
        |                     | all members done
        | put back            v
        +--- aborted      settle: enough survivors? filter passes? --accepted--> groups of this step
                              |
                              +--dropped: counted, shown to `on_drop`, replaced by a new task within a budget

Who waits for whom: `collect` waits until every episode waits for tokens or has ended (`engines.quiet`), settles what is
complete in the order of the plan, then lets the engines work for one round. So which groups make a step, and which are
aborted, never depends on timing.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roll.rollout.engines import LockstepEngines
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


GroupFilter = Callable[[Group], str | None]
"""None keeps a group; a text names the reason to drop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectPlan:
    """What one call of `collect` is asked for."""

    step: int
    purpose: str
    groups: int
    group_size: int
    params: SamplingParams
    extra_prompts: int = 0
    """Prompts in flight beyond those needed; when enough groups are complete the rest is aborted."""
    max_prompts: int
    """Budget: prompts that may be started before the step fails."""
    min_survivors: int = 1
    """Groups with fewer trainable members are dropped. 0 keeps every group, and asks no filter."""


@dataclass
class Collected:
    """Accepted groups in plan order, and what happened on the way."""

    groups: list[Group] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    exhausted: bool = False
    """The task source ended before enough groups were there."""


@dataclass
class _OpenGroup:
    position: int
    task: Task
    members: list[Trajectory | None]

    @property
    def complete(self) -> bool:
        return all(member is not None for member in self.members)

    def group(self) -> Group:
        return Group(task=self.task, trajectories=tuple(m for m in self.members if m is not None))


class RolloutScheduler:
    """See the module docstring.

    Args:
        engines: the inference engines.
        player: plays one episode.
        keep: dynamic filter, asked for complete groups with enough survivors.
        on_drop: told of every dropped group and the reason.
    """

    def __init__(
        self,
        engines: LockstepEngines,
        player: EpisodePlayer,
        *,
        seed: int,
        keep: GroupFilter = lambda _group: None,
        on_drop: Callable[[Group, str], None] = lambda _group, _reason: None,
    ) -> None:
        self._engines = engines
        self._player = player
        self._seed = seed
        self._keep = keep
        self._on_drop = on_drop

    def collect(self, source: TaskSource, plan: CollectPlan) -> Collected:
        """Play tasks from `source` until `plan.groups` groups are accepted.

        Raises:
            FilterBudgetExhausted: `plan.max_prompts` were started and too few groups were kept.
            RolloutStalled: an environment or reward gave no sign within the time limit.
        """
        return self._engines.run(_Collection(self, source, plan).run())


class _Collection:
    """The state of one `collect` call."""

    def __init__(self, scheduler: RolloutScheduler, source: TaskSource, plan: CollectPlan) -> None:
        self._s = scheduler
        self._source = source
        self._plan = plan
        self._open: list[_OpenGroup] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = 0
        self._result = Collected()
        self._accepted: list[tuple[int, Group]] = []
        self._dropped_means: list[float] = []
        self._reasons: dict[str, int] = {}
        self._first_failure = ""

    async def run(self) -> Collected:
        engines = self._s._engines
        try:
            self._launch(self._plan.groups + self._plan.extra_prompts)
            while True:
                await engines.quiet()
                self._raise_failed_episodes()
                self._settle()
                if len(self._accepted) >= self._plan.groups or not self._open:
                    break
                await engines.round()
            await self._abort_rest()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._result.groups = [group for _, group in sorted(self._accepted, key=lambda item: item[0])]
        return self._result

    def _launch(self, wanted: int) -> None:
        """Start up to `wanted` new groups; the source or the budget may allow fewer."""
        allowed = min(wanted, self._plan.max_prompts - self._started)
        tasks = self._source.take(allowed) if allowed > 0 else []
        self._result.exhausted |= len(tasks) < allowed
        for task in tasks:
            group = _OpenGroup(position=self._started, task=task, members=[None] * self._plan.group_size)
            self._started += 1
            self._open.append(group)
            for member in range(self._plan.group_size):
                self._start_episode(group, member)

    def _start_episode(self, group: _OpenGroup, member: int) -> None:
        key = EpisodeKey(
            seed=self._s._seed,
            purpose=self._plan.purpose,
            step=self._plan.step,
            position=group.position,
            member=member,
        )
        engines, name = self._s._engines, key.name(group.task)
        # Live from this moment, not from when its coroutine runs: `quiet` must wait for it.
        engines.busy(name, "starting")

        async def play() -> None:
            try:
                group.members[member] = await self._s._player.play(group.task, key, self._plan.params)
            finally:
                engines.ended(name)

        self._tasks.add(asyncio.get_running_loop().create_task(play()))

    def _raise_failed_episodes(self) -> None:
        """A bug in the player must not look like a group that never completes."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    def _settle(self) -> None:
        """Decide about complete groups in plan order; replace dropped ones."""
        for group in [group for group in self._open if group.complete]:
            if len(self._accepted) >= self._plan.groups:
                return
            self._open.remove(group)
            self._judge(group)
        missing = self._plan.groups - len(self._accepted) - len(self._open)
        if missing > 0:
            self._launch(missing)
        if not self._open and len(self._accepted) < self._plan.groups and not self._result.exhausted:
            raise FilterBudgetExhausted(self._budget_message())

    def _judge(self, open_group: _OpenGroup) -> None:
        group, metrics = open_group.group(), self._result.metrics
        for trajectory in group.trajectories:
            if not trajectory.trainable:
                metrics.add_sum(f"rollout/failed_{trajectory.status}", 1)
                self._first_failure = self._first_failure or f"{trajectory.id}: {trajectory.error}"
        if len(group.survivors) < self._plan.min_survivors:
            reason = f"fewer than {self._plan.min_survivors} usable responses"
            metrics.add_sum("rollout/failed_groups", 1)
        else:
            kept_out = self._s._keep(group) if self._plan.min_survivors else None
            if kept_out is None:
                self._accepted.append((open_group.position, group))
                return
            reason = kept_out
            metrics.add_sum("rollout/filtered_groups", 1)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if group.survivors:
            self._dropped_means.append(statistics.fmean(t.reward for t in group.survivors))
        self._s._on_drop(group, reason)

    async def _abort_rest(self) -> None:
        """Stop what is still running; its tasks go back to the source, to be played in a later step."""
        if not self._open:
            return
        aborted = await self._s._engines.abort_all()
        await self._s._engines.quiet()
        self._source.put_back([group.task for group in self._open])
        self._result.metrics.add_sum("rollout/aborted_requests", aborted)
        self._result.metrics.add_sum("rollout/returned_prompts", len(self._open))

    def _budget_message(self) -> str:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(self._reasons.items()))
        failure = f" The first response that failed, {self._first_failure}" if self._first_failure else ""
        return (
            f"step {self._plan.step}: started {self._started} prompts (the budget, max_num_gen_batches x "
            f"rollout_batch_size) and kept {len(self._accepted)} of the {self._plan.groups} groups needed. Dropped: "
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
