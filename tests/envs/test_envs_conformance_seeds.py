"""Conformance: what a seed decides, over the seeds that runs use, and what else decides something."""

from __future__ import annotations

import random
import secrets
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from roll.envs.base import Env, InvalidAction, Observation, StepResult
from roll.envs.conformance import check_env
from roll.envs.trial import SEED_BITS, EnvFinding, run_seeds
from roll.rollout.env_tasks import EnvTasks


class Walk(Env):
    """Three steps along a line that the seed draws, then cut off. Good as it is; the classes below break a promise."""

    actions = ("Left", "Right")

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.rng = random.Random(seed)
        self.steps = 0
        return Observation.of(f"at {self.rng.randrange(10**6)}")

    def step(self, action: str) -> StepResult:
        if action not in self.actions:
            raise InvalidAction("Left or Right?")
        self.steps += 1
        return StepResult(
            reward=self.rng.random(),
            terminated=False,
            truncated=self.steps == 3,
            observation=Observation.of(f"at {self.rng.randrange(10**6)}"),
        )


class IgnoresItsSeed(Walk):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return super().reset(7, options)


class NeedsSmallSeeds(Walk):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return super().reset(int(np.random.RandomState(seed).randint(10**6)), options)


def findings(make: Any, **arguments: Any) -> list[EnvFinding]:
    return check_env(make, **{"seeds": 4, "max_steps": 12, **arguments})


def of_level(found: list[EnvFinding], *levels: str) -> dict[str, str]:
    return {finding.check: finding.message for finding in found if finding.level in levels}


def test_a_wrapper_that_ignores_its_seed_fails():
    assert "seeds differ" in of_level(findings(lambda: IgnoresItsSeed()), "error")


def test_one_that_needs_32_bit_seeds_fails_and_is_told_so():
    said = of_level(findings(lambda: NeedsSmallSeeds()), "error")
    assert "seeds of at most 32 bits" in said["63-bit seeds"]


def test_a_right_one_with_a_time_limit_of_its_own_gets_no_warning():
    found = findings(lambda: Walk())
    assert of_level(found, "warning", "error") == {}
    assert not [f for f in found if "no episode ended" in f.message]


class OwnSeeding(Walk):
    """Seeds the shared generator in reset and draws there only: nobody else's draws come between."""

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        random.seed(seed)
        return super().reset(random.randrange(2**40), options)


class PutsBack(Walk):
    """Gives the shared generator a state of its own for each call, and puts it back: how a wrapper isolates a game."""

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.state = random.Random(seed).getstate()
        return self.isolated(lambda: super(PutsBack, self).reset(random.randrange(2**40), options))

    def step(self, action: str) -> StepResult:
        return self.isolated(lambda: super(PutsBack, self).step(action) if random.random() < 2 else None)

    def isolated(self, call: Any) -> Any:
        before = random.getstate()
        random.setstate(self.state)
        try:
            return call()
        finally:
            self.state = random.getstate()
            random.setstate(before)


class Drawn(Walk):
    """Shows a number from elsewhere with every reset."""

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        super().reset(seed, options)
        return Observation.of(f"seed {seed}, {self.draw()}")

    def draw(self) -> Any:
        raise NotImplementedError


class FromRandom(Drawn):
    def draw(self) -> Any:
        return random.randint(1, 10**9)  # drawn here: random


class FromNumpy(Drawn):
    def draw(self) -> Any:
        return np.random.rand()  # drawn here: numpy.random


class FromTorch(Drawn):
    def draw(self) -> Any:
        import torch  # here: the processes that play `Hashes` needn't wait for it

        return torch.rand(()).item()  # drawn here: torch


class FromNumpyWithoutSeed(Drawn):
    def draw(self) -> Any:
        return np.random.default_rng().random()  # drawn here: os.urandom


class FromUuid(Drawn):
    def draw(self) -> Any:
        return uuid.uuid4()  # drawn here: os.urandom


class FromSecrets(Drawn):
    def draw(self) -> Any:
        return secrets.token_hex(4)  # drawn here: os.urandom


class FromUnseeded(Drawn):
    def draw(self) -> Any:
        return random.Random().random()  # drawn here: random.Random without a seed


class FromClock(Drawn):
    def draw(self) -> Any:
        return time.time_ns()  # drawn here: time.time_ns


class Seldom(Walk):
    """One episode in many thousand is another one: nothing that is shown gives it away."""

    def step(self, action: str) -> StepResult:
        if random.random() < 1e-6:  # drawn here: random
            self.steps += 1
        return super().step(action)


class NamesItself(Walk):
    """A name for its logs, which nothing depends on."""

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.name = uuid.uuid4()
        return super().reset(seed, options)


