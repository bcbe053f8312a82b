"""An estimator, a loss with options and a tracker of the user's own: one file, named in YAML, nothing else touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.cli.__main__ import main

OWN = '''
import json
from pathlib import Path

import torch

from roll.algorithms.advantages import AdvantageInputs, to_tokens
from roll.algorithms.losses import PolicyLoss, PolicyLossInputs
from roll.tracking.base import Tracker
from roll.types.metrics import Metrics


def median(inputs: AdvantageInputs, *, scale: float = 1.0):
    """The reward minus the batch's median, times `scale`."""
    found = to_tokens(scale * (inputs.rewards - inputs.rewards.median()), inputs.action_mask)
    return found, found


def bent(inputs: PolicyLossInputs, *, beta: float, power: int = 2):
    """-A logp + beta |log-ratio|^power."""
    metrics = Metrics()
    metrics.update({"custom/beta": beta})
    loss = beta * inputs.log_ratio.abs() ** power - inputs.advantages * inputs.logprobs
    return PolicyLoss(torch.where(inputs.mask, loss, torch.zeros_like(loss)), metrics)


class Wall(Tracker):
    """Writes rewards on a wall."""

    def __init__(self, destination, *, folder: str, colour: str = "white"):
        self._file = Path(folder, "wall.jsonl")
        self._colour = colour

    def log(self, step, metrics):
        with self._file.open("a") as wall:
            wall.write(json.dumps({"step": step, "colour": self._colour, "score": metrics["reward/mean"]}) + "\\n")

    def finish(self, summary):
        self._file.with_suffix(".done").touch()
'''


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return "own.py"


def test_an_estimator_a_loss_with_options_and_a_tracker_train_two_steps(trained, own):
    rows = trained(
        f"adv_estimator={{name: '{own}:median', scale: 3}}",
        f"policy_loss={{name: '{own}:bent', beta: 0.25}}",
        f"track_with=[jsonl, {{name: '{own}:Wall', folder: ., colour: red}}]",
    )
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["custom/beta"] == 0.25 for row in rows)
    # Rewards are 0, 0.5 or 1: minus their median and times 3 none is above 3, and some is above 1.
    assert 1 < rows[0]["advantage/max"] <= 3
    assert rows[0]["actor/grad_norm"] > 0
    wall = [json.loads(line) for line in Path("wall.jsonl").read_text().splitlines()]
    assert [(line["step"], line["colour"]) for line in wall] == [(1, "red"), (2, "red")]
    assert [line["score"] for line in wall] == [row["reward/mean"] for row in rows]
    assert Path("wall.done").exists()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("adv_estimator={name: 'own.py:median', sclae: 3}", "adv_estimator_args.sclae: got 3"),
        ("policy_loss=own.py:bent", "policy_loss_args.beta: expected an argument of own.py:bent: it has no default"),
        ("policy_loss=own.py:bend", "did you mean 'bent'"),
        ("track_with=[{name: 'own.py:Wall', folder: ., color: red}]", "did you mean 'colour'"),
        ("track_with=[own.py:Wall]", "tracker_kwargs.own.py:Wall.folder: expected an argument of own.py:Wall"),
        ("track_with=[{name: stdout, row: 3}]", "tracker_kwargs.stdout.row: got 3, expected an option of stdout"),
        ("track_with=[tensorbord]", "did you mean 'tensorboard'"),
    ],
)
def test_what_doesnt_fit_is_said_before_anything_is_loaded(trained, own, capsys, override, expected):
    assert main(["check", "toy", override]) == 2
    assert expected in capsys.readouterr().err
