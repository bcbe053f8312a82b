"""Generated questions whose answers have several lines or none, and verifiers that pay what is no answer.

tests/evidence/test_evidence_generated_sets.py goes through every data set.
"""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from generated_sets import FORMS, NONSENSE, OPTIONS, right_answer

from roll.configs.schema.worker_config import ProceduralTask
from roll.data.procedural import procedural_tasks
from roll.envs.adapters.base import HubError
from roll.envs.env_registry import load_env
from roll.rewards.generated_answers import extract_answer
from roll.rewards.reasoning_gym import PAYLOAD_KEY, reasoning_gym
from roll.types.trajectory import Task
from roll.utils.reasoning_gym_sets import UselessVerifier, check_dataset, create_dataset, is_wrong
from roll.utils.rows import DataError

SEVERAL_LINES = ("mini_sudoku", "tower_of_hanoi", "rotate_matrix", "pool_matrix", "survo", "kakurasu", "modulo_grid")
NO_GOLD = ("boxnet", "graph_color", "propositional_logic", "rush_hour")
OTHERS = ("chain_sum", "coin_flip", "complex_arithmetic", "jugs", "number_sorting", "composite", "game_of_life")


def tasks(name: str, **config: Any) -> list[Task]:
    return procedural_tasks(ProceduralTask(tag=name, dataset=name, size=2, config=config), seed=1)


@pytest.mark.parametrize("name", [*SEVERAL_LINES, *NO_GOLD, *OTHERS])
def test_a_right_answer_gets_full_marks_and_a_text_that_is_none_does_not(name: str) -> None:
    for task in tasks(name, **OPTIONS.get(name, {})):
        answer = right_answer(task.payload[PAYLOAD_KEY]["entry"])
        for form in FORMS:
            assert reasoning_gym(form.format(answer), task).value == 1.0, form
        assert reasoning_gym(f"So.\nAnswer: {answer}\n\nBye", task, extract="after_answer").value == 1.0
        for text in NONSENSE:
            assert reasoning_gym(text, task).value == 0.0, text


def test_one_answer_is_never_enough_for_all_questions() -> None:
    # What the verifiers of 0.1.25 pay in full for every question: the first digit of a probability, any four numbers
    # that make 24, and a number that is at no distance from any other.
    assert {reasoning_gym("0", task).value for task in tasks("coin_flip")} == {0.0}
    assert {reasoning_gym("nan", task).value for task in tasks("complex_arithmetic")} == {0.0}
    entry = {"answer": "8*3*1*1", "metadata": {"source_dataset": "puzzle24", "numbers": [8, 3, 1, 1]}}
    assert is_wrong("10 + 3 + 4 + 7", entry)
    assert not is_wrong("1*8*1*3", entry)


def test_an_answer_of_another_shape_is_wrong_and_no_error() -> None:
    task = tasks("boxnet")[0]
    for text in ("[1]", "[[]]", '[{"Agent[0.5, 0.5]": 3}]', "null", '{"a": {"b": 1}}', "[" * 3000):
        assert reasoning_gym(text, task).parts["correct"] == 0.0


@pytest.mark.parametrize(
    ("response", "reference", "answer"),
    [
        ("5\nQuestion: 1 + 1 =", "5", "5"),
        (" 5", None, "5"),
        ("Answer: 5\nIt is odd.", "7", "5"),
        ("**Answer:** 5", "7", "5"),
        ("I think <answer>4</answer> or <answer>\n5\n</answer> it is", "7", "5"),
        ("1 2\n3 4\n\nDone.", "1 2\n3 4", "1 2\n3 4"),
        ("```text\n1 2\n3 4\n```\nDone.", "1 2\n3 4", "1 2\n3 4"),
        ("The grid:\n\n1 2\n3 4", "1 2\n3 4", "The grid:"),
        ("1 < 2\n\n2 > 1\nDone", "1 < 2\n   \n2 > 1", "1 < 2\n\n2 > 1"),
        ('[\n  "a",\n  "b]"\n]\nDone', None, '[\n  "a",\n  "b]"\n]'),
        ('{"s": "}[}}}{(]"}\nDone', "x", '{"s": "}[}}}{(]"}'),
        ("[1, 2\nDone", "x", "[1, 2"),
        ("", "x", None),
        ("<answer></answer>", "x", None),
    ],
)
def test_auto_takes_as_many_lines_as_an_answer_has(response: str, reference: str | None, answer: str | None) -> None:
    assert extract_answer(response, "auto", reference) == answer


