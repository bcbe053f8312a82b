"""The rewards that look at a response's text alone: exact, regex, format, length, repetition."""

from __future__ import annotations

import math
from datetime import date, datetime, time
from typing import Any

import pytest

from roll.rewards.base import RewardRequest, RewardSpec
from roll.rewards.exact import exact
from roll.rewards.format import format as form
from roll.rewards.format import regex
from roll.rewards.gsm8k import gsm8k
from roll.rewards.length import length
from roll.rewards.repetition import repetition
from roll.rewards.reward_pool import RewardPool
from roll.types.trajectory import Task


def task(truth: object = "Paris") -> Task:
    return Task(id="t:1", source="t", payload={"ground_truth": truth}, seed=0, tag="t", domain="d")


@pytest.mark.parametrize(
    ("response", "truth", "kwargs", "value"),
    [
        ("Paris", "Paris", {}, 1.0),
        ("  Paris\n", "Paris", {}, 1.0),
        ("New  York", "New York", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("Paris!", "Paris", {}, 0.0),
        ("Paris!", "Paris", {"ignore_punctuation": True}, 1.0),
        ("Rome", ["Paris", "Rome"], {}, 1.0),
        ("43", 43.0, {}, 1.0),
        ("It is\nParis", "Paris", {"extract": "last_line"}, 1.0),
        ("Paris\nyes", "Paris", {"extract": "first_line"}, 1.0),
        ("So.\n**Answer:** Paris\nBye", "Paris", {"extract": "after_answer"}, 1.0),
        ("So.\n**Answer**: Paris\nBye", "Paris", {"extract": "after_answer"}, 1.0),
        (
            "\u0130\u0130\u0130\u0130 answer: Paris",
            "Paris",
            {"extract": "after_answer"},
            1.0,
        ),  # longer in small letters
        ("Paris", "Paris", {"extract": "after_answer"}, 0.0),
        ("x <answer>Rome</answer> <answer> Paris </answer>", "Paris", {"extract": "tags"}, 1.0),
        ("<answer>Paris", "Paris", {"extract": "tags"}, 0.0),
        (r"It is \boxed{Paris}.", "Paris", {"extract": "boxed"}, 1.0),
        ("<think>hm</think>Paris", "Paris", {}, 1.0),
        ("e\u0301", "\u00e9", {}, 1.0),
        ("", "Paris", {}, 0.0),
    ],
)
def test_exact(response: str, truth: object, kwargs: dict[str, Any], value: float):
    assert exact(response, task(truth), **kwargs).value == value


OF_OTHER_VALUE = [
    ("5", "-5"), ("15", "1.5"), ("12", "1/2"), ("1e-5", "1e5"), ("1,5", "15"), ("3:2", "32"), ("a-b", "ab"),
    ("a-b", "a b"), ("12:30", "1230"), (".5", "5"), ("5", "5%"), ("50%", "50"), ("<5", ">5"), ("< 5", "> 5"),
    ("5(2)", "52"), ("2(3)(4)", "234"), ("3-4", "34"), ("3-4", "3 4"), ("C++", "C"), ("C#", "C"), ("x=5", "x5"),
    ("x^2", "x2"), ("2**3", "23"), ("2*3", "23"), ("R&D", "RD"), ("km/h", "kmh"), ("5 - 3", "5 3"), ("-x", "x"),
    ("$-5", "5"), ("-$5", "5"), ("−5", "5"), ("1.2.3", "123"), ("2024-01-02", "20240102"), ("(-5, 3)", "(5, 3)"),
    ("[-1,2]", "[1,2]"), ("1:30", "1.30"), ("1/2", "1:2"), ("3.14", "314"), ("-0.5", "0.5"), ("x - y", "x y"),
    ("10^-3", "10^3"), ("10^{-3}", "10^{3}"), ("a_b", "ab"), ("1 2", "12"), ("1, 2", "12"), ("5'11", "511"),
    ("(1)(2)", "12"), ("2x+1", "2x1"),
]  # fmt: skip
OF_OTHER_PUNCTUATION = [
    ("Paris!", "Paris"), ("1,234", "1234"), ("1,234.5", "1234.5"), ("$5", "5"), ("$5$", "5"), ("-$5", "-5"),
    ("$-5$", "-5"), ("−5", "-5"), ("“Paris”", "Paris"), ('"Paris"', "Paris"), ("U.S.A.", "USA"), ("U.S.", "US"),
    ("don't", "dont"), ("don’t", "don't"), ("well-known", "well known"), ("**Paris**", "Paris"),
    ("Paris, France", "Paris France"), ("5.", "5"), ("1.5.", "1.5"), ("1 / 2", "1/2"), ("3 : 2", "3:2"),
    ("- Paris", "Paris"), ("- 5", "5"), ("Answer: 5", "Answer 5"), ("(B)", "B"), ("`x`", "x"), ("_Paris_", "Paris"),
    ("x = 5", "x=5"), ("50 %", "50%"), ("3–4", "3-4"), ("1e+5", "1e5"), ("Hello,world", "Hello world"),
    ("COVID-19", "COVID 19"), ("5 - 3", "5-3"), ("Paris - France", "Paris France"), ("¿Qué?", "Qué"), ("e.g.", "eg"),
    ("[1, 2]", "(1, 2)"), ("# Paris", "Paris"), ("St. Louis", "St Louis"), ("O'Brien", "OBrien"),
    ("rock & roll", "rock&roll"), ("(-5)", "-5"), ("12,345,678", "12345678"), ("< 5", "<5"),
    ('He said: "no".', "He said no"), ("5?", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), OF_OTHER_VALUE)
def test_without_punctuation_another_value_is_still_another(one: str, other: str):
    assert exact(one, task(other), ignore_punctuation=True).value == 0.0
    assert exact(other, task(one), ignore_punctuation=True).value == 0.0
    assert exact(one, task(one), ignore_punctuation=True).value == 1.0


@pytest.mark.parametrize(("one", "other"), OF_OTHER_PUNCTUATION)
def test_without_punctuation_the_same_words_are_equal(one: str, other: str):
    assert exact(one, task(other), ignore_punctuation=True).value == 1.0
    assert exact(other, task(one), ignore_punctuation=True).value == 1.0


def test_punctuation_is_left_out_in_linear_time():
    for text in ("-" * 200_000, "1," * 100_000, "a." * 100_000, "- " * 100_000, "$" * 200_000, "*" * 200_000):
        exact(text, task("x"), ignore_punctuation=True)


@pytest.mark.parametrize(
    ("truth", "responses", "wrong"),
    [
        (datetime(2024, 1, 2), ["2024-01-02", "2024-01-02 00:00:00", "2024-01-02T00:00:00"], "2024-01-03"),
        (datetime(2024, 1, 2, 3, 4), ["2024-01-02 03:04:00", "2024-01-02 03:04", "2024-01-02T03:04"], "2024-01-02"),
        (date(2024, 1, 2), ["2024-01-02"], "2024-01-03"),
        (time(3, 4), ["03:04", "03:04:00"], "03:05"),
        (True, ["True", "true", "TRUE"], "False"),
        (False, ["False", "false"], "true"),
        (43.0, ["43", "43.0"], "44"),
        ([True, "yes"], ["true", "yes"], "no"),
    ],
)
def test_a_value_is_accepted_as_it_is_usually_written(truth: Any, responses: list[str], wrong: str):
    assert [exact(response, task(truth)).value for response in responses] == [1.0] * len(responses)
    assert exact(wrong, task(truth)).value == 0.0


@pytest.mark.parametrize("truth", [{"text": "Paris"}, ["Paris", None], [["Paris"]], b"Paris"])
def test_a_truth_that_no_text_equals_is_an_error(truth: Any):
    with pytest.raises(ValueError, match="expected a text, a number, a date, or a list of them"):
        exact("Paris", task(truth))


def test_a_truth_of_punctuation_alone_is_an_error_where_that_is_left_out():
    assert exact("?!", task("?!")).value == 1.0
    with pytest.raises(ValueError, match="nothing is left of the ground truth '\\?!' without punctuation"):
        exact("?!", task("?!"), ignore_punctuation=True)


def test_regex_finds_a_pattern_or_compares_its_answer():
    assert regex("on 2024-01-31", task(), pattern=r"\d{4}-\d\d-\d\d").value == 1.0
    assert regex("on 2024-01-31", task(), pattern=r"\d{4}-\d\d-\d\d", whole=True).value == 0.0
    city = r"city: (?P<answer>\w+)"
    assert regex("city: Rome, city: Paris", task(), pattern=city).value == 1.0
    assert regex("city: Rome", task(), pattern=city).parts == {"correct": 0.0, "answered": 1.0}
    assert regex("Paris", task(), pattern=city).parts == {"correct": 0.0, "answered": 0.0}
    assert regex("CITY: PARIS", task(), pattern=city, ignore_case=True).value == 1.0


def test_a_catastrophic_pattern_on_a_hostile_response_is_a_status_and_the_next_one_is_scored():
    spec = RewardSpec(name="regex", kwargs={"pattern": r"(a|aa)+$", "search_timeout_s": 0.2})
    requests = [
        RewardRequest(id=str(i), domain="d", response=r, task=task()) for i, r in enumerate(["a" * 60 + "b", "aa"])
    ]
    with RewardPool({"d": spec}, num_processes=1, timeout_s=60, retries=0) as pool:
        slow, good = pool.score(requests)
    assert (slow.status, slow.reward) == ("error", None)
    assert "took longer than 0.2 s" in slow.error
    assert good.reward is not None
    assert good.reward.value == 1.0


@pytest.mark.parametrize(
    ("response", "kwargs", "value"),
    [
        ("<think>a</think><answer>b</answer>", {}, 1.0),
        ("<think>\na\n</think>\n<answer>b</answer>\n", {}, 1.0),
        ("<think>a</think>b", {}, 0.0),
        ("<think></think><answer>b</answer>", {}, 0.0),
        ("x<think>a</think><answer>b</answer>", {}, 0.0),
        ("<think>a</think><answer>b</answer>x", {}, 0.0),
        ("<answer>b</answer><think>a</think>", {}, 0.0),
        ("<think>a<think></think><answer>b</answer>", {}, 0.0),
        ("<think>a<answer>b</think></answer>", {}, 0.0),
        ("a</think><answer>b</answer>", {"opened": True}, 1.0),
        ("<think>a</think> b", {"template": "think"}, 1.0),
        ("<think>a</think> ", {"template": "think"}, 0.0),
        ("<plan>a</plan><do>b</do>", {"tags": ["plan", "do"]}, 1.0),
        ("Answer: 3", {"pattern": r"Answer: \d+"}, 1.0),
        ("An Answer: 3", {"pattern": r"Answer: \d+"}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_format(response: str, kwargs: dict[str, Any], value: float):
    assert form(response, task(), **kwargs).value == value


def words(n: int) -> str:
    return "word " * n


@pytest.mark.parametrize(
    ("n", "kwargs", "value"),
    [
        (10, {"target": 10}, 1.0),
        (15, {"target": 10}, 0.5),  # 5 of 10 too many
        (12, {"target": 10, "tolerance": 2}, 1.0),
        (40, {"target": 10}, 0.0),
        (80, {"mode": "overlong", "maximum": 100, "buffer": 20}, 0.0),
        (90, {"mode": "overlong", "maximum": 100, "buffer": 20}, -0.5),
        (100, {"mode": "overlong", "maximum": 100, "buffer": 20}, -1.0),
        (300, {"mode": "overlong", "maximum": 100, "buffer": 20}, -1.0),
        (5, {"mode": "overlong", "maximum": 100, "finish_reason": "length"}, -1.0),
        (0, {"mode": "cosine", "maximum": 100, "start": 2.0, "end": 1.0}, 2.0),
        (50, {"mode": "cosine", "maximum": 100, "start": 2.0, "end": 1.0}, 1.5),
        (500, {"mode": "cosine", "maximum": 100, "start": 2.0, "end": 1.0}, 1.0),
    ],
)
def test_length(n: int, kwargs: dict[str, Any], value: float):
    reward = length(words(n), task(), **kwargs)
    assert math.isclose(reward.value, value, abs_tol=1e-12)
    assert reward.parts == {"length": float(n)}


def test_length_in_characters():
    assert length("abcd", task(), target=4, unit="characters").value == 1.0


def test_repetition_is_the_share_of_ngrams_that_occurred_before():
    # "a b a b a": trigrams aba, bab, aba; one of three is a repeat.
    assert math.isclose(repetition("a b A b a", task()).value, -1 / 3)
    assert repetition("a b c d", task()).value == 0.0
    assert repetition("a b", task()).value == 0.0
    assert math.isclose(repetition("a b c", task(), n=1, max_penalty=-2.0).value, 0.0)
    assert math.isclose(repetition("啊啊啊啊", task(), n=2, unit="characters", max_penalty=-3.0).value, -2.0)


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (exact, {"extract": "all"}, "extract is one of"),
    (regex, {"pattern": "("}, "is no regular expression"),
    (regex, {"pattern": ""}, "isn't empty"),
    (form, {"template": "thinking"}, "template is one of think_answer"),
    (form, {"tags": []}, "tags are names"),
    (length, {}, "target must be at least 1"),
    (length, {"mode": "overlong", "maximum": 5, "buffer": 5}, "buffer < maximum"),
    (length, {"mode": "cosine"}, "needs a maximum"),
    (length, {"mode": "short"}, "mode is target, overlong or cosine"),
    (length, {"target": 3, "unit": "tokens"}, "unit is words or characters"),
    (repetition, {"n": 0}, "n is at least 1"),
    (repetition, {"max_penalty": 1.0}, "max_penalty at most 0"),
]


@pytest.mark.parametrize(("function", "kwargs", "message"), MISTAKES)
def test_a_mistake_in_the_options_says_what_is_wrong(function: Any, kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        function("text", task(), **kwargs)


def test_gsm8k_gives_its_weight_for_the_format_to_wrong_answers_only():
    assert gsm8k("#### 71", task("72"), format_weight=0.1).value == 0.1
    assert gsm8k("#### 72", task("72"), format_weight=0.1).value == 1.0
    assert gsm8k("71", task("72"), format_weight=0.1).value == 0.0
    assert gsm8k("#### 71", task("72")).value == 0.0
