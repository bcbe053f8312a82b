"""`roll reward test`: which rows it lists, what it takes for a reference answer, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.cli.__main__ import main
from roll.rewards.base import Reward, RewardSpec
from roll.rewards.references import answer_text, filled, perturbed, reference_template

OWN = """
import json

def generous(response, task):
    return 1.0

def no_task(response):
    return 1.0

def reads_json(response, task):
    try:
        return float(json.loads(response) == task.payload["ground_truth"])
    except ValueError:
        return 0.0

def text(response, task):
    return "good"

def right_and_short(response, task):
    return float(task.payload["ground_truth"] in response) - 0.001 * len(response)

def strict(response, task, *, scale: float = 1.0):
    return scale * (response == f"it is {task.payload['ground_truth']}")
"""


TRL = """
def one_for_all(completions, **kwargs):
    return [1.0]

def even_alone(completions, answer, **kwargs):
    return [float(a in c) if int(a) % 2 == 0 else None for a, c in zip(answer, completions)]

def none(completions, **kwargs):
    return [None] * len(completions)

def in_messages(prompts, completions, answer, **kwargs):
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    return [float(a in c[0]["content"]) for a, c in zip(answer, completions)]

def short(completion_ids, **kwargs):
    return [float(0 < len(ids) < 5) for ids in completion_ids]
"""


@pytest.fixture(autouse=True)
def wide_and_one_process(monkeypatch: pytest.MonkeyPatch, one_pool_for_a_reward) -> None:
    """Each domain's rows are scored by as many processes as there are cores, at most four: one is enough to see how."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def rows(path: Path, *many: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in many))
    return str(path)


