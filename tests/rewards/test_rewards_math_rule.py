"""`math_rule`: a table of right, wrong and hostile answers."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from roll.rewards.math_rule import math_rule
from roll.rewards.maths.comparison import read, same
from roll.types.trajectory import Task


def task(truth: object) -> Task:
    return Task(id="t:1", source="t", payload={"ground_truth": truth}, seed=0, tag="t", domain="math")


RIGHT = [
    # where the answer is
    (r"\boxed{72}", "72"),
    (r"So it is \boxed{72}. I hope this helps with question 3!", "72"),
    (r"First \boxed{1}, but no: \boxed{72}", "72"),
    (r"\boxed{\boxed{72}}", "72"),
    (r"\boxed {72}", "72"),
    (r"$$\boxed{\frac{1}{\sqrt{2}}}$$", r"\frac{\sqrt{2}}{2}"),
    (r"\fbox{72}", "72"),
    (r"\boxed{f = \left\{ 1 \right.}", r"f=\left\{1\right."),
    (r"\boxed{72 apples and pears}", "72"),
    ("<think>it is \\boxed{3}</think> The answer is 72.", "72"),
    ("it could be 3</think>\\boxed{72}", "72"),
    ("The answer is 72.", "72"),
    ("The answer is: **72**", "72"),
    ("Final answer: $72$.", "72"),
    ("**Answer:** 72 because 70 + 2 is that", "72"),
    ("Answer:\n\n\\[ \\frac{1}{2} \\]", "0.5"),
    ("The answer is 70 + 2 = 72.", "72"),
    ("The answer is not obvious at first sight here.\nSo we get 72", "72"),
    ("We add 70 and 2 and get 72", "72"),
    ("we get 5\nx = 72", "72"),
    ("72", "72"),
    ("#### 72", "72"),
    ("Yes", "Yes"),
    ("The answer is **yes**.", "Yes"),
    # how it is written
    (r"\boxed{72.0}", "72"),
    (r"\boxed{72}", 72),
    (r"\boxed{72}", 72.0),
    (r"\boxed{72 \text{ dollars}}", "72"),
    (r"\boxed{72\text{ cm}^2}", "72"),
    (r"\boxed{72 dollars}", "72"),
    ("The answer is 72 apples and pears.", "72"),
    (r"\boxed{\$1,250}", "1250"),
    (r"\boxed{1{,}250}", "1,250"),
    (r"\boxed{1,\!250}", "1250"),
    ("The answer is $1,250 per month.", "1250"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{0.5}", r"50\%"),
    (r"\boxed{50 percent}", r"50\%"),
    (r"\boxed{−5}", "-5"),
    (r"\boxed{７２}", "72"),
    (r"\boxed{½}", "0.5"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{90°}", "90"),
    (r"\boxed{1/2}", r"\frac12"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{-\frac{1}{2}}", r"\frac{-1}{2}"),
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{0.333333}", r"\frac{1}{3}"),
    (r"\boxed{1e3}", "1000"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{1.5\times 10^3}", "1500"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{n!(n-1)!}", r"(n-1)! \cdot n!"),
    (r"\boxed{k\neq 1}", r"k \neq 1"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{\{2,1\}}", r"\{1, 2\}"),
    (r"\boxed{\left(1, 2\right)}", "(1,2)"),
    (r"\boxed{(1,2,3)}", "(1, 2, 3)"),
    (r"\boxed{3,1,2}", "1, 2, 3"),
    (r"\boxed{\pm 2}", "2, -2"),
    (r"\boxed{\text{Yes}}", "yes"),
    (r"\boxed{\textbf{No.}}", "No"),
    (r"\boxed{\infty}", r"+\infty"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{5}", r"\boxed{5}"),
    (r"\boxed{5}", "$5$"),
]


@pytest.mark.parametrize(("response", "truth"), RIGHT)
def test_a_right_answer_scores_one(response: str, truth: object) -> None:
    reward = math_rule(response, task(truth))
    assert (reward.value, reward.parts["correct"], reward.parts["answered"]) == (1.0, 1.0, 1.0)


WRONG = [
    (r"\boxed{71}", "72"),
    (r"\boxed{72}, or rather \boxed{71}", "72"),
    (r"\boxed{71,72}", "72"),
    (r"\boxed{71 or 72}", "72"),
    ("The answer is 71 or 72.", "72"),
    (r"\boxed{0.33}", r"\frac{1}{3}"),
    (r"\boxed{5x}", "5"),
    (r"\boxed{5 pi}", "5"),
    (r"\boxed{5 sqrt of two}", "5"),
    (r"\boxed{5\pi}", "5"),
    (r"\boxed{50\%}", r"0.5\%"),
    (r"\boxed{1,2}", "12"),
    (r"\boxed{1, 250}", "1250"),
    (r"\boxed{1 2}", "12"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{[1,2]}", "(1,2)"),
    (r"\boxed{sYe}", "Yes"),
    (r"\boxed{No}", "Yes"),
    (r"\boxed{Yes or No}", "Yes"),
    (r"\boxed{-\infty}", r"\infty"),
    (r"\boxed{1/0}", "0"),
    (r"\boxed{x}", "y"),
    ("The answer is -72", "72"),
    (r"\boxed{(x+y+z+w)^{300}}", "72"),
]


@pytest.mark.parametrize(("response", "truth"), WRONG)
def test_a_wrong_answer_scores_zero(response: str, truth: object) -> None:
    reward = math_rule(response, task(truth))
    assert (reward.value, reward.parts["correct"], reward.parts["answered"]) == (0.0, 0.0, 1.0)


UNANSWERED = [
    "",
    "   \n\n",
    r"so it is \boxed{72",
    r"\boxed{72} and then \boxed{7",
    "<think>it is 72",
    "a</think>72<think>hmm",
    r"\boxed{\frac{7}{2}",
    "\\boxed{" + "7" * 2000 + "}",
    "\\boxed{" + "(" * 200 + "7" + ")" * 200 + "}",
    r"\boxed{9^{9^{9}}}",
    r"\boxed{9^9^9}",
    r"\boxed{100000000!}",
    r"\boxed{((9!)!)!}",
    r"\boxed{(9999+1)!}",
    r"\boxed{2^{100000000}}",
]


@pytest.mark.parametrize("response", UNANSWERED)
def test_no_readable_answer_is_counted_and_scores_zero(response: str) -> None:
    reward = math_rule(response, task("72"))
    assert (reward.value, reward.parts["correct"], reward.parts["answered"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "filler", ["x", "{", "$", r"\boxed{", "(", "answer is ", "9^", "####", r"\frac{", "<think>", " ", "\n", "1,"]
)
def test_ten_megabytes_of_anything_are_scored_in_bounded_time(filler: str) -> None:
    started = time.monotonic()
    response = filler * (10_000_000 // len(filler))
    math_rule(response, task("72"))
    assert math_rule(response + r" </think>\boxed{72}", task("72")).value == 1.0
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("truth", ["", "  ", None, True, float("nan"), [1], "{1", r"\frac{1}{2", "1}", "9" * 2000])
def test_a_malformed_ground_truth_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="t:1"):
        math_rule(r"\boxed{72}", task(truth))


def test_the_gold_answer_is_right_even_when_no_parser_could_evaluate_it() -> None:
    assert math_rule(r"\boxed{9^{9^{9}}}", task("9^{9^{9}}")).value == 1.0


def test_format_counts_a_closed_box_outside_of_the_thinking() -> None:
    assert math_rule(r"\boxed{1}", task("72"), format_weight=0.1).value == pytest.approx(0.1)
    assert math_rule(r"\boxed{72}", task("72"), format_weight=0.1).value == pytest.approx(1.1)
    assert math_rule("72", task("72"), format_weight=0.1).parts["format"] == 0.0


def test_think_required_wants_the_thinking_to_end() -> None:
    assert math_rule(r"\boxed{72}", task("72"), think="required").parts["answered"] == 0.0
    assert math_rule(r"hm</think>\boxed{72}", task("72"), think="required").value == 1.0
    assert math_rule(r"<think>\boxed{72}", task("72"), think="ignore").value == 1.0
    with pytest.raises(ValueError, match="think"):
        math_rule("", task("72"), think="maybe")  # type: ignore[arg-type]


def test_require_boxed_ignores_plain_answers() -> None:
    assert math_rule("The answer is 72", task("72"), require_boxed=True).parts["answered"] == 0.0
    assert math_rule(r"\boxed{72}", task("72"), require_boxed=True).value == 1.0


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("0", "6.63e-34", False),
        ("0.0", "0.0000001", False),
        ("6.6e-34", "6.63e-34", False),
        ("6.63e-34", "6.63e-34", True),
        ("6.630e-34", "6.63e-34", True),
        ("0.0000001", "0", True),
        ("0.333333", "1/3", True),
    ],
)
def test_a_tiny_number_is_not_nothing(answer: str, gold: str, right: bool) -> None:
    assert same(answer, gold).equal is right


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        # Three equal digits repeat, or a block that stands there twice; fewer say nothing about the rest.
        (r"0.333\ldots", Fraction(1, 3)),
        (r"0.1666\ldots", Fraction(1, 6)),
        (r"0.1212\ldots", Fraction(4, 33)),
        (r"0.33\ldots", None),
        (r"0.142142\ldots", None),
    ],
)
def test_dots_repeat_what_has_shown_that_it_repeats(answer: str, value: Fraction | None) -> None:
    node = read(answer).node
    assert (node.value[0] if node is not None and node.value else node) == value
