"""A reward of the user's own: one file, named in YAML, nothing else touched."""

from __future__ import annotations

import pytest

from roll.cli.__main__ import main

OWN = '''
from roll.rewards.base import Reward
from roll.types.episode import Task


def digits(response: str, task: Task, *, each: float = 1.0) -> Reward:
    """`each` for every digit, and one more for every response."""
    count = sum(map(str.isdigit, response))
    return Reward(1.0 + each * count, {"digits": float(count)})
'''


def test_a_reward_with_options_trains_two_steps(trained, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    rows = trained("custom_reward_function=null", "rewards.case={name: 'own.py:digits', reward_kwargs: {each: 0.25}}")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/mean"] == pytest.approx(1.0 + 0.25 * row["reward/case/part/digits"])
    assert rows[0]["reward/case/part/digits"] > 0


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("{name: 'own.py:digits', reward_kwargs: {eech: 2}}", "did you mean 'each'"),
        ("{name: 'own.py:digits', reward_kwargs: {each: much}}", "it is annotated as float, which 'much' isn't"),
        ("{name: 'own.py:digit'}", "did you mean 'digits'"),
        ("{name: own.digits}", "own:digits"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_anything_is_loaded(trained, tmp_path, capsys, reward, expected):
    (tmp_path / "own.py").write_text(OWN)
    assert main(["check", "toy", "custom_reward_function=null", f"rewards.case={reward}"]) == 2
    assert expected in capsys.readouterr().err
