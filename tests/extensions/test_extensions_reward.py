"""A reward of the user's own: one file, named in YAML, nothing else touched."""

from __future__ import annotations

import pytest

from roll.cli.__main__ import main
from roll.pipelines import check_process
from roll.pipelines.check_process import look

OWN = '''
from roll.rewards.base import Reward
from roll.types.trajectory import Task


def digits(response: str, task: Task, *, each: float = 1.0) -> Reward:
    """`each` for every digit, and one more for every response."""
    count = sum(map(str.isdigit, response))
    return Reward(1.0 + each * count, {"digits": float(count)})


async def asked(response, task, *, url):
    return 1.0


def alone(response):
    return 1.0


def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * len(solution_str)}


def lists(responses, tasks):
    return [float(len(response)) for response in responses]


def columns(prompts, completions, ground_truth):
    return [1.0] * len(prompts)
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
        ("{name: 'own.py:asked'}", "it has no default and must be given"),
        ("{name: 'own.py:alone'}", "alone(response) is called as fn(response, task, **reward_kwargs)"),
        ("{name: 'own.py:compute_score', reward_kwargs: {scal: 2}}", "did you mean 'scale'"),
        ("{name: 'own.py:lists', reward_kwargs: {scal: 2}}", "fn(responses, tasks, **reward_kwargs)"),
        ("{name: 'own.py:digit'}", "did you mean 'digits'"),
        ("{name: own.digits}", "own:digits"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_anything_is_loaded(trained, tmp_path, capsys, reward, expected):
    (tmp_path / "own.py").write_text(OWN)
    assert main(["check", "toy", "custom_reward_function=null", f"rewards.case={reward}"]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("reward", [
    "{name: 'own.py:asked', reward_kwargs: {url: x}}", "{name: 'own.py:lists'}", "{name: 'own.py:columns'}",
    "{name: 'own.py:compute_score', reward_kwargs: {scale: 2.0}}",
])  # fmt: skip
def test_every_signature_is_accepted(trained, tmp_path, monkeypatch, capsys, reward):
    # What the check asks another process for is answered in this one, which has the libraries.
    monkeypatch.setattr(check_process, "_answers_of_process", lambda configs: [look(config) for config in configs])
    (tmp_path / "own.py").write_text(OWN)
    assert main(["check", "toy", "custom_reward_function=null", f"rewards.case={reward}"]) == 0, capsys.readouterr().err
