"""Countdown: solvable tasks, expressions that are read but never run, and feedback."""

from __future__ import annotations

import string
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.base import InvalidAction, ResetNeeded
from roll.envs.countdown import Countdown, evaluate


def at(numbers: tuple[int, ...], target: int, **arguments) -> Countdown:
    env = Countdown(**arguments)
    env.reset(0, {})
    env._numbers, env._target = numbers, target
    return env


@given(seed=st.integers(0, 2**63), num_numbers=st.integers(2, 6), use_all=st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_task_is_solved_by_the_solution_it_keeps(seed, num_numbers, use_all):
    env = Countdown(num_numbers=num_numbers, use_all=use_all)
    first = env.reset(seed, {})
    assert env._target not in env._numbers
    assert 10 <= env._target <= 100
    solution = env.solution(100)
    assert solution is not None
    result = env.step(solution[0])
    assert (result.reward, result.terminated, result.metrics["success"]) == (1, True, 1)
    assert env.reset(seed, {}) == first


def test_tasks_are_pinned_for_all_time():
    # A change here plays other episodes under the same seed: it would be countdown-v2.
    assert [Countdown().reset(seed, {}).text for seed in (0, 1)] == [
        "Numbers: 4, 5, 13, 17. Target: 52.",
        "Numbers: 22, 3, 15, 1. Target: 41.",
    ]


def test_wrong_tries_are_told_what_is_wrong():
    env = at((3, 5, 5, 7), 36)
    answers = {
        "5 * 7": "That makes 35, too low.",
        "5*7 + 3 = 36": "That makes 38, too high.",
        "7 / 3": "That makes 7/3, too low.",
        "5 * 9": "9 is not one of the numbers.",
        "5 + 5 + 5": "5 is used 3 times, but it is there 2 time(s).",
    }
    for action, problem in answers.items():
        result = env.step(action)
        assert not result.terminated
        assert result.observation.text == f"{problem}\nNumbers: 3, 5, 5, 7. Target: 36."
    solved = at((2, 3, 4), 14).step("2 * (3 + 4) = 14")
    assert (solved.reward, solved.terminated) == (1, True)


def test_with_use_all_no_number_may_be_left():
    env = at((2, 3, 4), 6, use_all=True)
    assert env.step("2 * 3").observation.text.startswith("4 is not used")
    assert not env.step("2 * 3").terminated
    assert at((2, 3, 4), 10, use_all=True).step("2 * 3 + 4").terminated


def test_a_valid_try_is_rewarded_once():
    env = at((2, 3, 4), 14, reward_valid=0.25, reward_solved=2.0)
    rewards = [env.step(action).reward for action in ("9 + 1", "2 + 3", "2 + 4", "2 * (3 + 4)")]
    assert rewards == [0, 0.25, 0, 2]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("7 / 2", Fraction(7, 2)),
        ("-(3 - 8)", 5),
        ("8÷4−1×2", 0),
        ("2 + 2 = 5", 4),
    ],
)
def test_expressions_have_their_value(text, value):
    assert evaluate(text)[0] == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "=", "hello", "2 ** 9", "9 // 2", "1_000 + 1", "0x10", "007", "2 +", "(1", "3(4)", "1 / 0", "1,5", "()"),
        *("2.5 + 1", "__import__('os')", "1\x00", "٣ + 1", "1 2", "1 if 2 else 3"),
        *("9" * 300, "(" * 150 + "1" + ")" * 40, "-" * 190 + "1 +"),
    ],
)
def test_what_is_no_expression_is_an_invalid_action(text):
    with pytest.raises(InvalidAction):
        evaluate(text)


@given(st.text(alphabet=string.printable + "×÷−😀\ud800", max_size=250))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_value_or_an_invalid_action(text):
    try:
        value, numbers = evaluate(text)
    except InvalidAction:
        return
    assert isinstance(value, Fraction)
    assert numbers


def test_nothing_is_played_after_the_end():
    env = at((2, 3, 4), 14)
    env.step("2 * (3 + 4)")
    assert env.solution(100) is None
    with pytest.raises(ResetNeeded):
        env.step("2 + 3")
    with pytest.raises(ResetNeeded):
        Countdown().step("2 + 3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_numbers": 1}, "num_numbers: got 1"),
        ({"min_target": 9, "max_target": 8}, "max_target: got 9 to 8"),
        ({"max_number": 0}, "max_number: got 0"),
    ],
)
def test_arguments_that_make_no_game_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Countdown(**arguments)


def test_bounds_that_leave_no_target_say_so():
    with pytest.raises(ValueError, match="no target between 5000 and 6000"):
        Countdown(num_numbers=2, max_number=3, min_target=5000, max_target=6000).reset(0, {})
