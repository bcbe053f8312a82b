"""The dial of examples/custom_env with a fault: the runs of docs/generate/view_demo.py have environments that fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.envs.base import Env, Observation, StepResult
from roll.utils.importing import load_object

_Dial: type[Env] = load_object("examples/custom_env/dial.py:Dial")


class JammedDial(_Dial):  # type: ignore[valid-type, misc]  # a class that is loaded by its path
    """In every fourth safe of training the dial jams at 7, and the environment raises.

    `prepare` plays safes of small seeds for the words of the game; those never jam. Seeds of training are even.
    """

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        """Reset as the dial does."""
        self._jams = seed > 10_000 and seed % 8 == 0
        observation: Observation = super().reset(seed, options)
        return observation

    def step(self, action: str) -> StepResult:
        """Step as the dial does, unless it jams."""
        if self._jams and action == "7":
            raise RuntimeError("the dial is jammed at 7")
        result: StepResult = super().step(action)
        return result
