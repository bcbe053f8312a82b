"""Symptoms of a sick run: told once, in words, after they have lasted; a healthy run hears nothing."""

from __future__ import annotations

import re

import pytest

from roll.tracking.drops import last_words
from roll.tracking.health import OF_LENGTH, SYMPTOMS, Health
from roll.tracking.names import check_names

WELL = {
    "rollout/responses": 32.0,
    "rollout/failed_episodes": 0.0,
    "response/truncated_share": 0.1,
    "group/zero_signal_share": 0.4,
    "reward/mean": 0.3,
    "actor/loss": 0.1,
    "actor/loss_tokens": 900.0,
    "actor/entropy": 0.9,
    "actor/lr": 1e-5,
    "actor/grad_norm": 1.0,
    "actor/ppo_kl": 0.001,
    "actor/ratio_mean": 1.0,
    "actor/optimizer_steps": 1.0,
    "actor/skipped_steps": 0.0,
    "kl/reference": 0.01,
    "mismatch/kl": 1e-6,
}
ILL = {
    "all responses cut": {"response/truncated_share": 1.0},
    "most responses cut": {"response/truncated_share": 0.7},
    "no signal": {"group/zero_signal_share": 1.0},
    "episodes fail": {"rollout/failed_episodes": 40.0},
    "KL runs away": {"kl/reference": 1.5},
    "update too large": {"actor/ratio_mean": 3.0},
    "entropy collapses": {"actor/entropy": 0.01},
    "learning rate 0": {"actor/lr": 0.0},
    "no gradient": {"actor/grad_norm": 0.0},
    "steps skipped": {"actor/skipped_steps": 1.0},
    "mismatch grows": {"mismatch/kl": 0.1},
    "rewards too hard to check": {"reward/math/too_hard": 20.0},
}


def test_the_table_has_an_illness_for_each_symptom():
    assert [symptom.name for symptom in SYMPTOMS] == list(ILL)
    check_names({name: 0.0 for values in ILL.values() for name in values} | WELL)


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.name)
def test_a_symptom_is_told_once_when_it_has_lasted_and_again_at_the_end(symptom):
    health, said = Health(), []
    for step in range(1, 7):
        said += health.look(step, WELL)
    for step in range(7, 20):
        said += health.look(step, WELL | ILL[symptom.name])
    (words,) = said
    assert words.startswith(f"step {6 + symptom.steps}: ")
    assert "nan" not in words
    assert not re.search(r"[{}]", words)
    assert health.messages() == [
        f"from step {6 + symptom.steps}: {words.split(': ', 1)[1].removeprefix(f'for {symptom.steps} steps ')}"
    ]


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.name)
def test_one_bad_step_in_between_is_noise(symptom):
    health = Health()
    for step in range(1, 40):
        row = WELL | ILL[symptom.name] if step % symptom.steps == 0 and symptom.steps > 1 else WELL
        assert health.look(step, row) == []


def test_a_run_that_starts_with_low_entropy_or_few_tokens_is_not_told_that_it_collapsed():
    low, few = Health(), Health()
    for step in range(1, 20):
        assert low.look(step, WELL | {"actor/entropy": 0.01}) == []
        assert few.look(step, WELL | {"actor/entropy": 0.9 if step < 6 else 0.0, "actor/loss_tokens": 5.0}) == []


@pytest.mark.parametrize("well", [1, 2, 4])
def test_a_collapse_within_the_first_steps_is_told(well):
    health = Health()
    said = [
        words for step in range(1, 12) for words in health.look(step, WELL | _entropy(0.9 if step <= well else 0.001))
    ]
    (words,) = said
    assert words.startswith(f"step {well + 3}: for 3 steps the entropy has fallen to 0.001")


def _entropy(nats):
    return {"actor/entropy": nats}


def test_a_response_that_is_one_token_by_its_definition_is_not_said_to_be_cut():
    health = Health(without=OF_LENGTH)
    for step in range(1, 20):
        assert health.look(step, WELL | {"response/truncated_share": 1.0}) == []


def test_fine_tuning_and_rows_of_validation_have_none_of_it():
    health = Health()
    for step in range(1, 9):
        assert health.look(step, {"val/accuracy": 0.0}) == []
        assert health.look(step, {"actor/loss": 1.0, "actor/lr": 1e-4, "actor/grad_norm": 2.0}) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("", ""),
        ("timed out after 3 s", "timed out after 3 s"),
        (
            'Traceback (most recent call last):\n  File "/a/mine.py", line 3, in score\n    helper()\n'
            "  File \"/a/help.py\", line 9, in helper\n    return table[key]\nKeyError: 'x'\nprinted: hello",
            "KeyError: 'x' (/a/help.py, line 9)",
        ),
    ],
)
def test_the_last_words_of_an_error_are_its_exception_with_the_place(error, words):
    assert last_words(error) == words