def test_extraction_takes_linear_time() -> None:
    for text in (
        "answer: " * 50_000,
        "[" * 400_000,
        '"' * 400_000,
        "\n \n" * 100_000,
        "<answer>" * 50_000,
        "*" * 400_000,
    ):
        for extract in ("auto", "after_answer", "tags", "first_line"):
            extract_answer(text, extract, "1\n2")  # type: ignore[arg-type]


def test_a_verifier_that_pays_any_text_is_refused_wherever_it_is_named() -> None:
    halting = {"name": "game_of_life_halting", "weight": 1, "config": {}}
    with pytest.raises(DataError, match="'game_of_life_halting' gives full marks to .*, which is no answer"):
        tasks("game_of_life_halting")
    with pytest.raises(DataError, match="'game_of_life_halting' gives full marks"):
        tasks("composite", datasets=[{"name": "chain_sum", "weight": 1, "config": {}}, halting])
    with pytest.raises(HubError, match="'game_of_life_halting' gives full marks"):
        load_env("reasoning_gym:game_of_life_halting")()
    entry = create_dataset("game_of_life_halting", {})[0]
    payload = {PAYLOAD_KEY: {"dataset": "game_of_life_halting", "config": {}, "entry": entry}}
    with pytest.raises(UselessVerifier, match="gives full marks"):
        reasoning_gym("True", Task(id="t", source="t", payload=payload, seed=0, tag="t", domain="d"))


def test_a_verifier_that_pays_one_text_for_every_question_is_found() -> None:
    class Prefix:
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"question": "?", "answer": f"0.{index + 1}", "metadata": {}}

        def __len__(self) -> int:
            return 8

        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            return float(bool(answer) and entry["answer"].startswith(answer))

    with pytest.raises(UselessVerifier, match="full marks to '0', whatever the answer is"):
        check_dataset(Prefix(), "prefix")


@pytest.mark.parametrize(
    ("name", "config", "part"),
    [
        ("word_sorting", {"transformation": "uppercase"}, str.isupper),
        ("word_sorting", {"transformation": "LOWERCASE"}, str.islower),
        ("composite", {"datasets": [{"name": "word_sorting", "weight": 1, "config": {"transformation": "uppercase"}}]},
         str.isupper),
        ("aiw", {"task_types": ["siblings"], "task_type_weights": [1.0]}, str.isdigit),
        ("simple_equations", {"operators": ["+"], "operators_weights": [1.0]}, str.isdigit),
    ],
)  # fmt: skip
def test_options_are_given_as_yaml_writes_them(name: str, config: dict[str, Any], part: Any) -> None:
    for task in tasks(name, **config):
        letters = "".join(filter(str.isalnum, task.payload["ground_truth"]))
        assert part(letters), letters
        assert reasoning_gym(task.payload["ground_truth"], task).value == 1.0


def test_dates_are_texts_in_yaml() -> None:
    options = {"min_date": "2001-02-03", "max_date": date(2001, 2, 9), "max_time": "12:30"}
    assert create_dataset("time_intervals", options).config.min_date == date(2001, 2, 3)


def test_a_text_that_is_no_value_of_an_enum_is_refused_with_the_values() -> None:
    with pytest.raises(DataError, match="'upper' is none of its values; they are lowercase, uppercase"):
        tasks("word_sorting", transformation="upper")
