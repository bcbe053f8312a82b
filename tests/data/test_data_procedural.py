"""Generated tasks: reproducible, distinct, and disjoint where they must be."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

from roll.configs.schema.worker_config import ProceduralTask
from roll.data.procedural import procedural_tasks, questions_of
from roll.utils.readers import DataError

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def spec(**changes: Any) -> ProceduralTask:
    return ProceduralTask(**{"tag": "chain_sum", "dataset": "chain_sum", "size": 8, "config": ONE_DIGIT, **changes})


def test_the_same_seed_gives_the_same_tasks_and_another_gives_others() -> None:
    assert procedural_tasks(spec(), seed=1) == procedural_tasks(spec(), seed=1)
    assert questions_of(procedural_tasks(spec(), seed=1)) != questions_of(procedural_tasks(spec(), seed=2))


def test_a_neighbouring_seed_is_not_the_same_set_shifted() -> None:
    large = {"min_digits": 6, "max_digits": 6}
    one = questions_of(procedural_tasks(spec(config=large, size=50), seed=1))
    two = questions_of(procedural_tasks(spec(config=large, size=50), seed=2))
    assert not one & two


def test_questions_are_distinct_and_validation_shares_none_with_training() -> None:
    train = procedural_tasks(spec(size=100), seed=1)
    held_out = procedural_tasks(spec(size=40), seed=1, split="validation", exclude=questions_of(train))
    assert (len(questions_of(train)), len(questions_of(held_out))) == (100, 40)
    assert not questions_of(train) & questions_of(held_out)
    assert len({task.id for task in train + held_out}) == 140


def test_few_shot_examples_are_solved_the_same_everywhere_and_never_the_question() -> None:
    templates = {"example_template": "{expression} = {answer}\n", "question_template": "{expression} ="}
    few = spec(few_shot=3, size=60, **templates)
    train = procedural_tasks(few, seed=1)
    validation = procedural_tasks(spec(few_shot=3, **templates), seed=1, split="validation")
    for task in train + validation:
        *examples, question = task.payload["prompt"].split("\n")
        assert len(examples) == 3
        assert examples == train[0].payload["prompt"].split("\n")[:3]
        for example in examples:
            left, right = example.split(" = ")
            a, sign, b = left.split()
            assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert question not in {example.rpartition(" ")[0] for example in examples}


def test_the_payload_survives_a_process_boundary() -> None:
    task = procedural_tasks(spec(), seed=1)[0]
    assert pickle.loads(pickle.dumps(task)) == task
    assert task.payload["reasoning_gym"]["config"] == ONE_DIGIT
    assert task.payload["ground_truth"] == task.payload["reasoning_gym"]["entry"]["answer"]
    assert (task.tag, task.id) == ("chain_sum", "chain_sum:train:1")


def test_two_generators_may_share_a_tag() -> None:
    one = procedural_tasks(spec(tag="arithmetic"), seed=1)
    two = procedural_tasks(spec(tag="arithmetic", dataset="gcd", config={}), seed=1)
    assert not {task.id for task in one} & {task.id for task in two}
    assert {task.tag for task in one + two} == {"arithmetic"}


def test_what_a_question_contains_is_not_filled_in_again() -> None:
    task = procedural_tasks(spec(question_template="{question} {question}\n"), seed=1)[0]
    assert task.payload["prompt"] == f"{task.payload['question']} {task.payload['question']}\n"


BROKEN = [
    (
        lambda: procedural_tasks(spec(dataset="chain_sums", config={}), seed=1),
        "'chain_sums': config {} is refused: .*chain_sums",
    ),
    (lambda: procedural_tasks(spec(config={"max_term": 2}), seed=1), "config .*max_term.* is refused"),
    (lambda: procedural_tasks(spec(config={"min_terms": 0}), seed=1), "refused: min_terms must be positive"),
    (lambda: procedural_tasks(spec(size=250), seed=1), r"only \d+ new questions in 5000 draws, 250 are needed"),
    (
        lambda: procedural_tasks(spec(question_template="{expresion} ="), seed=1),
        "asks for {expresion}; there are .*expression",
    ),
]


@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_an_impossible_set_says_why(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_generator_that_rejects_its_own_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda self, answer, entry: 0.0)
    with pytest.raises(DataError, match="rejects its own answer"):
        procedural_tasks(spec(), seed=1)


def test_a_set_is_made_without_importing_the_others_and_the_package_may_come_later() -> None:
    code = """
import sys
from roll.utils.reasoning_gym_sets import create_dataset
alone = create_dataset("chain_sum", {"max_terms": 3}, seed=5, size=2)
assert create_dataset("products", {}, seed=5, size=2)[0]["answer"]
assert not {"matplotlib", "sympy", "reasoning_gym", "reasoning_gym.algorithmic"} & set(sys.modules)
import reasoning_gym
assert reasoning_gym.create_dataset("chain_sum", max_terms=3, seed=5, size=2)[1] == alone[1]
mixed = create_dataset("composite", {"datasets": [{"name": "gcd", "weight": 1.0, "config": {}}]})
assert mixed[0]["metadata"]["source_dataset"] == "gcd"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
