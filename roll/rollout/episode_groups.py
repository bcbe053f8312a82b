"""Groups on their way: starting the episodes of a task, and judging the group when enough of them have ended.

A group may start more episodes than it needs (`redundancy`). It is complete as soon as `group_size` have ended well;
the rest is stopped. So neither one slow episode nor one failed environment holds up or spoils a group.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_key import EpisodeKey
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.progress import RolloutProgress
from roll.strategies.base import SamplingParams
from roll.types.metrics import Metrics
from roll.types.trajectory import Group, Task, Trajectory

_LEFT_OUT_RESPONSES = {"filtered": "rollout/filtered_responses", "unscored": "rollout/unscored_responses"}


class FilterBudgetExhausted(RuntimeError):
    """Too many groups were dropped; the message shows why and what they scored."""


class AllEpisodesFailed(FilterBudgetExhausted):
    """Not one episode ended well; the message shows how the first one failed."""


_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')

_MIN_FAILED_GROUPS = 8
"""Groups that may fail as a whole, without any that doesn't, before the run ends; or as many as a step needs."""


class TaskStream(Protocol):
    """Where tasks come from."""

    def take(self, n: int) -> list[Task]:
        """Return up to `n` next tasks; fewer means that the last epoch has ended."""

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Hand back tasks that were not played to their end; they come first next time."""


class ResumableTaskSource(TaskStream, Protocol):
    """A source whose cursor goes into checkpoints."""

    def state_dict(self, unfinished: Sequence[Task] = ()) -> dict[str, Any]:
        """Return the cursor, as plain JSON values, as if the `unfinished` tasks had been put back."""


REPLACED = "failed, and redundant members took their place"
"""Not the reason to drop a group: of members that it is trained on without."""

FilterFn = Callable[[Group], str | None]  # None keeps a group; a text names the reason to drop it


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What every scheduler is asked for."""

    groups: int
    """Of a training step."""
    group_size: int
    params: SamplingParams
    max_prompts: int
    """Budget: prompts that may be started before a step fails; in asynchronous mode, between two batches."""
    min_survivors: int = 1
    """Groups with fewer trainable members are dropped. 0 keeps every group, and asks no filter."""
    redundancy: int = 0
    """Episodes per group beyond `group_size`; when `group_size` have ended well the rest is stopped."""
    max_open_groups: int | None = None
    """Groups played at once; the next starts when one is complete. None: as many as are needed."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What has come of an open group, at the moment of decision."""

    group: Group
    replaced: tuple[Trajectory, ...] = ()  # Failed members that others took the place of
    surplus: int = 0  # Episodes that the group didn't need
    running: frozenset[str] = frozenset()  # Those of them that haven't ended, by name


@dataclass(eq=False)
class OpenGroup:
    """A task whose episodes are being played."""

    position: int
    """In the order of the plan; unique among the groups of one scheduler."""
    task: Task
    size: int
    """Members that it needs."""
    names: list[str]
    """Of its episodes, by member: `size`, and the redundant ones."""
    version: int = 0
    """Weight version when it was started: none of its tokens is older."""
    ended: dict[int, tuple[int, Trajectory]] = field(default_factory=dict)
    """By member: the round in which the episode ended, and what was played."""
    trainable: int = 0
    """Of those that have ended."""

    def add(self, trajectory: Trajectory, round_number: int) -> bool:
        """Note that an episode has ended; true if that makes the group complete."""
        was_complete = self.complete
        self.ended[trajectory.member] = (round_number, trajectory)
        self.trainable += trajectory.trainable
        return self.complete and not was_complete

    @property
    def complete(self) -> bool:
        """Return whether enough episodes have ended well, or all have ended."""
        return self.trainable >= self.size or len(self.ended) == len(self.names)

    def outcome(self) -> GroupOutcome:
        """Return the first `size` members that ended well, by (round, member); if they are fewer, all members.

        Who was faster within a round says nothing about the plan, and must not decide.
        """
        assert self.complete, f"the group of {self.task.id} is decided about before it is complete"
        well = sorted((number, member) for member, (number, t) in self.ended.items() if t.trainable)
        if len(well) < self.size or len(self.names) == self.size:
            return GroupOutcome(Group(task=self.task, trajectories=tuple(self.ended[m][1] for m in sorted(self.ended))))
        chosen = sorted(member for _, member in well[: self.size])
        replaced = tuple(t for _, (_, t) in sorted(self.ended.items()) if not t.trainable)
        return GroupOutcome(
            Group(task=self.task, trajectories=tuple(self.ended[member][1] for member in chosen)),
            replaced=replaced,
            surplus=len(self.names) - self.size - len(replaced),
            running=frozenset(name for member, name in enumerate(self.names) if member not in self.ended),
        )


