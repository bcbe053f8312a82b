"""`choice`: which letter a response settles on."""

from __future__ import annotations

import pytest

from roll.rewards.choice import choice, stated_letter
from roll.types.episode import Task

STATED = {
    "B": "B", "(B)": "B", "B.": "B", "**B**": "B", "B) Paris": "B", "B. Paris": "B", r"\boxed{B}": "B",
    r"\boxed{\text{B}}": "B", r"$\boxed{(B)}$ I think": "B", r"\boxed{B. Paris}": "B", "The answer is B": "B",
    "The answer is (B).": "B", "The correct answer is: **B**": "B", "Answer: B": "B", "**Answer:** B": "B",
    "answer is option B, Paris": "B", "I choose B.": "B", "So it must be (C), not (B).": "C",
    "It is (A). No, wait, it is (C).": "C", "The answer is A. Sorry, the answer is D.": "D",
    "It's (C), not (B)": "C", "(A) is wrong, (B) is incorrect, so (C)": "C", "not (B)": None,
    "The answer is not (B)": None, "The answer isn't B, it's C": "C", "I rule out (A) and choose (D)": "D",
    "I'd go with B rather than (A)": "B", "The answer is B because (A) isn't a city": "B",
    "A dog is a friend": None, "I am here": None, "": None, "The answer is Because": None, "answer is ABC": None,
    r"(A) or (B)? \boxed{C}": "C", r"\boxed{B} no, \boxed{A}": "A", r"The answer is B \boxed{": None,
    r"\boxed{42} the answer is B": None, "b": None, "Option A has merit.\n\nD": "D", 
    "C is wrong. The answer is A.": "A",
    "Answer: (B) is not right. Answer: (A)": "A", "We pick $\\mathrm{C}$.": "C",
}  # fmt: skip


@pytest.mark.parametrize(("text", "letter"), STATED.items())
def test_the_letter_that_a_response_settles_on(text: str, letter: str | None):
    assert stated_letter(text, "ABCD") == letter


def task(truth: object) -> Task:
    return Task(id="t:1", source="t", payload={"ground_truth": truth}, seed=0, tag="t", domain="d")


@pytest.mark.parametrize("truth", ["B", " (B) ", "B.", "B. Paris", "(B) Paris", "[B]", 1])
def test_a_truth_is_a_letter_its_text_or_its_number(truth: object):
    assert choice("The answer is B", task(truth)).parts == {"correct": 1.0, "answered": 1.0}
    assert choice("The answer is C", task(truth)).parts == {"correct": 0.0, "answered": 1.0}
    assert choice("", task(truth)).parts == {"correct": 0.0, "answered": 0.0}


@pytest.mark.parametrize("truth", ["Paris", "Z", 17, True, 1.5, "", "Because"])
def test_a_truth_that_is_no_choice_is_an_error(truth: object):
    with pytest.raises(ValueError, match=r"task 't:1'.*is no choice"):
        choice("B", task(truth))


def test_thinking_states_nothing_and_a_box_can_be_required():
    assert choice("<think>The answer is A</think> The answer is B", task("B")).value == 1.0
    assert choice("<think>The answer is B", task("B")).value == 0.0
    assert choice("The answer is B", task("B"), require_boxed=True).value == 0.0


def test_a_hostile_response_is_quick():
    for text in (
        "answer is " * 100_000,
        "(B) " * 100_000,
        "*" * 100_000,
        "not " * 100_000 + "(B)",
        "\\boxed{" * 50_000,
    ):
        choice(text, task("B"))
