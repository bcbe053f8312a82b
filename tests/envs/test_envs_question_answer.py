"""Question answering: rows by seed, tries, feedback, discounts, and rewards by name or path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.envs import question_answer
from roll.envs.base import ResetNeeded
from roll.envs.question_answer import QuestionAnswer

ROWS = [{"prompt": f"What is {n} + {n}?", "ground_truth": str(2 * n)} for n in range(20)]


@pytest.fixture
def rows_file(tmp_path: Path) -> str:
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return str(file)


def right_answer(question: str) -> str:
    return next(row["ground_truth"] for row in ROWS if row["prompt"] == question)


def test_the_seed_picks_the_row(rows_file):
    env, other = QuestionAnswer(file_name=rows_file), QuestionAnswer(file_name=rows_file)
    questions = [env.reset(seed, {}).text for seed in range(200)]
    assert questions == [other.reset(seed, {}).text for seed in range(200)]
    assert set(questions) == {row["prompt"] for row in ROWS}


def test_rows_are_read_once_per_process(rows_file, monkeypatch):
    QuestionAnswer(file_name=rows_file)
    monkeypatch.setattr(question_answer, "load_tasks", lambda *a, **k: pytest.fail("read again"))
    assert QuestionAnswer(file_name=[rows_file]).reset(0, {}).text


def test_a_right_answer_after_wrong_ones_is_discounted(rows_file):
    env = QuestionAnswer(file_name=rows_file, discount=0.5, max_tries=3)
    truth = right_answer(env.reset(1, {}).text)
    first, second = env.step("-1"), env.step("-2")
    assert (first.reward, first.terminated, second.terminated) == (0, False, False)
    assert first.observation.text == "That is not right. Try again; tries left: 2."
    assert second.observation.text == "That is not right. Try again; tries left: 1."
    assert first.observation.state != second.observation.state
    last = env.step(truth)
    assert (last.reward, last.terminated, last.metrics) == (0.25, True, {"tries": 1, "success": 1})  # 1 * 0.5 * 0.5
    with pytest.raises(ResetNeeded):
        env.step(truth)


def test_the_last_wrong_answer_ends_the_episode(rows_file):
    env = QuestionAnswer(file_name=rows_file, max_tries=2, feedback="No. {question} ({tries_left})")
    question = env.reset(1, {}).text
    assert env.step("-1").observation.text == f"No. {question} (1)"
    last = env.step("-1")
    assert (last.reward, last.terminated, last.truncated, last.observation) == (0, True, False, None)
    assert last.metrics == {"tries": 1, "success": 0}


def test_the_solution_has_the_form_that_the_reward_function_wants(rows_file):
    for reward in ("math_rule", "gsm8k"):
        env = QuestionAnswer(file_name=rows_file, reward=reward)
        env.reset(3, {})
        solution = env.solution(100)
        assert solution is not None
        assert env.step(solution[0]).metrics["success"] == 1


def test_a_reward_function_of_ones_own_may_give_partial_credit(rows_file, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def close(response, task, *, scale):\n    return scale * len(response)\n")
    env = QuestionAnswer(
        file_name=rows_file, reward=f"{file}:close", reward_kwargs={"scale": 0.25}, max_tries=2, discount=0.5
    )
    env.reset(0, {})
    assert env.step("ab").reward == 0
    assert env.step("abc").reward == 0.375  # 3 * 0.25 * 0.5
    env.reset(0, {})
    assert env.step("abcd").metrics["success"] == 1


def test_messages_are_asked_as_they_are(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"chat": messages, "result": "4"}]))
    env = QuestionAnswer(file_name=str(file), messages="chat", ground_truth="result")
    asked = env.reset(0, {}).messages
    assert [(m.role, m.content) for m in asked] == [("system", "Be brief."), ("user", "2 + 2?")]
    assert env.step("4").metrics["success"] == 1


def test_a_broken_row_is_an_error_and_not_a_reward_of_zero(tmp_path):
    file = tmp_path / "none.jsonl"
    file.write_text(json.dumps({"prompt": "2 + 2?"}))
    env = QuestionAnswer(file_name=str(file))
    env.reset(0, {})
    assert env.solution(100) is None
    with pytest.raises(ValueError, match="no ground truth"):
        env.step("4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tries": 0}, "max_tries: got 0"),
        ({"discount": 1.5}, "discount: got 1.5"),
        ({"feedback": "{tires}"}, "can't be filled in"),
        ({"reward": "maths_rule"}, "did you mean 'math_rule'"),
        ({"prompt": "question"}, "no column 'question'"),
    ],
)
def test_arguments_that_ask_nothing_are_refused(rows_file, arguments, message):
    with pytest.raises(ValueError, match=message):
        QuestionAnswer(file_name=rows_file, **arguments)