def ran(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    status = main(["reward", "test", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_sound_rows_are_all_as_expected(capsys: Any, tmp_path: Path):
    data = rows(tmp_path / "d.jsonl", {"answer": "2 + 2 = 4\n#### 4"}, {"answer": "#### 1,250"}, {"answer": "9"})
    status, out, _ = ran(capsys, "gsm8k", data)
    assert status == 0 and out.endswith("3 rows, all as expected\n")
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert table == [  # what was tried, although all is well
        ["reference", "3", "1", "100 %", "1  '#### 4'"], ["", "", "", "", "1  '#### 1,250'"],
        ["", "", "", "", "1  '#### 9'"],
        ["empty", "3", "0", "100 %", "0  ''"], ["", "", "", "", "0  ''"], ["", "", "", "", "0  ''"],
        ["perturbed", "3", "0", "100 %", "0  '#### 5'"], ["", "", "", "", "0  '#### 2,250'"],
        ["", "", "", "", "0  '#### 0'"],
    ]  # fmt: skip


def test_an_answer_that_is_an_object_is_written_as_json(capsys: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    data = rows(tmp_path / "d.jsonl", {"answer": {"city": "Zürich", "parts": [1, None, True]}}, {"answer": [3, 4]})
    status, out, _ = ran(capsys, f"{tmp_path}/own.py:reads_json", data)
    assert status == 0, out
    assert '{"city": "Zürich", "parts": [1, null, true]}' in out


def test_a_configuration_is_tested_where_its_model_is_not(capsys: Any, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "pipeline: rlvr\npretrain: models/not_here_yet\nrewards: {sums: {name: gsm8k}}\n"
        "actor_train: {data_args: {file_name: absent.jsonl}}\n"
    )
    status, out, err = ran(capsys, str(file), rows(tmp_path / "d.jsonl", {"answer": "#### 4"}))
    assert status == 0 and out.endswith("1 rows, all as expected\n"), err
    assert "models/not_here_yet isn't here as a folder" in err


def test_mismatches_are_listed_with_their_rows_and_the_code_is_1(capsys: Any, tmp_path: Path):
    data = rows(tmp_path / "d.jsonl", {"answer": "4"}, {"answer": "four"}, {"answer": None}, {"answer": "5"})
    status, out, _ = ran(capsys, "gsm8k", data)
    assert status == 1
    assert "d.jsonl:2" in out
    assert "'four' is not a number" in out
    assert "d.jsonl:3" in out
    assert "no reference answer" in out
    assert "d.jsonl:4" not in out
    # Row 2 has three responses that can't be scored, row 3 has no reference.
    assert out.endswith("4 rows, 4 not as expected\n")


def test_an_own_function_that_likes_everything_is_found_out(capsys: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    data = rows(tmp_path / "d.jsonl", {"target": 3})
    status, out, _ = ran(capsys, f"{tmp_path}/own.py:generous", data, "--ground_truth=target")
    assert status == 1
    assert "empty" in out
    assert "perturbed" in out
    assert out.endswith("1 rows, 2 not as expected\n")


def test_a_template_options_and_full_marks(capsys: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    data = rows(tmp_path / "d.jsonl", {"target": 3}, {"target": 4}, {"target": 5})
    more = ["--ground_truth=target", "--answer_template=it is {answer}", "--full_marks=2", "--limit=2", "scale=2.0"]
    status, out, _ = ran(capsys, f"{tmp_path}/own.py:strict", data, *more)
    assert status == 0 and out.endswith("2 rows, all as expected\n")


@pytest.mark.parametrize("model", ["reward_model", "reward_models.quality", "judge"])
def test_a_configuration_scores_each_domain_with_its_own(
    model: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from roll.cli import reward
    from roll.configs.schema.reward_config import RewardConfig, RewardPart
    from roll.configs.schema.rlvr_config import RLVRConfig

    parts = {
        "right": RewardPart(name="gsm8k"),
        "short": RewardPart(name="length", weight=0.1, reward_kwargs={"target": 2}),
    }
    rewards = {
        "math": RewardConfig(name="weighted", parts=parts),
        "letters": RewardConfig(name="choice", tag_included=("quiz",)),
        "chat": RewardConfig(name=model),
    }
    config = RLVRConfig(pipeline="rlvr", pretrain="none", rewards=rewards)
    monkeypatch.setattr("roll.cli.reward.configuration", lambda *_: config)
    file = tmp_path / "run.yaml"
    file.write_text("pipeline: rlvr\n")
    data = rows(
        tmp_path / "d.jsonl",
        {"answer": "#### 4", "tag": "math"},
        {"answer": "C", "tag": "quiz"},
        {"answer": "Paris", "tag": "quiz"},
        {"answer": "hello", "tag": "chat"},
    )
    status, out, _ = ran(capsys, str(file), data)
    assert status == 1
    assert "d.jsonl:3" in out
    assert "'Paris' is no choice" in out
    assert out.endswith("3 rows, 1 of no function's domain, 3 not as expected\n")
    reward_of = RewardSpec(name="weighted", parts={"right": (1.0, RewardSpec(name="gsm8k"))})
    assert reward.marks(Reward(0.3, {"right": 0.1, "right.correct": 0.0}), reward_of) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm9k", "DATA"], "did you mean 'gsm8k'"),
        (["gsm8k", "nothing.jsonl"], "nothing.jsonl"),
        (["gsm8k", "DATA", "mode=slow"], "there is no column|mode must be"),
        (["gsm8k", "DATA", "mod=strict"], "did you mean 'mode'"),
        (["gsm8k", "DATA", "mode"], "expected key=value"),
        (["gsm8k", "DATA", "mode=[a"], "mode=[a is no YAML"),
        (["gsm8k", "DATA", "--ground_truth=truth"], "no column 'truth'"),
        (["gsm8k", "DATA", "--answer=truth"], "no column 'truth'"),
        (["gsm8k", "DATA", "--answer_template=x"], "no {answer} in it"),
        (["gsm8k", "DATA", "--limit=0"], "at least 1"),
        (["weighted", "DATA"], "give the .yaml"),
        (["nothing.yaml", "DATA"], "nothing"),
        (["my_reward.py", "DATA"], "write my_reward.py:<name of the function>"),
    ],
)
def test_what_cannot_be_tested_is_the_users_mistake(capsys: Any, tmp_path: Path, arguments: list[str], message: str):
    data = rows(tmp_path / "d.jsonl", {"answer": "4"})
    status, out, err = ran(capsys, *[data if word == "DATA" else word for word in arguments])
    if arguments[-1] == "mode=slow":  # seen only when a row is scored
        assert status == 1
        assert "mode must be strict" in out
        return
    assert status == 2
    assert message in err


def test_a_signature_that_does_not_fit_is_told_without_a_traceback(capsys: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    data = rows(tmp_path / "d.jsonl", {"answer": "4"})
    status, _, err = ran(capsys, f"{tmp_path}/own.py:no_task", data)
    assert status == 2
    assert "it takes too few arguments" in err
    assert "Traceback" not in err


def test_the_ground_truth_is_found_where_verl_has_it(capsys: Any, tmp_path: Path):
    row = {"data_source": "sums", "prompt": [{"role": "user", "content": "2+2"}], "reward_model": {"ground_truth": "4"}}
    status, out, _ = ran(capsys, "gsm8k", rows(tmp_path / "d.jsonl", row))
    assert status == 0 and out.endswith("1 rows, all as expected\n")


def test_one_failure_of_all_rows_does_not_fill_the_screen(capsys: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    data = rows(tmp_path / "d.jsonl", *({"answer": str(i)} for i in range(10)))
    status, out, _ = ran(capsys, f"{tmp_path}/own.py:text", data)
    assert status == 1
    assert out.count("returned a value of type str") == 6
    assert "(and 24 more times)" in out
    assert out.endswith("10 rows, 30 not as expected\n")


def test_a_reward_whose_right_answers_get_less_than_1_is_told_how_to_say_so(capsys: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    data = rows(tmp_path / "d.jsonl", {"answer": "4"}, {"answer": "12"})
    status, out, _ = ran(capsys, f"{tmp_path}/own.py:right_and_short", data)
    assert status == 1
    assert "--full_marks 0.998 says so" in out
    assert ran(capsys, f"{tmp_path}/own.py:right_and_short", data, "--full_marks=0.998")[0] == 0


def test_a_configuration_is_found_without_its_yaml(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from roll.configs.schema.reward_config import RewardConfig
    from roll.configs.schema.rlvr_config import RLVRConfig

    config = RLVRConfig(pipeline="rlvr", pretrain="none", rewards={"math": RewardConfig(name="gsm8k")})
    monkeypatch.setattr("roll.cli.reward.configuration", lambda *_: config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_run.yaml").write_text("pipeline: rlvr\n")
    status, out, _ = ran(capsys, "my_run", rows(tmp_path / "d.jsonl", {"answer": "#### 4"}))
    assert status == 0 and out.endswith("1 rows, all as expected\n")


@pytest.mark.parametrize(
    ("name", "truth", "kwargs", "reference", "wrong"),
    [
        ("gsm8k", "so\n#### 72", {}, "#### 72", "82"),
        ("math_rule", r"\frac{1}{2}", {}, r"\boxed{\frac{1}{2}}", r"\frac{2}{2}"),
        ("math_rule", r"it is \boxed{3}", {}, r"\boxed{3}", "4"),
        ("math_rule", 43.0, {}, r"\boxed{43}", "53"),
        ("math_rule", r"\infty", {}, r"\boxed{\infty}", "8191"),
        ("math_rule", "Yes", {}, r"\boxed{Yes}", "no"),
        ("choice", "(A) Rome", {}, "The answer is (A)", "B"),
        ("choice", 1, {"require_boxed": True}, r"\boxed{B}", "A"),
        ("exact", ["Rome", "Roma"], {"extract": "tags"}, "<answer>Rome</answer>", "8191"),
        ("code", "x = 1", {}, "```python\nx = 1\n```", "raise SystemExit(1)"),
    ],
)
def test_the_response_made_of_a_reference_answer(
    name: str, truth: Any, kwargs: dict[str, Any], reference: str, wrong: str
):
    answer = answer_text(name, truth, kwargs)
    assert filled(reference_template(name, kwargs), answer) == reference
    assert perturbed(name, answer) == wrong


def test_functions_that_take_lists_are_given_lists_in_every_domain(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from roll.configs.schema.reward_config import RewardConfig
    from roll.configs.schema.rlvr_config import RLVRConfig

    monkeypatch.setattr("os.cpu_count", lambda: 8)  # several processes, whose answers come in any order
    (tmp_path / "trl.py").write_text(TRL)
    rewards = {"a": RewardConfig(name=f"{tmp_path}/trl.py:one_for_all"), "b": RewardConfig(name="gsm8k")}
    config = RLVRConfig(pipeline="rlvr", pretrain="none", rewards=rewards)
    monkeypatch.setattr("roll.cli.reward.configuration", lambda *_: config)
    file = tmp_path / "run.yaml"
    file.write_text("pipeline: rlvr\n")
    data = rows(tmp_path / "d.jsonl", *({"prompt": "x", "answer": "4", "tag": "ab"[i % 2]} for i in range(40)))
    for subject in (f"{tmp_path}/trl.py:one_for_all", str(file)):
        status, out, err = ran(capsys, subject, data, "--show", "1000")
        assert status == 1, err
        assert "'one_for_all' returned 1 value for" in out


def test_rows_that_a_function_does_not_score_are_counted_and_no_mismatches(capsys: Any, tmp_path: Path):
    (tmp_path / "trl.py").write_text(TRL)
    data = rows(tmp_path / "d.jsonl", {"prompt": "x", "answer": "4"}, {"prompt": "x", "answer": "7"})
    status, out, _ = ran(capsys, f"{tmp_path}/trl.py:even_alone", data)
    # Of the row with 7 three responses: empty, reference and perturbed.
    assert status == 0 and out.endswith("2 rows, 3 responses that the function doesn't score (None), all as expected\n")
    status, _, err = ran(capsys, f"{tmp_path}/trl.py:none", data)
    assert status == 2
    assert "it returned None for all" in err


def test_prompts_that_are_messages_come_as_messages(capsys: Any, tmp_path: Path):
    (tmp_path / "trl.py").write_text(TRL)
    data = rows(tmp_path / "d.jsonl", {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"})
    assert ran(capsys, f"{tmp_path}/trl.py:in_messages", data)[0] == 0


def test_a_function_that_reads_tokens_is_refused_without_the_model_that_writes_them(capsys: Any, tmp_path: Path):
    (tmp_path / "trl.py").write_text(TRL)
    data = rows(tmp_path / "d.jsonl", {"prompt": "x", "answer": "4"})
    status, _, err = ran(capsys, f"{tmp_path}/trl.py:short", data)
    assert status == 2
    assert "completion_ids: only the episodes of a run have them" in err
