"""Conformance: bundled environments keep every promise, and each broken one is found and placed."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult
from roll.envs.baselines import random_score, scripted_score
from roll.envs.conformance import CHECKS, check_env
from roll.envs.env_registry import bare_env
from roll.envs.wrappers import EnvSpec


class Coin(Env):
    """Guess a coin that the seed tossed. Good as it is; the classes below break one promise each."""

    actions = ("Heads", "Tails")

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.rng = random.Random(seed)
        self.coin: str | None = self.rng.choice(self.actions)
        return Observation.of(f"Guess. Seed {seed}.")

    def step(self, action: str) -> StepResult:
        if action not in self.actions:
            raise InvalidAction("Heads or Tails?")
        if self.coin is None:
            raise ResetNeeded("reset")
        right, self.coin = action == self.coin, None
        return StepResult(reward=float(right), terminated=True, metrics={"success": float(right)})

    def solution(self, max_actions: int) -> list[str] | None:
        return None if self.coin is None else [self.coin]


class GlobalDraws(Coin):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        super().reset(seed, options)
        return Observation.of(str(random.random()))


class SeedsTheGlobalGenerator(Coin):
    """Right when it is alone, wrong beside another instance."""

    actions = ("a", "b")

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        random.seed(seed)
        return Observation.of("x")

    def step(self, action: str) -> StepResult:
        return StepResult(reward=random.random(), terminated=False, observation=Observation.of("x"))

    def solution(self, max_actions: int) -> None:
        return None


class HashesText(Coin):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        super().reset(seed, options)
        return Observation.of(str(hash(f"seed {seed}")))


class RemembersEpisodes(Coin):
    played = itertools.count()

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        super().reset(seed, options)
        return Observation.of(f"episode {next(self.played)}")


class IgnoresSeeds(Coin):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return super().reset(1, options)


class WrongType(Coin):
    def step(self, action: str) -> Any:
        return {"reward": 1}


class Raises(Coin):
    def step(self, action: str) -> StepResult:
        return self.look_up(action)

    def look_up(self, action: str) -> StepResult:
        return {}[action]  # the line to be named


class RaisesInALibrary(Coin):
    def step(self, action: str) -> StepResult:
        return json.loads("{")  # also the line to be named


class Hangs(Coin):
    def step(self, action: str) -> StepResult:
        while True:
            time.sleep(0.01)


class TakesAnything(Coin):
    def step(self, action: str) -> StepResult:
        return super().step(action if action in self.actions else "Heads")


class KeyErrors(Coin):
    def step(self, action: str) -> StepResult:
        if action not in self.actions:
            raise KeyError(action)
        return super().step(action)


class PaysAfterTheEnd(Coin):
    def step(self, action: str) -> StepResult:
        if action not in self.actions:
            raise InvalidAction("no")
        return StepResult(reward=1.0, terminated=True, metrics={"success": 1})


class SaysNothingOfSuccess(Coin):
    def step(self, action: str) -> StepResult:
        super().step(action)
        return StepResult(reward=1.0, terminated=True)

    def solution(self, max_actions: int) -> None:
        return None


class Truncates(Coin):
    def step(self, action: str) -> StepResult:
        super().step(action)
        return StepResult(reward=1.0, terminated=False, truncated=True, metrics={"success": 1})


class WrongSolution(Coin):
    def solution(self, max_actions: int) -> list[str] | None:
        return None if self.coin is None else ["Tails" if self.coin == "Heads" else "Heads"]


class CloseFails(Coin):
    def close(self) -> None:
        del self.handle

    def __init__(self) -> None:
        self.handle = 1


class WrongPicture(Coin):
    def render(self) -> list[int]:
        return [1, 2]


class PictureMoves(Coin):
    def render(self) -> str:
        self.coin = "Heads"
        return "?"


class ShowsAddresses(Coin):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        super().reset(seed, options)
        return Observation.of("see", state="<object at 0x7f0000000000>")


class SlowReset(Coin):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        time.sleep(0.003)
        return super().reset(seed, options)


class TwiceTheSame(Coin):
    actions = ("Heads", "Tails", "heads")


class ChokesOnText(Coin):
    actions = ()

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return Observation.of(f"Say anything. Seed {seed}.")

    def step(self, action: str) -> StepResult:
        number = int(action) if action.isdigit() else 0  # int refuses numbers of very many digits
        return StepResult(reward=float(number), terminated=True, metrics={"success": 1})

    def solution(self, max_actions: int) -> None:
        return None


def problems(make: Callable[[], Env], **arguments: Any) -> dict[str, tuple[str, str, str]]:
    found = check_env(make, **{"seeds": 4, "max_steps": 20, **arguments})
    return {f.check: (f.level, f.message, f.where) for f in found if f.level in ("warning", "error")}


BUNDLED = [("frozen_lake-v1", {}), ("frozen_lake-v1", {"slippery": True, "size": 6}), ("countdown-v1", {})]
BUNDLED += [("countdown-v1", {"use_all": True, "num_numbers": 3}), ("sokoban-v1", {})]


@pytest.mark.parametrize(("env_type", "config"), BUNDLED)
def test_bundled_environments_keep_every_promise(env_type, config):
    spec = EnvSpec(tag="x", env_type=env_type, env_config=config)
    found = check_env(functools.partial(bare_env, spec), seeds=4)
    assert [f.check for f in found if f.level in ("warning", "error")] == []
    assert {f.check for f in found} == set(CHECKS)


def test_question_answering_keeps_every_promise(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{n} + 1?", "ground_truth": str(n + 1)}) for n in range(9)))
    spec = EnvSpec(tag="x", env_type="question_answer-v1", env_config={"file_name": str(file), "reward": "gsm8k"})
    assert problems(functools.partial(bare_env, spec)) == {}


def test_a_good_environment_has_no_problems():
    assert problems(Coin) == {}
    assert [f.level for f in check_env(Coin)] == ["ok"] * len(CHECKS)


@pytest.mark.parametrize(
    ("make", "check", "level", "message"),
    [
        (GlobalDraws, "same seed, same episode", "error", "global generator"),
        (SeedsTheGlobalGenerator, "same seed, same episode", "error", "plays differently a second time"),
        (RemembersEpisodes, "same seed, same episode", "error", "keep nothing from one episode"),
        (PictureMoves, "same seed, same episode", "error", "plays differently"),
        (HashesText, "same in another process", "error", "hash"),
        (IgnoresSeeds, "seeds differ", "error", "28 seeds play the same episode"),
        (WrongType, "is played", "error", "WrongType.step returned {'reward': 1} (dict), expected a StepResult"),
        (TakesAnything, "unknown actions", "warning", "taken as if it were one"),
        (KeyErrors, "unknown actions", "warning", "raises KeyError, expected roll.envs.base.InvalidAction"),
        (ChokesOnText, "unknown actions", "error", "ValueError"),
        (PaysAfterTheEnd, "end of an episode", "warning", "a reward of 1 after the end"),
        (WrongSolution, "solution", "error", "4 of 4 solutions don't end"),
        (CloseFails, "close", "error", "AttributeError"),
        (WrongPicture, "render", "error", "render returned list"),
        (ShowsAddresses, "states", "warning", "0x7f0000000000"),
        (TwiceTheSame, "is played", "error", "has one twice"),
    ],
)
def test_a_broken_promise_is_found(make, check, level, message):
    # A lambda can't travel: no second process is started where none is needed.
    found = problems(make if check == "same in another process" else lambda: make())
    assert check in found, found
    assert found[check][0] == level
    assert message in found[check][1]


def test_an_episode_that_is_cut_off_has_ended():
    found = [f.message for f in check_env(lambda: Truncates(), seeds=2)]
    assert not [message for message in found if "no episode ended" in message]


def test_the_line_that_raised_is_named():
    level, message, where = problems(Raises)["is played"]
    assert level == "error"
    assert message in ("KeyError: 'Heads'", "KeyError: 'Tails'")
    assert where.endswith("in look_up: return {}[action]  # the line to be named")
    assert "test_envs_conformance.py:" in where
    assert problems(RaisesInALibrary)["is played"][2].endswith('return json.loads("{")  # also the line to be named')


def test_a_hang_ends_and_is_placed():
    _, message, where = problems(Hangs, timeout_s=0.2)["is played"]
    assert re.fullmatch(r"step 1 of seed \d+, '\w+' is not done after 0.2 s; here it was", message)
    assert "in step" in where


def test_slow_environments_are_told_so(monkeypatch):
    monkeypatch.setattr("roll.envs.conformance_checks.SLOW_RESET_S", 0.002)
    assert problems(lambda: SlowReset(), max_steps=3)["speed"][0] == "warning"


def test_what_cannot_travel_is_not_compared_and_not_an_error():
    found = {f.check: f for f in check_env(lambda: Coin(), seeds=2)}
    assert found["same in another process"].level == "info"


def test_agents_have_their_success_rates():
    guesses = random_score(Coin, range(400), 5)
    assert 0.4 < guesses.success_rate < 0.6  # a fair coin: 0.5, 4 sigma are 0.1
    assert guesses.mean_return == guesses.success_rate
    assert guesses.mean_steps == 1
    solved = scripted_score(Coin, range(10), 5)
    assert solved is not None
    assert (solved.success_rate, solved.unplayed) == (1, 0)
    assert scripted_score(SaysNothingOfSuccess, range(3), 5) is None
