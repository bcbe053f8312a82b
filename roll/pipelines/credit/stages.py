"""Stages of a training step: what they read and write, and those of the user's own.

`model_outputs.py` has those that ask models, `credit.py` those from scores to what the loss reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.advantages import AdvantageFn, AdvantageInputs
from roll.algorithms.branches import Branches
from roll.algorithms.gigpo import StepInputs
from roll.configs.catalog.stage_table import CREDIT, MODEL_OUTPUTS, PHASES, phase_of, stage_problems
from roll.configs.schema.rl_config import RLConfig
from roll.pipelines.credit.turn_credit import TrajectoryView, token_branches
from roll.pipelines.rollouts.assemble import Rollouts
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.utils.importing import load_object


class StepData:
    """What stages read and write: `data["rewards"]` is [R] or [R, T], see `roll/configs/catalog/stage_table.py`.

    R trajectories, T tokens (see `TrajectoryView`), B rows that are trained on, N tokens of all rows. In RLVR a row is
    a trajectory; an episode of several turns may be more than one row, and is credited as one.
    """

    def __init__(self, rollouts: Rollouts, step: int) -> None:
        self.rollouts = rollouts
        """Trajectories, their tasks, and the rows with their columns."""
        self.step = step
        """Number of the step, from 1."""
        self.metrics = Metrics()
        """What is logged: `data.metrics.add_mean(name, total, count)`."""
        self.turns: StepInputs | None = None
        """The turns that were played, with their rewards and states; None where an episode is one response."""
        self._values: dict[str, Tensor] = {"scores": rollouts.rewards}

    def __getitem__(self, name: str) -> Tensor:
        """Return a quantity: made by a stage, or a token column of the rows as [R, T]."""
        if name in self._values:
            return self._values[name]
        if name in _EVERYTHING_COUNTS:
            return _EVERYTHING_COUNTS[name](self)
        column: Tensor | None = getattr(self.batch, name, None)
        if column is None:
            raise ValueError(f"no stage before this one gives {name!r}; declare it: needs=({name!r},)")
        return self.view.pad(column)

    def get(self, name: str) -> Tensor | None:
        """Return a quantity that a stage has made, None where none has."""
        return self._values.get(name)

    def update(self, **values: Tensor) -> None:
        """Set quantities."""
        self._values.update(values)

    def add_columns(self, **columns: Tensor | None) -> None:
        """Set columns of the rows: [N] or [B]."""
        self.batch = self.batch.with_columns(**columns)

    @property
    def batch(self) -> TokenBatch:
        """Return the rows that are trained on."""
        return self.rollouts.batch

    @batch.setter
    def batch(self, batch: TokenBatch) -> None:
        """Set them."""
        self.rollouts = replace(self.rollouts, batch=batch)

    @cached_property
    def view(self) -> TrajectoryView:
        """Return how [N] becomes [R, T], and back."""
        return TrajectoryView.of(self.rollouts)

    @cached_property
    def action_mask(self) -> Tensor:
        """Return bool [R, T], the tokens that the policy chose."""
        return self.view.pad(self.batch.action_mask, False)

    @cached_property
    def branches(self) -> Branches | None:
        """Return the branches of the action tokens; None where no episode branches."""
        return token_branches(self.rollouts, self.action_mask)

    @property
    def group_index(self) -> Tensor:
        """Return int64 [R]: trajectories of one prompt share a number."""
        return self.rollouts.group_index

    @property
    def response_lengths(self) -> Tensor:
        """Return int64 [R], tokens that the policy chose."""
        return self.rollouts.response_lengths


_EVERYTHING_COUNTS: dict[str, Callable[[StepData], Tensor]] = {
    "trajectory_mask": lambda data: torch.ones(len(data.rollouts.trajectories), dtype=torch.bool),
    "token_mask": lambda data: data.action_mask,
    "trajectory_weights": lambda data: torch.ones(len(data.rollouts.trajectories)),
}
"""What is there before a stage says otherwise."""


class Stage:
    """One piece of a step's work."""

    needs: tuple[str, ...] = ()
    """Quantities that it reads."""
    gives: tuple[str, ...] = ()
    """Quantities that it sets."""

    def __call__(self, data: StepData) -> None:
        """Do it."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, plain numbers by names that no other stage uses. Default: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it from the states of all stages; what they lack begins anew."""


