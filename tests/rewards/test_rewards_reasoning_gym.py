"""`reasoning_gym`: verifiers of generated tasks, and what happens when one is broken."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from roll.configs.rules.verifier_rules import VERIFIERS_THAT_EXECUTE, verifier_that_executes
from roll.configs.schema.worker_config import ProceduralTask
from roll.data.procedural import PAYLOAD_KEY as WRITTEN_KEY
from roll.data.procedural import procedural_tasks
from roll.rewards import reasoning_gym as reward_module
from roll.rewards.reasoning_gym import PAYLOAD_KEY, extract_answer, reasoning_gym
from roll.types.trajectory import Task


def entry_task(dataset: str, entry: dict[str, Any]) -> Task:
    payload = {PAYLOAD_KEY: {"dataset": dataset, "config": {}, "entry": entry}}
    return Task(id="t:1", source="t", payload=payload, seed=0, tag="t", domain="d")


def sum_task(answer: str = "5") -> Task:
    return entry_task("chain_sum", {"question": "2 + 3 =", "answer": answer, "metadata": {}})


def test_data_and_reward_agree_on_the_payload_key() -> None:
    assert WRITTEN_KEY == PAYLOAD_KEY  # the two packages don't import each other


@pytest.mark.parametrize(
    "dataset", ["chain_sum", "basic_arithmetic", "number_sorting", "gcd", "letter_counting", "spell_backward"]
)
def test_gold_answers_of_generated_tasks_score_one_and_nonsense_zero(dataset: str) -> None:
    for task in procedural_tasks(ProceduralTask(tag=dataset, dataset=dataset, size=3), seed=1):
        task = pickle.loads(pickle.dumps(task))
        assert reasoning_gym(task.payload["ground_truth"] + "\nmore text", task).value == 1.0
        assert reasoning_gym("nonsense", task).value == 0.0


def test_text_that_contains_the_answer_gets_no_partial_credit_unless_asked_for() -> None:
    # basic_arithmetic uses the shared scorer: "15" contains "5", which is 1 of its 2 characters
    task = entry_task("basic_arithmetic", {"question": "", "answer": "5", "metadata": {}})
    assert reasoning_gym("15", task).value == 0.0
    assert reasoning_gym("15", task).parts == {"correct": 0.0, "answered": 1.0, "score": 0.5}
    assert reasoning_gym("15", task, partial_credit=True).value == 0.5


@pytest.mark.parametrize(
    ("response", "extract", "answer"),
    [
        ("\n\n 5 \nQuestion: 1 + 1 =", "first_line", "5"),
        ("", "first_line", None),
        (" \n ", "first_line", None),
        ("Answer: 4\nno, answer : 5\nbye", "after_answer", "5"),
        ("Answer:\n5", "after_answer", "5"),
        ("5", "after_answer", None),
        ("<answer>4</answer> <answer> 5 </answer> done", "tags", "5"),
        ("<answer>5", "tags", None),
        ("5</answer>", "tags", None),
        ("<answer></answer>", "tags", None),
        (" 5\n", "whole", "5"),
        ("x" * 20_000, "whole", None),
    ],
)
def test_the_answer_is_found_where_extract_looks(response: str, extract: Any, answer: str | None) -> None:
    assert extract_answer(response, extract) == answer


def test_no_answer_is_counted() -> None:
    assert reasoning_gym("", sum_task()).parts == {"correct": 0.0, "answered": 0.0, "score": 0.0}


def test_a_response_that_makes_the_verifier_raise_is_a_wrong_answer() -> None:
    task = procedural_tasks(ProceduralTask(tag="prime_factorization", dataset="prime_factorization", size=1), seed=1)[0]
    assert reasoning_gym("garbage", task).value == 0.0  # the verifier calls int() on it
    assert reasoning_gym(task.payload["ground_truth"], task).value == 1.0


def test_a_task_whose_gold_answer_is_rejected_is_an_error() -> None:
    # a second quarter turn doesn't undo the first
    entry = {"question": "", "answer": "R", "metadata": {"cube_size": 3, "scramble_moves": "R"}}
    with pytest.raises(RuntimeError, match=r"rubiks_cube.*rejects its own answer"):
        reasoning_gym("R", entry_task("rubiks_cube", entry))


def test_a_verifier_that_fails_for_every_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            raise OSError("service down")

    monkeypatch.setattr(reward_module, "_scorer", lambda name, config: Broken())
    with pytest.raises(OSError, match="service down"):
        reasoning_gym("5", sum_task())


def test_a_task_from_elsewhere_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"roll\.data\.procedural"):
        reasoning_gym("5", Task(id="t:1", source="t", payload={"prompt": "?"}, seed=0, tag="t", domain="d"))


def test_an_unknown_extract_is_an_error() -> None:
    with pytest.raises(ValueError, match="extract"):
        reasoning_gym("5", sum_task(), extract="somewhere")  # type: ignore[arg-type]


@pytest.mark.parametrize("dataset", sorted(VERIFIERS_THAT_EXECUTE))
def test_a_verifier_that_executes_the_response_never_sees_it(dataset: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    attack = f"__import__('pathlib').Path({str(touched)!r}).touch()"
    task = procedural_tasks(ProceduralTask(tag=dataset, dataset=dataset, size=1), seed=1)[0]
    for response in (attack, f"[{attack}]", str(task.payload["ground_truth"])):
        with pytest.raises(ValueError, match=rf"{dataset}.*executes the response"):
            reasoning_gym(response, task)
    assert not touched.exists()


def test_a_composite_hides_no_verifier_that_executes_the_response() -> None:
    inner = {"name": "countdown", "weight": 1.0, "config": {}}
    payload = {
        "dataset": "composite",
        "config": {"datasets": [inner]},
        "entry": {"question": "", "answer": "1", "metadata": {"source_dataset": "countdown"}},
    }
    task = Task(id="t:1", source="t", payload={PAYLOAD_KEY: payload}, seed=0, tag="t", domain="d")
    with pytest.raises(ValueError, match="countdown.*executes the response"):
        reasoning_gym("1", task)
    assert verifier_that_executes("composite", {"datasets": [{"name": "chain_sum"}]}) is None


def test_no_other_verifier_of_the_installed_library_holds_code_that_executes_text() -> None:
    # What may call these: generators on their own text, verifiers on the text of the entry. Read by hand in 0.1.25.
    read = {
        "codeio": "runs the data set's own code, to make an entry",
        "number_sorting": "evaluates the entry's answer",
        "bitwise_arithmetic": "evaluates the entry's problem",
        "basic_arithmetic": "evaluates the question it has made",
        "gsm_symbolic": "evaluates fractions of its own templates",
        "propositional_logic": "a `parse_expr` of its own, which splits text",
    }
    calls = {"eval", "exec", "parse_expr", "sympify", "S", "__import__", "load_module"}
    found = set()
    for name, (dataset, _) in sorted(DATASETS.items()):
        folder = Path(inspect.getfile(dataset)).parent
        own = [Path(inspect.getfile(dataset))]
        own += [file for file in folder.rglob("*.py") if file.parent.name == name]
        for node in (node for file in own for node in ast.walk(ast.parse(file.read_text()))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in calls:
                    found.add(name)
    assert found - set(read) == VERIFIERS_THAT_EXECUTE
