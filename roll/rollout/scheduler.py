"""The rollout scheduler: turns tasks into groups of finished trajectories.

    TaskStream --take--> open groups --member episodes--> EpisodePlayer <--> engines, environments, rewards
        ^                     |
        |                     | enough members done (the redundant rest is stopped)
        | put back            v
        +--- aborted      settle: enough survivors? filter passes? --accepted--> groups of this step
                              |
                              +--dropped: counted, shown to `on_drop`, replaced by a new task within a budget

Who waits for whom: `collect` waits for the moment of decision (`engines.wait_idle`: for lockstep engines, when every
episode waits for tokens or has ended), settles what is complete in the order of the plan, then waits for progress
(`engines.advance`). On lockstep engines, which groups make a step, which members make a group and what is aborted never
depends on timing.

`async_scheduler.py` is its counterpart for generation that runs on while the trainer works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_groups import FilterFn, GroupFilter, GroupStarter, OpenGroup, RolloutPlan, TaskStream
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.progress import RolloutProgress
from roll.types.metrics import Metrics
from roll.types.trajectory import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectPlan(RolloutPlan):
    """What one call of `collect` is asked for."""

    step: int
    purpose: str
    extra_prompts: int = 0
    """Over-sampling: prompts in flight beyond those needed; when enough groups are complete the rest is aborted."""


@dataclass
class Collected:
    """Accepted groups in plan order, and what happened on the way."""

    groups: list[Group] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    exhausted: bool = False  # The task source ended before enough groups were there


@dataclass(frozen=True)
class RolloutScheduler:
    """See the module docstring."""

    engines: EngineDriver
    player: EpisodePlayer
    seed: int
    keep: FilterFn = lambda _group: None
    """Dynamic filter, asked for complete groups with enough survivors."""
    on_drop: Callable[[Group, str], None] = lambda _group, _reason: None
    """See `GroupFilter`."""
    on_group: Callable[[Group], None] = lambda _group: None
    """Told of every group as soon as it is accepted."""
    progress: RolloutProgress = field(default_factory=RolloutProgress)
    """How far `collect` is, for other threads."""

    def collect(self, source: TaskStream, plan: CollectPlan) -> Collected:
        """Play tasks from `source` until `plan.groups` groups are accepted.

        Raises:
            FilterBudgetExhausted: `plan.max_prompts` were started and too few groups were kept.
            RolloutStalled: an environment or reward gave no sign within the time limit.
        """
        return self.engines.run(_Collection(self, source, plan).run())


class _Collection:
    """The state of one `collect` call."""

    def __init__(self, scheduler: RolloutScheduler, source: TaskStream, plan: CollectPlan) -> None:
        self._engines = scheduler.engines
        self._on_group = scheduler.on_group
        self._source = source
        self._plan = plan
        self._progress = scheduler.progress
        self._filter = GroupFilter(min_survivors=plan.min_survivors, keep=scheduler.keep, on_drop=scheduler.on_drop)
        self._completed: list[OpenGroup] = []  # Open groups that are complete, not yet decided about
        self._starter = GroupStarter(
            scheduler.engines,
            scheduler.player,
            plan,
            seed=scheduler.seed,
            purpose=plan.purpose,
            completed=self._completed.append,
            progress=self._progress,
        )
        self._open: dict[int, OpenGroup] = {}
        self._started = 0
        self._result = Collected()
        self._accepted: list[tuple[int, Group]] = []

    async def run(self) -> Collected:
        self._progress.begin(self._plan.step, self._plan.groups)
        try:
            self._launch()
            while True:
                await self._engines.wait_idle()
                self._starter.raise_failed()
                await self._settle()
                self._note()
                if len(self._accepted) >= self._plan.groups or not self._open:
                    break
                self._starter.round_number += 1
                await self._engines.advance()
            await self._abort_rest()
        finally:
            await self._starter.end()
            self._progress.groups_wanted = 0
        await self._engines.wait_idle()  # nothing of this step is left on the engines: they may sleep now
        self._result.groups = [group for _, group in sorted(self._accepted, key=lambda item: item[0])]
        return self._result

    def _launch(self) -> None:
        """Start the groups that are missing, as far as the source, the budget and `max_open_groups` allow."""
        plan = self._plan
        first = plan.groups + plan.extra_prompts - self._started
        missing = plan.groups - len(self._accepted) - len(self._open)
        allowed = min(max(first, missing), plan.max_prompts - self._started)
        if plan.max_open_groups is not None:
            allowed = min(allowed, plan.max_open_groups - len(self._open))
        if allowed <= 0 or self._result.exhausted:
            return
        tasks = self._source.take(allowed)
        self._result.exhausted = len(tasks) < allowed
        for task in tasks:
            self._open[self._started] = self._starter.start(task, position=self._started, step=plan.step)
            self._started += 1
        self._note()

    def _note(self) -> None:
        self._progress.note(done=len(self._accepted), open_groups=len(self._open), dropped=self._filter.dropped)

    async def _settle(self) -> None:
        """Decide about complete groups in plan order; start what is to take their place."""
        completed = [(group, group.outcome()) for group in sorted(self._completed, key=lambda group: group.position)]
        self._completed.clear()
        running = {name for _, outcome in completed for name in outcome.running}
        if running:
            await self._starter.stop(running)
            # Nothing new has been started yet: what the next round has in its batch must not depend on how long
            # episodes take to end.
            await self._engines.wait_idle()
        for group, outcome in completed:
            if len(self._accepted) >= self._plan.groups:
                return
            del self._open[group.position]
            if self._filter.accept(outcome, self._result.metrics):
                self._accepted.append((group.position, outcome.group))
                self._on_group(outcome.group)
        self._filter.check_failure_rate(step=self._plan.step, needed=self._plan.groups)
        if len(self._accepted) < self._plan.groups:
            self._launch()
        if not self._open and len(self._accepted) < self._plan.groups and not self._result.exhausted:
            raise self._filter.exhausted(
                step=self._plan.step, started=self._started, accepted=len(self._accepted), needed=self._plan.groups
            )

    async def _abort_rest(self) -> None:
        """Stop what is still running; its tasks go back to the source, to be played in a later step."""
        if not self._open:
            return
        aborted = await self._engines.abort({name for group in self._open.values() for name in group.names})
        await self._engines.wait_idle()
        self._source.put_back([group.task for group in self._open.values()])
        self._result.metrics.add_sum("rollout/aborted_requests", aborted)
        self._result.metrics.add_sum("rollout/returned_prompts", len(self._open))