class GroupStarter:
    """Starts all episodes of a task and says when its group is complete. Lives on the engines' event loop.

    Args:
        completed: called once with every group that is complete.
        progress: is told of every episode that begins and ends.
    """

    def __init__(
        self,
        engines: EngineDriver,
        player: EpisodePlayer,
        plan: RolloutPlan,
        *,
        seed: int,
        purpose: str,
        completed: Callable[[OpenGroup], None],
        progress: RolloutProgress,
    ) -> None:
        self._engines = engines
        self._player = player
        self._plan = plan
        self._seed = seed
        self._purpose = purpose
        self._completed = completed
        self._progress = progress
        self.round_number = 0  # Of the engines' rounds, as far as whoever drives them counts them
        self._tasks: dict[str, asyncio.Task[None]] = {}  # By name of the episode
        self._stopped: set[str] = set()  # Episodes that were stopped and haven't ended
        self._stops: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def start(self, task: Task, *, position: int, step: int, version: int = 0) -> OpenGroup:
        """Start a group; `completed` is called with it when enough of its episodes have ended."""
        size = self._plan.group_size
        keys = [
            EpisodeKey(seed=self._seed, purpose=self._purpose, step=step, position=position, member=member)
            for member in range(size + self._plan.redundancy)
        ]
        names = [key.name(task) for key in keys]
        group = OpenGroup(position=position, task=task, size=size, names=names, version=version)
        for key in keys:
            self._start_episode(group, key)
        return group

    def _start_episode(self, group: OpenGroup, key: EpisodeKey) -> None:
        name = group.names[key.member]
        # Live from this moment, not from when its coroutine runs: lockstep engines must wait for it.
        self._engines.mark_busy(name, "starting")

        async def play() -> None:
            try:
                trajectory = await self._player.play(group.task, key, self._plan.params)
                self._progress.ended(trajectory)
                if group.add(trajectory, self.round_number):
                    self._completed(group)
            except asyncio.CancelledError:
                if name not in self._stopped:
                    self._fail(RuntimeError(f"{name} was cancelled from within: by its rollout, or by a reward"))
                raise
            except Exception as error:
                self._fail(error)
                raise
            finally:
                self._engines.mark_ended(name)  # wakes whoever looks for failures

        self._progress.episodes_running += 1
        self._tasks[name] = asyncio.get_running_loop().create_task(play())
        self._tasks[name].add_done_callback(lambda task: self._done(name, task))

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        self._progress.episodes_running -= 1
        self._stopped.discard(name)
        if not task.cancelled():
            task.exception()  # looked at, or asyncio would complain

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def raise_failed(self) -> None:
        """Raise what failed in a player: a bug must not look like a group that never completes."""
        if self._failure is not None:
            raise self._failure

    async def stop(self, names: Collection[str]) -> None:
        """End these episodes, whatever they wait for."""
        try:
            await self._engines.abort(names)  # one call per engine, not one per request
        finally:
            for name in names:
                self._cancel(name)

    def stop_soon(self, names: Collection[str]) -> None:
        """Start `stop` without waiting for it; `raise_failed` raises its failure."""

        async def stop() -> None:
            try:
                await self.stop(names)
            except Exception as error:  # noqa: BLE001 - raised by `raise_failed`
                self._fail(error)

        if names:
            task = asyncio.get_running_loop().create_task(stop())
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)

    def _cancel(self, name: str) -> None:
        """Cancel an episode once: a second time would cut its environment's `close` short."""
        task = self._tasks.get(name)
        if task is not None and name not in self._stopped:
            self._stopped.add(name)
            task.cancel()

    async def end(self) -> None:
        """Cancel what is still played, and wait for it."""
        stops, tasks = list(self._stops), list(self._tasks.values())
        for stop in stops:
            stop.cancel()
        for name in list(self._tasks):
            self._cancel(name)
        await asyncio.gather(*stops, *tasks, return_exceptions=True)


