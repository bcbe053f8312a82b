"""A whole run in virtual time: the real scheduler, driver and player around simulated engines and a simulated trainer.

Scenario -> Simulation.run: [collect -> train (a pause) -> weights to the engines] x steps -> Outcome
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.simulation.engine_model import EngineModel, EngineUse, Lengths, LognormalLengths
from benchmarks.simulation.simulated_engines import SimulatedRanks
from benchmarks.simulation.simulated_episodes import EpisodeModel, SimulatedAgent, SimulatedEnv, SimulatedTasks
from benchmarks.simulation.virtual_clock import VirtualClockLoop
from roll.rollout.async_scheduler import AsyncPlan, AsyncRolloutScheduler
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.scheduler import Collected, CollectPlan, RolloutScheduler
from roll.strategies.base import EngineDied, SamplingParams
from roll.types.trajectory import Group, Trajectory
from roll.utils.seeding import stable_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated. Times are in simulated seconds."""

    engines: int = 8
    engine: EngineModel = field(default_factory=EngineModel)
    lengths: Lengths = field(default_factory=lambda: LognormalLengths(median=600, sigma=1.0))
    episode: EpisodeModel = field(default_factory=EpisodeModel)
    steps: int = 6
    groups: int = 64
    """Groups (prompts) that a training step needs."""
    group_size: int = 8
    max_new_tokens: int = 8192
    """Cuts the tail of `lengths`."""
    extra_prompts: int = 0
    """Over-sampling: prompts in flight beyond those needed; the slowest are aborted and played again later."""
    async_ratio: float = 0.0
    """`async_generation_ratio`; 0: generation and training take turns."""
    filtered_share: float = 0.0
    """Groups that a dynamic filter drops."""
    train_seconds: float = 60.0
    """A training step, all but generation and weights."""
    sync_seconds: float = 5.0
    """New weights to the engines, which stand still meanwhile."""
    resume: bool = True
    """`partial_rollout: resume`; else `restart`."""
    deaths: Mapping[int, float] = field(default_factory=dict)
    """When an engine dies, by rank."""
    restart_seconds: float = 60.0
    """Until a dead engine is replaced."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("engines", "steps", "groups", "group_size", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("extra_prompts", "async_ratio", "train_seconds", "sync_seconds", "restart_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.filtered_share < 1:
            raise ValueError(f"filtered_share must be in [0, 1), got {self.filtered_share}")
        if self.extra_prompts and self.async_ratio:
            raise ValueError("extra_prompts is of steps that wait for generation; with async_ratio > 0 set it to 0")
        unknown = [rank for rank in self.deaths if not 0 <= rank < self.engines]
        if unknown:
            raise ValueError(f"deaths names engines {unknown}, but there are {self.engines}, counted from 0")


@dataclass
class Outcome:
    """What a simulation gave. Times and shares leave out the first step, which starts on empty engines."""

    scenario: Scenario
    step_ends: list[float] = field(default_factory=list)
    """Simulated seconds at which each step's new weights were on the engines."""
    groups: list[list[Group]] = field(default_factory=list)
    """Of each step."""
    counters: dict[str, float] = field(default_factory=dict)
    """Sums over the steps of the scheduler's own metrics."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained tokens by how many versions older they are than the weights that they train."""
    use: EngineUse = field(default_factory=EngineUse)
    """Of all engines over the whole simulation."""
    window: EngineUse = field(default_factory=EngineUse)
    """Of all engines after the first step."""
    wasted_tokens: int = 0
    """Sampled, but of aborted, failed or dropped responses, of dead engines or of restarts."""
    tasks: SimulatedTasks = field(default_factory=SimulatedTasks)
    dropped_groups: int = 0
    """By the filter, or for want of survivors."""
    left_over: int = 0
    """Finished groups that the last step didn't need (asynchronous mode)."""

    @property
    def measured_seconds(self) -> float:
        """Return seconds from the end of the first step to the end of the last; of all steps if there is but one."""
        return self.step_ends[-1] - (self.step_ends[0] if len(self.step_ends) > 1 else 0.0)

    @property
    def step_seconds(self) -> float:
        """Return the mean time of a step."""
        return self.measured_seconds / max(1, len(self.step_ends) - 1)

    @property
    def engines_busy(self) -> float:
        """Share of the engines' slots for running requests that were taken, over time."""
        slots = self.scenario.engines * self.scenario.engine.max_running_requests
        return self.window.busy_request_seconds / (slots * self.measured_seconds)

    @property
    def engine_utilisation(self) -> float:
        """Return tokens sampled, as a share of what always full engines would have sampled."""
        peak = self.scenario.engines * self.scenario.engine.peak_tokens_per_second
        return (self.window.tokens + self.window.thrown_away) / (peak * self.measured_seconds)

    @property
    def trainer_busy(self) -> float:
        """Share of the time in which the trainer trains."""
        return self.scenario.train_seconds / self.step_seconds

    @property
    def trained_tokens(self) -> int:
        """Return response tokens of the groups' survivors."""
        return sum(self.staleness.values())

    @property
    def wasted_share(self) -> float:
        """Return wasted tokens among all that were trained on or wasted."""
        return self.wasted_tokens / max(1, self.wasted_tokens + self.trained_tokens)


