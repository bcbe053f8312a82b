"""`math_rule` on pairs of answers, and on responses, whose value is known by construction."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from answer_pairs import answer_pairs
from answer_pairs_form import AnswerPair
from answer_pairs_responses import KINDS as RESPONSES
from answer_pairs_responses import ResponsePair

from roll.rewards.math_rule import math_rule
from roll.types.trajectory import Task

PAIRS = answer_pairs()
BY_KIND = {kind: [pair for pair in PAIRS if pair.kind == kind] for kind in dict.fromkeys(pair.kind for pair in PAIRS)}


@cache
def is_paid(response: str, gold: str) -> bool:
    """Whether the response scores 1; a gold that is refused pays nobody."""
    task = Task(id="t:1", source="t", payload={"ground_truth": gold}, seed=0, tag="t", domain="math")
    try:
        return math_rule(response, task).value == 1.0
    except ValueError:
        return False


def is_right(pair: AnswerPair) -> bool:
    return is_paid(rf"\boxed{{{pair.answer}}}", pair.gold) == pair.equal


def listed(pairs: list[AnswerPair]) -> str:
    return "".join(f"\n  {pair.gold!r} / {pair.answer!r} {'is' if pair.equal else 'is not'} equal" for pair in pairs)


def test_every_kind_has_enough_pairs_of_both_sorts_and_none_twice():
    assert len(PAIRS) >= 750
    for kind, pairs in BY_KIND.items():
        equal = sum(pair.equal for pair in pairs)
        assert len(pairs) >= 24, kind
        assert 0.35 <= equal / len(pairs) <= 0.65, (kind, equal, len(pairs))
        assert all(pair.gold != pair.answer for pair in pairs), kind
    repeated = [pair for pair, times in Counter((pair.gold, pair.answer) for pair in PAIRS).items() if times > 1]
    assert repeated == []


@pytest.mark.parametrize("kind", BY_KIND)
def test_no_unequal_answer_is_paid_and_nine_of_ten_pairs_are_right(kind: str):
    pairs = BY_KIND[kind]
    wrong = [pair for pair in pairs if not is_right(pair)]
    assert not [pair for pair in wrong if not pair.equal], f"paid:{listed([pair for pair in wrong if not pair.equal])}"
    assert len(wrong) <= 0.1 * len(pairs), f"{len(wrong)} of {len(pairs)}:{listed(wrong)}"


def test_of_all_pairs_97_in_a_hundred_are_right():
    wrong = [pair for pair in PAIRS if not is_right(pair)]
    assert len(wrong) <= 0.03 * len(PAIRS), f"{len(wrong)} of {len(PAIRS)}:{listed(wrong)}"


@pytest.mark.parametrize("kind", BY_KIND)
def test_the_same_holds_when_gold_and_answer_are_swapped(kind: str):
    swapped = [AnswerPair(kind, pair.answer, pair.gold, pair.equal) for pair in BY_KIND[kind]]
    wrong = [pair for pair in swapped if not is_right(pair)]
    assert not [pair for pair in wrong if not pair.equal], f"paid:{listed([pair for pair in wrong if not pair.equal])}"
    assert len(wrong) <= 0.1 * len(swapped), f"{len(wrong)} of {len(swapped)}:{listed(wrong)}"


@pytest.mark.parametrize("kind", RESPONSES)
def test_the_answer_of_a_whole_response_is_the_one_that_is_scored(kind: str):
    def misjudged(pair: ResponsePair) -> bool:
        response, gold, right = pair
        return is_paid(response, gold) != right

    wrong = [pair for pair in RESPONSES[kind] if misjudged(pair)]
    assert not [pair for pair in wrong if not pair[2]], f"paid: {wrong}"
    assert len(wrong) <= 0.1 * len(RESPONSES[kind]), wrong
