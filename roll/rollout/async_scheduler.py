"""Generation that runs ahead of training, by a bounded number of weight versions.

Groups stay in flight across training steps: while the trainer works on one batch, the engines fill the next. Training
step `s` (from 1) trains weights of version `s - 1`; a token of version `v` used in it has *staleness* `s - 1 - v`. With
`async_generation_ratio` = r no token is ever used with a staleness above `R = ceil(r)`:

* between two batches of `B` groups at most `floor(r B)` groups (at least one) are in flight or wait to be used, so at
  most `R` steps' worth; while a step waits for its batch, `B` more;
* a group started under version `v` has to be used by step `v + 1 + R`, its deadline. A step takes finished groups,
  earliest deadline first, and waits until those it takes leave no more than `k B` groups with a deadline within the
  next `k` steps, for every `k`. So nothing ever has to be thrown away for its age, and long responses aren't lost more
  often than short ones.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_groups import FilterFn, GroupFilter, GroupStarter, OpenGroup, ResumableTaskSource, RolloutPlan
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.progress import RolloutProgress
from roll.rollout.scheduler import Collected
from roll.types.metrics import Metrics
from roll.types.trajectory import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPlan(RolloutPlan):
    """What a run in asynchronous mode is asked for; `groups` is B."""

    ratio: float  # r > 0
    last_step: int  # No groups are started that no step would use

    @property
    def bound(self) -> int:
        """Return R, the largest staleness."""
        return math.ceil(self.ratio)

    @property
    def ahead(self) -> int:
        """Return groups in flight or ready while the trainer works."""
        return max(1, math.floor(self.ratio * self.groups))

    def fits(self, group: Group) -> bool:
        """Return whether a group is one that this plan could have given."""
        is_complete = len(group.trajectories) in (self.group_size, self.group_size + self.redundancy)
        return is_complete and len(group.survivors) <= self.group_size


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A finished group that waits to be trained on."""

    position: int
    group: Group
    version: int  # Of its oldest token


@dataclass
class AsyncState:
    """What a checkpoint keeps."""

    version: int = 0
    """Of the weights that the engines sample with."""
    started: int = 0
    """Groups ever started: the next one's position."""
    ready: list[ReadyGroup] = field(default_factory=list)
    cursor: dict[str, Any] = field(default_factory=dict)
    """Of the source, with the tasks of groups in flight put back: they are played again."""