class Simulation:
    """One scenario, set up: the real driver, player and schedulers around simulated engines."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.loop = VirtualClockLoop()
        self.ranks = SimulatedRanks(
            scenario.engines,
            scenario.engine,
            scenario.lengths,
            loop=self.loop,
            resume=scenario.resume,
            deaths=scenario.deaths,
        )
        self.engines = ContinuousDriver(
            self.ranks,
            max_running_requests=scenario.engine.max_running_requests,
            timeout=1e6,
            is_death=lambda error: isinstance(error, EngineDied),
            restart=lambda rank: self.ranks.restart(rank, scenario.restart_seconds),
            max_restarts=1,
            loop=self.loop,
        )
        self.player = EpisodePlayer(
            self.engines,
            SimulatedAgent(scenario.episode),
            lambda _task, name: SimulatedEnv(scenario.episode, name),
            max_sequence_length=10**9,
            max_turns=scenario.episode.turns,
        )
        self.outcome = Outcome(scenario)

    def run(self) -> Outcome:
        """Play all steps."""
        scenario, outcome = self.scenario, self.outcome
        try:
            ahead = self._ahead() if scenario.async_ratio else None
            scheduler = RolloutScheduler(self.engines, self.player, **self._options)
            for step in range(1, scenario.steps + 1):
                collected = scheduler.collect(outcome.tasks, self._plan(step)) if ahead is None else ahead.collect(step)
                self._count(step, collected)
                self.engines.run(asyncio.sleep(scenario.train_seconds))
                self.engines.run(self.ranks.update_weights(step, scenario.sync_seconds))
                if ahead is not None:
                    ahead.set_version(step)
                self._end_of_step()
            if ahead is None:
                outcome.wasted_tokens = outcome.use.tokens + outcome.use.thrown_away - outcome.trained_tokens
            else:
                outcome.wasted_tokens += outcome.use.thrown_away
                outcome.left_over = len(ahead.state().ready)
                ahead.stop()
        finally:
            self.engines.close()
            self.loop.close()
        return outcome

    @property
    def _options(self) -> dict[str, Any]:
        return {"seed": self.scenario.seed, "keep": self._keep, "on_drop": self._drop}

    @property
    def _shared(self) -> dict[str, Any]:
        scenario = self.scenario
        params = SamplingParams(max_new_tokens=scenario.max_new_tokens)
        return {"groups": scenario.groups, "group_size": scenario.group_size, "params": params, "max_prompts": 10**9}

    def _ahead(self) -> AsyncRolloutScheduler:
        ratio = self.scenario.async_ratio
        # Engines stay as busy as in the middle of a long run until the last step that is measured.
        plan = AsyncPlan(ratio=ratio, last_step=self.scenario.steps + math.ceil(ratio) + 1, **self._shared)
        return AsyncRolloutScheduler(self.engines, self.player, self.outcome.tasks, plan, **self._options)

    def _plan(self, step: int) -> CollectPlan:
        return CollectPlan(step=step, purpose="train", extra_prompts=self.scenario.extra_prompts, **self._shared)

    def _keep(self, group: Group) -> str | None:
        share = self.scenario.filtered_share
        dropped = share and stable_hash("filter", self.scenario.seed, group.task.id) / 2**64 < share
        return "filtered" if dropped else None

    def _drop(self, group: Group, reason: str) -> None:
        del reason
        self.outcome.dropped_groups += 1
        self._waste(group.trajectories)

    def _waste(self, trajectories: Iterable[Trajectory]) -> None:
        self.outcome.wasted_tokens += sum(trajectory.num_response_tokens for trajectory in trajectories)

    def _count(self, step: int, collected: Collected) -> None:
        outcome = self.outcome
        outcome.groups.append(collected.groups)
        for name, value in collected.metrics.result().items():
            outcome.counters[name] = outcome.counters.get(name, 0.0) + value
        for group in collected.groups:
            if self.scenario.async_ratio:
                self._waste(trajectory for trajectory in group.trajectories if not trajectory.trainable)
            for trajectory in group.survivors:
                for turn in trajectory.turns:
                    for version, tokens in _runs(turn.array("versions")):
                        outcome.staleness[step - 1 - version] += tokens

    def _end_of_step(self) -> None:
        outcome = self.outcome
        outcome.step_ends.append(self.loop.time())
        use = self.ranks.use()
        if len(outcome.step_ends) == 1:
            self._first = use
        outcome.use = use
        outcome.window = use if len(outcome.step_ends) == 1 else use.since(self._first)


def simulate(scenario: Scenario) -> Outcome:
    """Play all steps of a scenario; the same scenario gives the same outcome.

    Raises:
        EngineLost: an engine died twice.
    """
    return Simulation(scenario).run()


def _runs(versions: np.ndarray) -> Iterator[tuple[int, int]]:
    """Return (version, tokens); versions never fall within a turn, so equal ends mean one run."""
    if len(versions) and versions[0] == versions[-1]:
        return iter([(int(versions[0]), len(versions))])
    return ((version, sum(1 for _ in run)) for version, run in itertools.groupby(versions.tolist()))