class GroupFilter:
    """Decides about finished groups: enough survivors? does the filter pass? Counts what it drops.

    Args:
        min_survivors: groups with fewer trainable members are dropped; 0 keeps every group and asks no filter.
        keep: dynamic filter, asked for groups with enough survivors.
        on_drop: told of every dropped group and the reason; and of failed members that others took the place of, as a
            group with the reason `REPLACED`.
    """

    def __init__(self, *, min_survivors: int, keep: FilterFn, on_drop: Callable[[Group, str], None]) -> None:
        self._min_survivors = min_survivors
        self._keep = keep
        self._on_drop = on_drop
        self._dropped_means: list[float] = []
        self._reasons: dict[str, int] = {}
        self._first_failure = ""
        self._failed = 0
        self._any_well = False

    @property
    def dropped(self) -> int:
        """Return groups dropped so far."""
        return sum(self._reasons.values())

    def accept(self, outcome: GroupOutcome, metrics: Metrics) -> bool:
        """Return whether the group is trained on; if not, it is counted in `metrics` and reported."""
        group = outcome.group
        self._any_well = self._any_well or bool(group.survivors)
        for trajectory in (*group.trajectories, *outcome.replaced):
            if trajectory.status in _LEFT_OUT_RESPONSES:
                metrics.add_sum(_LEFT_OUT_RESPONSES[trajectory.status], 1)
                self._any_well = True
            elif not trajectory.trainable:
                metrics.add_sum(f"rollout/failed_{trajectory.status}", 1)
                metrics.add_sum("rollout/failed_episodes", 1)
                self._failed += 1
                self._first_failure = self._first_failure or _without_traceback(f"{trajectory.id}: {trajectory.error}")
        if outcome.replaced:
            self._on_drop(Group(task=group.task, trajectories=outcome.replaced), REPLACED)
        if outcome.surplus:
            metrics.add_sum("rollout/surplus_episodes", outcome.surplus)
        if len(group.survivors) < self._min_survivors:
            statuses = {trajectory.status for trajectory in group.trajectories}
            reason, dropped = f"fewer than {self._min_survivors} usable responses", "rollout/failed_groups"
            if "filtered" in statuses:
                reason, dropped = f"filtered: {reason} are left by response_filter_config", "rollout/filtered_groups"
            elif "unscored" in statuses:
                why = next(t.error for t in group.trajectories if t.status == "unscored")
                reason, dropped = f"unscored: {reason}; {why}", "rollout/unscored_groups"
            metrics.add_sum(dropped, 1)
        else:
            rejection = self._keep(group) if self._min_survivors else None
            if rejection is None:
                return True
            reason = rejection
            metrics.add_sum("rollout/filtered_groups", 1)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if group.survivors:
            self._dropped_means.append(statistics.fmean(t.reward for t in group.survivors))
        self._on_drop(group, reason)
        return False

    def check_failure_rate(self, *, step: int, needed: int) -> None:
        """Raise `AllEpisodesFailed` once so many whole groups have failed, and no episode has ended well."""
        if self._failed and not self._any_well and self.dropped >= max(needed, _MIN_FAILED_GROUPS):
            raise self._all_failed(step)

    def _all_failed(self, step: int) -> AllEpisodesFailed:
        return AllEpisodesFailed(
            f"step {step}: each of the {self._failed} episodes that were played failed, the first, "
            f"{self._first_failure}. Mend the environment, agent, reward or length that it names; `roll envs test` "
            "plays an environment by itself, and dropped.jsonl lists what was dropped"
        )

    def exhausted(self, *, step: int, started: int, accepted: int, needed: int) -> FilterBudgetExhausted:
        """Return the error that ends a step whose budget is spent."""
        if self._failed and not self._any_well:
            return self._all_failed(step)
        reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(self._reasons.items()))
        failure = f" The first response that failed, {self._first_failure}" if self._first_failure else ""
        return FilterBudgetExhausted(
            f"step {step}: started {started} prompts (all that max_num_gen_batches, or max_traj_per_env, permits) and "
            f"kept {accepted} of the {needed} groups needed. Dropped: {reasons}. Mean scores of dropped groups: "
            f"{histogram(self._dropped_means)}. Use tasks of another difficulty, loosen query_filter_config or "
            "response_filter_config (of rewards) or group_filter (of environments), or raise what bounds them."
            f"{failure}"
        )


def histogram(values: Sequence[float], bins: int = 5) -> str:
    """Return counts of `values` in equal bins as text, e.g. `[0, 0.5): 7, [0.5, 1]: 1`."""
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


def _without_traceback(failure: str) -> str:
    """Return the line that says what was raised, with its last file and line; dropped.jsonl has the rest."""
    message, traceback, frames = failure.partition("\nTraceback (most recent call last)")
    locations = _FRAME.findall(frames)
    return message + (f" ({locations[-1][0]}, line {locations[-1][1]})" if traceback and locations else "")