@pytest.mark.parametrize(
    "make",
    [FromRandom, FromNumpy, FromTorch, FromNumpyWithoutSeed, FromUuid, FromSecrets, FromUnseeded, FromClock, Seldom],
)
def test_randomness_outside_the_seed_is_named_with_its_line(make):
    (found,) = [f for f in findings(lambda: make()) if f.check == "nothing but the seed" and f.level == "error"]
    text = Path(__file__).read_text("utf-8").splitlines()
    shown, _, function = found.where.rpartition(" in ")
    line = text[int(shown.rpartition(":")[2]) - 1]
    assert "# drawn here: " in line, found
    assert line.partition("# drawn here: ")[2] in found.message
    assert function == ("step" if make is Seldom else "draw")


@pytest.mark.parametrize("make", [Walk, OwnSeeding, PutsBack, NamesItself])
def test_what_nothing_depends_on_is_no_error(make):
    found = findings(lambda: make())
    assert of_level(found, "warning", "error") == {}
    said = of_level(found, "info").get("nothing but the seed", "")
    assert said == ("calls os.urandom; what is shown and paid didn't depend on it" if make is NamesItself else "")


def test_the_shared_generators_are_left_as_they_were():
    before = random.getstate(), np.random.get_state()[1].tolist()
    findings(lambda: FromRandom())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


class Fixed(Walk):
    """One board, and no chance."""

    one_episode = True

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return super().reset(1, options)


def test_one_that_says_there_is_one_episode_may_ignore_its_seed():
    found = findings(lambda: Fixed())
    assert of_level(found, "warning", "error") == {}
    assert "the same episode" in of_level(found, "info")["seeds differ"]


@pytest.mark.parametrize("bits", [16, 31, 32, 53])
def test_the_largest_seed_is_found(bits):
    class Limited(Walk):
        def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
            if seed >= 2**bits:
                raise OverflowError("too large")
            return super().reset(seed, options)

    found = findings(lambda: Limited())
    assert of_level(found, "error").keys() == {"63-bit seeds"}
    assert f"seeds of at most {bits} bits" in of_level(found, "error")["63-bit seeds"]
    assert "OverflowError: too large" in of_level(found, "error")["63-bit seeds"]


class Hashes(Walk):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        super().reset(seed, options)
        return Observation.of(f"seed {seed}: {'-'.join({'red', 'green', 'blue', 'black', 'white'})}")


def test_the_order_of_a_set_of_strings_is_told_from_other_differences():
    said = of_level(findings(Hashes, seeds=2), "error")
    assert said.keys() == {"same in another process"}
    assert "the same with the same PYTHONHASHSEED" in said["same in another process"]


def test_seeds_are_those_of_runs():
    tasks = [EnvTasks(["a"], [1], {"a": "x"}, seed=1, split=split) for split in ("train", "val")]
    theirs = [task.seed for source in tasks for task in source.take(50)]
    ours = run_seeds(50)
    assert len(set(ours)) == 50
    assert {seed.bit_length() for seed in ours} == {max(seed.bit_length() for seed in theirs)} == {SEED_BITS}
    assert {seed % 2 for seed in ours} == {seed % 2 for seed in theirs} == {0, 1}


class CartPole(Env):
    """gymnasium's, as a user wraps it, with a time limit of gymnasium's own."""

    actions = ("Left", "Right")

    def __init__(self) -> None:
        self.env = gymnasium.make("CartPole-v1", max_episode_steps=9)

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return self.told(self.env.reset(seed=seed)[0])

    def step(self, action: str) -> StepResult:
        if action not in self.actions:
            raise InvalidAction(f"{action} is none")
        numbers, reward, terminated, truncated, _ = self.env.step(self.actions.index(action))
        return StepResult(
            reward=float(reward), terminated=terminated, truncated=truncated, observation=self.told(numbers)
        )

    def told(self, numbers: Any) -> Observation:
        return Observation.of(" ".join(f"{number:.4f}" for number in numbers))


class CartPoleWithoutSeed(CartPole):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return self.told(self.env.reset()[0])


class CartPoleWithOneSeed(CartPole):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return self.told(self.env.reset(seed=1)[0])


def test_wrappers_of_gymnasium_that_are_right_and_that_are_not():
    assert of_level(findings(lambda: CartPole()), "warning", "error") == {}
    assert of_level(findings(lambda: CartPoleWithOneSeed()), "warning", "error").keys() == {"seeds differ"}
    found = findings(lambda: CartPoleWithoutSeed())
    assert of_level(found, "warning", "error").keys() == {"same seed, same episode", "nothing but the seed"}
    (named,) = [f for f in found if f.check == "nothing but the seed" and f.level == "error"]
    assert "os.urandom" in named.message
    assert named.where.endswith(" in reset"), named  # not the line of gymnasium's own that draws


class SlowToFollow(FromRandom):
    def draw(self) -> Any:
        for _ in range(60_000):
            pass
        return super().draw()


def test_a_line_that_takes_too_long_to_be_found_is_left_out():
    found = [f for f in findings(lambda: SlowToFollow(), timeout_s=1.0) if f.check == "nothing but the seed"]
    assert [(f.level, f.where) for f in found] == [("error", "")], found
    assert "draws from random," in found[0].message