class AsyncRolloutScheduler:
    """See the module docstring. All but `collect`, `set_version` and `state` happens on the engines' event loop.

    Args:
        keep: dynamic filter, asked for complete groups with enough survivors.
        on_drop: see `GroupFilter`; called from within `collect` or `stop`.
    """

    def __init__(
        self,
        engines: EngineDriver,
        player: EpisodePlayer,
        source: ResumableTaskSource,
        plan: AsyncPlan,
        *,
        seed: int,
        keep: FilterFn = lambda _group: None,
        on_drop: Callable[[Group, str], None] = lambda _group, _reason: None,
    ) -> None:
        self._engines = engines
        self._source = source
        self._plan = plan
        self._version = 0  # Of the weights that the engines sample with
        self._on_drop = on_drop
        self._drops: list[tuple[Group, str]] = []
        self._keep = keep
        self.progress = RolloutProgress()
        self._starter = GroupStarter(
            engines, player, plan, seed=seed, purpose="train", completed=self._completed, progress=self.progress
        )
        self._new_window()
        self._open: dict[int, OpenGroup] = {}
        self._open_versions: Counter[int] = Counter()  # Groups in flight by the version under which they were started
        self._ready: dict[int, dict[int, ReadyGroup]] = {}
        """Finished groups by the version of their oldest token, then by position."""
        self._started = 0
        self._wanted = 0  # Groups that a waiting step may have on top of those ahead of it
        self._left = plan.last_step * plan.groups  # Groups that the steps to come will use
        self._exhausted = False
        self._begun = False  # Whether a step has asked for groups; until then nothing is played
        self._stopped = False

    def _new_window(self) -> None:
        """Start counting budget, metrics and reasons again: they are those between two batches."""
        self._group_filter = GroupFilter(
            min_survivors=self._plan.min_survivors,
            keep=self._keep,
            on_drop=lambda group, reason: self._drops.append((group, reason)),
        )
        self._metrics = Metrics()
        self._window_started = 0

    # --- from the controller's thread -----------------------------------------------------------------------------

    def collect(self, step: int) -> Collected:
        """Return the groups of one training step, as soon as enough are there; generation goes on afterwards.

        Raises:
            FilterBudgetExhausted: too many groups in a row were dropped.
            RolloutStalled: nothing moved within the time limit.
        """
        return self._engines.run(self._collect(step))

    def set_version(self, version: int) -> None:
        """Note that the engines sample with these weights from now on."""
        self._engines.run(self._set_version(version))

    def state(self) -> AsyncState:
        """Return what a checkpoint keeps; between two calls of `collect`."""
        return self._engines.run(self._state())

    def restore(self, state: AsyncState) -> None:
        """Continue from `state`, before anything was collected; the source has got its cursor already.

        What a run with other settings had ready may be too old for this one, too much, or of another size; it is played
        again.
        """
        assert not self._open and not self._ready, "restore comes before the first group"
        self._version = state.version
        self._left = (self._plan.last_step - state.version) * self._plan.groups
        self._started = state.started
        unusable: list[ReadyGroup] = []
        for ready in sorted(state.ready, key=lambda ready: (ready.version, ready.position)):
            usable = (ready.version + 1 + self._plan.bound - self._version) * self._plan.groups
            if self._plan.fits(ready.group) and self._num_ready < usable:
                self._add_ready(ready)
            else:
                unusable.append(ready)
        if unusable:
            logger.info("%d of %d finished groups don't fit and are played again", len(unusable), len(state.ready))
            self._source.put_back([ready.group.task for ready in unusable])

    def stop(self) -> None:
        """Abort everything in flight; its tasks go back to the source."""
        self._engines.run(self._stop())

    # --- on the event loop ----------------------------------------------------------------------------------------

    async def _collect(self, step: int) -> Collected:
        assert step == self._version + 1, f"step {step} trains weights {step - 1}, the engines have {self._version}"
        self._begun = True
        self._wanted = self._plan.groups
        self.progress.begin(step, self._wanted)
        self._fill()
        while (chosen := self._choose(step)) is None:
            self._starter.raise_failed()
            self._check_budget(step)
            if not self._open:
                break  # the source has ended, and what is ready isn't enough
            await self._engines.advance()
        self._wanted = self.progress.groups_wanted = 0
        return self._hand_over(chosen)

    async def _set_version(self, version: int) -> None:
        self._version = version
        if self._begun:
            self._fill()

    async def _stop(self) -> None:
        self._stopped = True  # aborted episodes end, but their groups aren't judged and nothing takes their place
        if self._open:
            await self._engines.abort({name for group in self._open.values() for name in group.names})
        await self._starter.end()
        self._report_drops()
        self._source.put_back([group.task for group in self._open.values()])
        self._open, self._open_versions = {}, Counter()

    def _all_ready(self) -> list[ReadyGroup]:
        return [ready for by_position in self._ready.values() for ready in by_position.values()]

    async def _state(self) -> AsyncState:
        return AsyncState(
            version=self._version,
            started=self._started,
            ready=self._all_ready(),
            cursor=self._source.state_dict([group.task for group in self._open.values()]),
        )

    def _fill(self) -> None:
        """Start groups as far as the bound, the source and the budget allow."""
        limit = min(self._plan.ahead + self._wanted, self._left)
        room = limit - len(self._open) - self._num_ready
        allowed = min(room, self._plan.max_prompts - self._window_started)
        if self._plan.max_open_groups is not None:
            allowed = min(allowed, self._plan.max_open_groups - len(self._open))
        if allowed <= 0 or self._exhausted or self._stopped:
            return
        tasks = self._source.take(allowed)
        self._exhausted = len(tasks) < allowed
        for task in tasks:
            self._open[self._started] = self._starter.start(
                task, position=self._started, step=self._version + 1, version=self._version
            )
            self._open_versions[self._version] += 1
            self._started += 1
            self._window_started += 1
        self._note()

    def _note(self) -> None:
        dropped = self._group_filter.dropped
        self.progress.note(done=self._num_ready, open_groups=len(self._open), dropped=dropped)

    def _completed(self, group: OpenGroup) -> None:
        """Decide about a group of which enough episodes have ended."""
        if self._stopped:
            return
        del self._open[group.position]
        self._open_versions[group.version] -= 1
        outcome = group.outcome()
        self._starter.stop_soon(outcome.running)
        if self._group_filter.accept(outcome, self._metrics):
            columns = [turn.array("versions") for t in outcome.group.survivors for turn in t.turns]
            oldest = min((int(versions.min()) for versions in columns if len(versions)), default=group.version)
            self._add_ready(ReadyGroup(group.position, outcome.group, oldest))
        self._note()
        self._fill()

    def _add_ready(self, ready: ReadyGroup) -> None:
        self._ready.setdefault(ready.version, {})[ready.position] = ready

    @property
    def _num_ready(self) -> int:
        return sum(map(len, self._ready.values()))

    def _choose(self, step: int) -> list[ReadyGroup] | None:
        """Return this step's groups, or None while it has to wait. O(R) while it waits."""
        batch = self._plan.groups
        if self._num_ready < batch:
            return None
        versions = sorted({*self._ready, *(version for version, n in self._open_versions.items() if n)})
        assert versions[0] + 1 + self._plan.bound >= step, f"version {versions[0]} missed its deadline before {step}"
        missing, left = batch, 0
        for version in versions:  # earliest deadline first
            taken = min(missing, len(self._ready.get(version, ())))
            missing -= taken
            left += len(self._ready.get(version, ())) + self._open_versions[version] - taken
            if left > (version + 1 + self._plan.bound - step) * batch:
                return None
        chosen: list[ReadyGroup] = []
        for version in sorted(self._ready):
            chosen += [self._ready[version][position] for position in sorted(self._ready[version])]
            if len(chosen) >= batch:
                break
        return chosen[:batch]

    def _hand_over(self, chosen: list[ReadyGroup] | None) -> Collected:
        self._report_drops()
        metrics = self._metrics
        if chosen is None:
            return Collected(groups=[r.group for r in self._all_ready()], metrics=metrics, exhausted=True)
        self._left -= len(chosen)
        for ready in chosen:
            del self._ready[ready.version][ready.position]
        self._ready = {version: ready for version, ready in self._ready.items() if ready}
        self._open_versions = +self._open_versions
        metrics.update({"rollout/ready_groups": float(self._num_ready), "rollout/open_groups": float(len(self._open))})
        self._new_window()
        self._fill()
        chosen = sorted(chosen, key=lambda ready: ready.position)
        return Collected(groups=[ready.group for ready in chosen], metrics=metrics, exhausted=self._exhausted)

    def _report_drops(self) -> None:
        for group, reason in self._drops:
            self._on_drop(group, reason)
        self._drops = []

    def _check_budget(self, step: int) -> None:
        self._group_filter.check_failure_rate(step=step, needed=self._plan.groups)
        spent = self._window_started >= self._plan.max_prompts
        if spent and not self._open and not self._exhausted:
            raise self._group_filter.exhausted(
                step=step, started=self._window_started, accepted=self._num_ready, needed=self._plan.groups
            )