class OwnStage(Stage):
    """A stage of the user's own: a function, or an instance of a class, that returns what it gives."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        target = load_object(path, key="stages")
        declared = getattr(target, "declared", None)
        if declared is None:
            raise ValueError(f"stages: {path} declares nothing: put @roll.stage(needs=(...), gives=(...)) above it")
        if wrong := list(stage_problems(declared)):
            raise ValueError(f"stages: {path}: {'; '.join(wrong)}")
        self.path, self.needs, self.gives = path, declared.needs, declared.gives
        self._target = target(**options) if isinstance(target, type) else target
        self._options = {} if isinstance(target, type) else dict(options)

    def __call__(self, data: StepData) -> None:
        with torch.no_grad():
            given = self._target(data, **self._options)
        if not isinstance(given, Mapping) or set(given) != set(self.gives):
            returned = ", ".join(given) if isinstance(given, Mapping) else type(given).__name__
            raise ValueError(f"stages: {self.path} gives {', '.join(self.gives)}, and returned {returned or 'nothing'}")
        data.update(**{name: self._checked(name, value, data) for name, value in given.items()})

    def _checked(self, name: str, value: Any, data: StepData) -> Tensor:
        """Return one quantity in the type and shape that it has; numbers have to be finite."""
        checked = _as_declared(f"stages: {self.path}", name, value, data.action_mask)
        if name == "trajectory_weights" and bool((checked < 0).any()):
            raise ValueError(f"stages: {self.path} returned weights below 0, which would unlearn; see advantages")
        return checked if checked.dtype == torch.bool else checked.float()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._target.state_dict() if hasattr(self._target, "state_dict") else {}
        return {self.path: state} if state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.path in state:
            self._target.load_state_dict(state[self.path])


def checked_estimator(path: str, estimator: AdvantageFn) -> AdvantageFn:
    """Return an estimator of the user's own whose results are checked as those of a stage are."""

    def compute(inputs: AdvantageInputs, **options: Any) -> tuple[Tensor, Tensor]:
        returned = estimator(inputs, **options)
        if not isinstance(returned, tuple) or len(returned) != 2:
            what = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
            raise ValueError(f"adv_estimator: {path} returned {what}, expected two tensors: (advantages, returns)")
        owner, mask = f"adv_estimator: {path}", inputs.action_mask
        advantages, returns = returned
        return _as_declared(owner, "advantages", advantages, mask), _as_declared(owner, "returns", returns, mask)

    return compute


def _as_declared(owner: str, name: str, value: Any, action_mask: Tensor) -> Tensor:
    """Return a quantity of `CREDIT` that code of the user's own has returned, 0 outside the mask; refuse another type
    or shape, and numbers that aren't finite."""
    is_mask, rows = name.endswith("_mask"), len(action_mask)
    shape = tuple(action_mask.shape) if "[R, T]" in CREDIT[name] else (rows,)
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or (value.dtype == torch.bool) is not is_mask:
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        wanted = f"{'bool' if is_mask else 'float'} {list(shape)}"
        per_row = isinstance(value, Tensor) and value.shape == (rows,) and len(shape) == 2 and not is_mask
        hint = "; roll.algorithms.advantages.to_tokens(values, action_mask) spreads [R] over tokens" if per_row else ""
        raise ValueError(f"{owner} returned {name} as {what}, expected a tensor, {wanted}{hint}")
    if is_mask:
        return value
    counted = torch.where(action_mask, value, 0) if value.ndim == 2 else value
    infinite = ~torch.isfinite(counted)
    if broken := (infinite.any(1) if value.ndim == 2 else infinite).nonzero().flatten().tolist():
        raise ValueError(f"{owner} returned {name} with numbers that are not finite, in trajectories {broken[:8]}")
    return counted


class Stages:
    """A list of stages, and the state of those that have one."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self.stages = tuple(stages)

    def __call__(self, data: StepData) -> StepData:
        """Run them in order; return the data."""
        for stage in self.stages:
            stage(data)
        return data

    @property
    def needed(self) -> frozenset[str]:
        """Return what they need of models."""
        return frozenset(name for stage in self.stages for name in stage.needs if name in MODEL_OUTPUTS)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {name: value for stage in self.stages for name, value in stage.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for stage in self.stages:
            stage.load_state_dict(state)


def own_stages(config: RLConfig) -> dict[str, list[Stage]]:
    """Return the stages of the user's own in the order in which they are listed, by the phase at whose end they run,
    i.e. by the first name of one of `PHASES`."""
    phases: dict[str, list[Stage]] = {next(iter(phase)): [] for phase in PHASES}
    for path in config.stages:
        stage = OwnStage(path, config.stage_args.get(path, {}))
        phases[next(iter(PHASES[phase_of(stage.gives[0])]))].append(stage)
    return phases
