"""Length limits and tokenising in parallel."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from data_tokenizers import word_tokenizer

from roll.data.prompts import encode_prompts
from roll.data.templates import PromptEncoder
from roll.types.trajectory import Task
from roll.utils.readers import DataError


def tasks(*lengths: int) -> list[Task]:
    return [
        Task(
            id=f"t:{i}",
            source="t",
            payload={"prompt": " ".join(f"w{j}" for j in range(n)), "messages": None},
            seed=0,
            tag="t",
            domain="d",
        )
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(word_tokenizer(adds_bos=False), template="plain")


# w0 .. w5 are the ids 7 .. 12
@pytest.mark.parametrize(
    ("truncation", "expected"), [("left", (9, 10, 11, 12)), ("right", (7, 8, 9, 10)), ("middle", (7, 8, 11, 12))]
)
def test_long_prompts_are_cut_and_reported(encoder: PromptEncoder, truncation: Any, expected: tuple[int, ...]) -> None:
    prompts = encode_prompts(tasks(6, 4), encoder, prompt_length=4, truncation=truncation)
    assert [prompts.prompt_ids(task) for task in prompts.tasks] == [expected, (7, 8, 9, 10)]
    counts = {"data/prompts_truncated": 1, "data/prompts_filtered": 0, "data/prompt_length_max": 6}
    assert counts.items() <= prompts.metrics.items()


def test_middle_of_an_odd_limit_keeps_one_more_of_the_head(encoder: PromptEncoder) -> None:
    prompts = encode_prompts(tasks(6), encoder, prompt_length=3, truncation="middle")
    assert prompts.prompt_ids(prompts.tasks[0]) == (7, 8, 12)
    assert encode_prompts(tasks(6), encoder, prompt_length=1, truncation="middle").prompt_ids(tasks(6)[0]) == (7,)


def test_filter_leaves_long_prompts_out_and_counts_them(encoder: PromptEncoder) -> None:
    prompts = encode_prompts(tasks(3, 6, 2), encoder, prompt_length=4, truncation="filter")
    assert [task.id for task in prompts.tasks] == ["t:0", "t:2"]
    # lengths 3, 6, 2: mean 11/3
    assert prompts.metrics == {
        "data/prompts": 3.0,
        "data/prompts_filtered": 1.0,
        "data/prompts_truncated": 0.0,
        "data/prompt_length_mean": pytest.approx(11 / 3),
        "data/prompt_length_max": 6.0,
    }
    with pytest.raises(KeyError, match="t:1"):
        prompts.prompt_ids(tasks(3, 6, 2)[1])


def test_a_repeat_in_a_later_epoch_has_the_same_tokens(encoder: PromptEncoder) -> None:
    prompts = encode_prompts(tasks(3), encoder, prompt_length=4)
    assert prompts.prompt_ids(replace(prompts.tasks[0], id="t:0@e2")) == (7, 8, 9)


def test_error_names_the_prompts_and_the_ways_out(encoder: PromptEncoder) -> None:
    with pytest.raises(DataError, match=r"2 of 3 prompts .* prompt_length = 4 .*'t:1' with 6, the longest has 9"):
        encode_prompts(tasks(4, 6, 9), encoder, prompt_length=4)


def test_nothing_left_is_an_error(encoder: PromptEncoder) -> None:
    with pytest.raises(DataError, match="all 2 prompts"):
        encode_prompts(tasks(6, 5), encoder, prompt_length=4, truncation="filter")
    with pytest.raises(DataError, match="no tasks"):
        encode_prompts([], encoder, prompt_length=4)


@pytest.mark.parametrize("num_workers", [2, 3, 50])
def test_the_number_of_workers_does_not_show(num_workers: int) -> None:
    encoder = PromptEncoder(word_tokenizer())
    many = tasks(*(1 + i % 17 for i in range(40)))
    one = encode_prompts(many, encoder, prompt_length=64)
    several = encode_prompts(many, encoder, prompt_length=64, num_workers=num_workers)
    assert [one.prompt_ids(t) for t in many] == [several.prompt_ids(t) for t in many]
    assert one.metrics == several.metrics
