"""`reasoning_gym:NAME`: the procedural data sets of reasoning-gym, a question and one answer per episode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.adapters.base import HubEnv, HubError, ended
from roll.envs.base import Observation, StepResult
from roll.utils.reasoning_gym_sets import UselessVerifier, check_dataset, create_dataset, is_wrong

_CHECKED: set[str] = set()
"""Data sets with their options that were tried in this process: an environment of each slot would try its own again."""


class ReasoningGymEnv(HubEnv):
    """A question of a procedural data set of reasoning-gym.

    The seed makes the question. Any text is an answer, scored by the data set's own verifier; a data set whose verifier
    takes texts that are no answer is refused. Metrics: `success`.

    Args:
        success_from: scores from here on are right answers.
        options: arguments of the data set, e.g. `min_terms`.
    """

    scheme = "reasoning_gym"
    one_episode = False
    instructions = "Answer the question."

    def __init__(self, *, success_from: float = 1.0, **options: Any) -> None:
        super().__init__()
        if own := sorted({"seed", "size"} & options.keys()):
            raise ValueError(f"{own[0]}: each episode has a seed of its own, and one question; leave it out")
        self._success_from, self._options = success_from, options
        self._package = self.load()
        self._check()
        self._dataset: Any = None
        self._entry: Mapping[str, Any] = {}

    def begin(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.no_options(options)
        self._dataset = self._made(seed)
        self._entry = self._dataset[0]
        return Observation.of(str(self._entry["question"]))

    def act(self, action: str) -> StepResult:
        try:
            wrong = is_wrong(action, self._entry)
            score = 0.0 if wrong else float(self._dataset.score_answer(answer=action, entry=self._entry))
        except Exception:  # noqa: BLE001 - some verifiers raise for an answer that they can't read: it is a wrong one
            score = 0.0
        score = score if math.isfinite(score) else 0.0
        return ended(score, success=score >= self._success_from, answer=action)

    def solution(self, max_actions: int) -> Sequence[str] | None:  # noqa: ARG002 - it is one answer
        """Return the data set's own answer, where there is one and its verifier takes it."""
        answer = self._entry.get("answer")
        if answer is None:
            return None
        with self._random.lent():
            scored = self._dataset.score_answer(answer=str(answer), entry=self._entry)
        return [str(answer)] if scored >= self._success_from else None

    def make(self, *_: Any, **options: Any) -> Any:
        seed, size = options.pop("seed"), options.pop("size")
        return create_dataset(self.hub_id, options, seed=seed, size=size)

    def _check(self) -> None:
        """Raise `HubError` for a name or an option that there isn't, and for a verifier that is of no use."""
        dataset, key = self._made(0, size=8), f"{self.hub_id} {sorted(self._options.items())!r}"
        if key in _CHECKED:
            return
        with self._random.lent():
            try:
                check_dataset(dataset, self.hub_id)
            except UselessVerifier as error:
                raise HubError(f"reasoning_gym: {error}") from None
        _CHECKED.add(key)

    def _made(self, seed: int, size: int = 1) -> Any:
        known = __import__("reasoning_gym.factory", fromlist=["DATASETS"]).DATASETS
        return self.made(known=known, size=size, seed=seed, **self._options)
