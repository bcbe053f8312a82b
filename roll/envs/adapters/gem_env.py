"""`gem:ID`: the environments of GEM (https://pypi.org/project/gem-llm/), games and tasks told in text."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from roll.envs.adapters.base import HubEnv, ended
from roll.envs.adapters.own_random import OwnRandom
from roll.envs.base import Observation, StepResult


class GemEnv(HubEnv):
    r"""An environment of GEM.

    Any text is an action; GEM finds the answer in it, mostly in `\boxed{}`. Rewards are GEM's own. Metrics:
    `success` in the last step.

    Args:
        success_from: a reward of the last step from here on is a success.
        options: arguments of the environment, e.g. `max_turns`.
    """

    scheme = "gem"
    reads_responses = True
    seed_bits = 32  # numpy.random.seed

    def __init__(self, *, success_from: float = 1.0, **options: Any) -> None:
        super().__init__()
        self._success_from, self._options = success_from, options
        self._package = self.load()
        self._fresh: Any = self._made()
        self._env: Any = None

    @classmethod
    def load(cls) -> Any:
        package = super().load()
        __import__("gem.envs")  # where the ids are registered
        return package

    def begin(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.no_options(options)
        self._env, self._fresh = self._fresh or self._made(), None  # some count the episodes that they have played
        return _shown(*self._env.reset(seed=seed))

    def act(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = self._env.step(action)
        if terminated or truncated:
            # GEM marks the last turn as truncated even where the task is over.
            return ended(float(reward), success=reward >= self._success_from, terminated=bool(terminated))
        return StepResult(reward=float(reward), terminated=False, observation=_shown(observation, info))

    def sample_action(self, rng: random.Random) -> str | None:
        if self.actions or self._env is None or not hasattr(self._env, "sample_random_action"):
            return None
        # What it draws isn't taken from the episode's numbers. Some have the method, but can't draw.
        with OwnRandom(rng.randrange(2**32)).lent(), suppress(NotImplementedError):
            return str(self._env.sample_random_action())
        return None

    def make(self, *_: Any, **options: Any) -> Any:
        return self._package.make(self.hub_id, **options)

    def _made(self) -> Any:
        return self.made(known=self._package.envs.registration.ENV_REGISTRY, **self._options)


def _shown(observation: Any, info: Mapping[str, Any]) -> Observation:
    """Return what GEM shows, and below it what is to be done next (`suffix`)."""
    parts = (str(observation).strip(), str(info.get("suffix") or "").strip())
    return Observation.of("\n".join(part for part in parts if part))
