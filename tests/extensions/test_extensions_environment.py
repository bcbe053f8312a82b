"""An environment of the user's own: one file, named in YAML, nothing else touched."""

from __future__ import annotations

import pytest
from toy import metrics_of
from toy_env import write_toy_env

from roll.cli.__main__ import main

OWN = '''
import random

from roll.envs.base import Env, Observation, StepResult


class Vowels(Env):
    """Rewards vowels, for a number of turns."""

    instructions = "vowels"

    def __init__(self, turns: int, each: float = 1.0):
        self._turns, self._each = turns, each

    def reset(self, seed, options):
        self._left = self._turns
        self._letter = random.Random(seed).choice("aeiou")
        return Observation.of(self._letter)

    def step(self, action):
        self._left -= 1
        count = sum(letter in "aeiouAEIOU" for letter in action)
        return StepResult(
            reward=1.0 + self._each * count,
            terminated=self._left == 0,
            observation=Observation.of(self._letter) if self._left else None,
            metrics={"vowels": float(count)},
        )
'''


@pytest.fixture
def folder(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(write_toy_env(tmp_path, tiny_model))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def section(name: str = "Vowels", **env_config: object) -> str:
    arguments = ", ".join(f"{key}: {value}" for key, value in env_config.items())
    keys = f"env_type: 'own.py:{name}', action_pattern: null, system_template: null, max_steps: 4"
    return f"custom_envs={{letters: {{{keys}, env_config: {{{arguments}}}}}}}"


def test_an_environment_with_options_trains_two_steps(folder, capsys):
    keys = ("max_steps=2", "export_model=false", "~val_env_manager", section(turns=2, each=0.25))
    assert main(["train", "toy", *keys]) == 0, capsys.readouterr().err
    rows = metrics_of(folder / "output" / "logs")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:  # two turns of 1 each, and a quarter for every vowel
        assert row["reward/mean"] == pytest.approx(2.0 + 0.25 * row["env/letters/vowels"])
    assert rows[0]["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (section(turns=2, eech=1), "did you mean 'each'"),
        (section(), "env_config.turns: missing"),
        (section("Vowel", turns=2), "did you mean 'Vowels'"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_it_is_played(folder, capsys, section, expected):
    assert main(["train", "toy", section]) == 2
    assert expected in capsys.readouterr().err
