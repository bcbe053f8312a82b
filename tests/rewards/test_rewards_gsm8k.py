"""`gsm8k`: the number after `####`."""

from __future__ import annotations

import time

import pytest

from roll.rewards.gsm8k import gsm8k
from roll.types.trajectory import Task


def task(truth: object) -> Task:
    return Task(id="t:1", source="t", payload={"ground_truth": truth}, seed=0, tag="t", domain="gsm8k")


# response, truth, then correct and answered: strict, flexible
TABLE = [
    ("48 + 24 = 72\n#### 72", "72", (1, 1), (1, 1)),
    ("#### 72", "so 48/2 = 24\n#### 72", (1, 1), (1, 1)),
    ("#### 1,250", 1250, (1, 1), (1, 1)),
    ("#### 1250", "1,250", (1, 1), (1, 1)),
    ("#### $72.00", 72.0, (1, 1), (1, 1)),
    ("#### -$5", "-5", (1, 1), (1, 1)),
    ("#### −5", "-5", (1, 1), (1, 1)),
    ("#### 72 clips.", "72", (1, 1), (1, 1)),
    ("#### **72**", "72", (1, 1), (1, 1)),
    ("#### 72\n\nQuestion: what else?", "72", (1, 1), (1, 1)),
    ("####72", "72", (1, 1), (1, 1)),
    ("#### 71", "72", (0, 1), (0, 1)),
    ("#### 72\n#### 71", "72", (0, 1), (0, 1)),
    ("#### 7.2", "72", (0, 1), (0, 1)),
    ("#### 72 + 1", "72", (0, 0), (0, 1)),
    ("#### 144/2", "144", (0, 0), (0, 1)),
    ("#### seventy-two", "72", (0, 0), (0, 0)),
    ("72", "72", (0, 0), (1, 1)),
    ("The total is $72.", "72", (0, 0), (1, 1)),
    ("she has 80-8 = 72 of 100", "72", (0, 0), (0, 1)),
    ("#### 72 of 100", "72", (0, 0), (0, 1)),
    ("80-8", "8", (0, 0), (1, 1)),
    ("-8", "8", (0, 0), (0, 1)),
    ("", "72", (0, 0), (0, 0)),
    ("####", "72", (0, 0), (0, 0)),
    ("#### " + "7" * 5000, "72", (0, 0), (0, 0)),
]


@pytest.mark.parametrize(("response", "truth", "strict", "flexible"), TABLE)
def test_correct_and_answered_in_both_modes(
    response: str, truth: object, strict: tuple[int, int], flexible: tuple[int, int]
) -> None:
    for mode, expected in (("strict", strict), ("flexible", flexible)):
        reward = gsm8k(response, task(truth), mode=mode)  # type: ignore[arg-type]
        assert (reward.parts["correct"], reward.parts["answered"]) == expected, mode
        assert reward.value == expected[0]


@pytest.mark.parametrize("truth", ["", "many", "####", "1 or 2", None, True, float("nan"), [72]])
def test_a_ground_truth_that_is_no_number_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="t:1"):
        gsm8k("#### 72", task(truth))


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="strict or flexible"):
        gsm8k("#### 72", task("72"), mode="loose")  # type: ignore[arg-type]


@pytest.mark.parametrize("filler", ["7", "####", "-", "1,", "$", " ", "\n", "\t", "#### \t"])
def test_ten_megabytes_are_scored_in_bounded_time(filler: str) -> None:
    started = time.monotonic()
    gsm8k(filler * (10_000_000 // len(filler)), task("72"), mode="flexible")
    assert time.monotonic() - started < 2.0
