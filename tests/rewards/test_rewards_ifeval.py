"""IFEval's constraint families against responses written by hand, and its 541 prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ifeval_cases import CASES, ENGLISH

from roll.rewards.base import Reward
from roll.rewards.ifeval import constraints, ifeval
from roll.rewards.ifeval_checks import CHECKS
from roll.rewards.ifeval_text import sentences
from roll.types.trajectory import Task

pytest.importorskip("langdetect", reason="langdetect isn't installed")


def task(*named: tuple[str, dict[str, Any]], **columns: Any) -> Task:
    payload = {"instruction_id_list": [name for name, _ in named], "kwargs": [kwargs for _, kwargs in named], **columns}
    return Task(id="t:1", source="t", payload=payload, seed=0, tag="t", domain="d")


def score(response: str, given: Task, **kwargs: Any) -> Reward:
    return ifeval(response, given, **kwargs)


def test_the_table_covers_every_family_both_ways_with_at_least_two_hundred_responses():
    assert {name for name, *_ in CASES} == set(CHECKS)
    assert all(kept and broken for *_, kept, broken in CASES)
    assert sum(len(kept) + len(broken) for *_, kept, broken in CASES) >= 200


@pytest.mark.parametrize(("name", "kwargs", "kept", "broken"), CASES, ids=lambda value: str(value)[:60])
def test_checkers_agree_with_responses_made_by_hand(
    name: str, kwargs: dict[str, Any], kept: list[str], broken: list[str]
):
    check = CHECKS[name]
    assert [text for text in kept if not check(text, **kwargs)] == []
    assert [text for text in broken if check(text, **kwargs)] == []


COMMA, TWO = ("punctuation:no_comma", {}), ("length_constraints:number_words", {"num_words": 2, "relation": "at least"})
BULLETS = ("detectable_format:number_bullet_lists", {"num_bullets": 1})


def test_a_score_is_all_or_the_share_of_the_constraints_that_hold():
    given = task(COMMA, TWO, BULLETS)
    assert score("* one two", given).value == 1.0
    reward = score("* one, two", given)
    assert (reward.value, score("* one, two", given, score="fraction").value) == (0.0, 2 / 3)
    kept = {"punctuation": 0.0, "length_constraints": 1.0, "detectable_format": 1.0}
    assert reward.parts == {"all": 0.0, "fraction": 2 / 3, **kept}


def test_an_empty_response_keeps_nothing_in_either_mode():
    assert score("", task(COMMA)).value == score(" \n", task(COMMA), mode="loose").value == 0.0


def test_loose_forgives_a_first_and_a_last_line_and_asterisks():
    quoted = task(("startend:quotation", {}))
    for text in ('Sure:\n"a"', '"a"\nBye', 'Sure:\n"a"\nBye', '**"a"**'):
        assert score(text, quoted).value == 0.0
        assert score(text, quoted, mode="loose").value == 1.0
    assert score('Sure:\nx "a"\nBye', quoted, mode="loose").value == 0.0


def test_constraints_may_be_json_text_with_nulls_and_in_the_ground_truth():
    wanted = [("length_constraints:number_words", {"num_words": 2, "relation": "at least"})]
    padded = {"num_words": 2, "relation": "at least", "letter": None}
    as_text = {"instruction_id_list": json.dumps([wanted[0][0]]), "kwargs": json.dumps([padded])}
    plain = Task(id="t:1", source="t", payload=as_text, seed=0, tag="t", domain="d")
    truth = Task(id="t:1", source="t", payload={"ground_truth": json.dumps(as_text)}, seed=0, tag="t", domain="d")
    assert constraints(plain) == constraints(truth) == wanted


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "no column 'instruction_id_list'"),
        ({"instruction_id_list": ["a:b"], "kwargs": [{}]}, "no constraint is called 'a:b'; known"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "1 constraints and 2 kwargs"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, r"has \[\], expected \['end_phrase'\]"),
        ({"instruction_id_list": "[", "kwargs": []}, "is no JSON"),
        ({"instruction_id_list": [], "kwargs": []}, "0 constraints"),
    ],
)
def test_a_row_that_cannot_be_checked_is_an_error(payload: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        constraints(Task(id="t:1", source="t", payload=payload, seed=0, tag="t", domain="d"))


HOSTILE = ["[" * 200_000, "*" * 200_000, "**a**" * 40_000, "a. " * 70_000, "\n" * 200_000 + "-", "<<" * 100_000]
HOSTILE += ["'" * 200_000 + "x", "." * 200_000, "! " * 100_000, "P." * 100_000]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:6]))
def test_a_hostile_response_takes_every_checker_little_time(text: str):
    begin = time.process_time()
    for name, kwargs, *_ in CASES:
        CHECKS[name](text, **kwargs)
    assert time.process_time() - begin < 20  # quadratic ones would take minutes


def test_language_is_the_same_at_every_call():
    assert (
        len({CHECKS["language:response_language"]("Wir gehen jetzt nach Hause.", language="de") for _ in range(5)}) == 1
    )
    assert CHECKS["language:response_language"](ENGLISH, language="en")


def test_sentences_keep_their_quotes_and_brackets():
    assert sentences('He said "Go." She went. (At once.) End') == ['He said "Go."', "She went.", "(At once.)", "End"]


def test_the_data_sets_541_prompts_can_all_be_checked(shared_data: Path):
    lines = (shared_data / "ifeval" / "ifeval_input_data.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tasks = [Task(id=str(row["key"]), source="t", payload=row, seed=0, tag="t", domain="d") for row in rows]
    assert len(tasks) == 541
    assert {name for one in tasks for name, _ in constraints(one)} == set(CHECKS)
    for one in tasks[::20]:
        assert 0.0 <= ifeval("An answer, of two sentences. Yes.", one, mode="loose", score="fraction").value <= 1.0
