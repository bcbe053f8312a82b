"""`roll eval generate` and `roll eval score`: files of responses, and what they are worth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from roll.cli.__main__ import main
from roll.cli.accuracy_table import ScoredResponse, results_table
from roll.cli.evaluate import write_rows
from roll.cli.generate import Job, _files_of
from roll.pipelines.rollouts.eval_table import ValidationProgress
from roll.rewards.base import Reward, RewardResult

# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "kind": "sums", "id": "x"} for i in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def generate(model: Path, output: str, *more: str) -> int:
    usual = ["--model", str(model), "--max_new_tokens", "6", "--prompt_length", "64", "--template", "plain"]
    return main(["eval", "generate", "rows.jsonl", "-o", output, *usual, *more])


def test_a_job_that_ended_early_goes_on_and_writes_what_it_would_have_written(
    questions, tiny_model, monkeypatch, capsys
):
    more = ["--n_samples", "2", "max_running_requests=4"]
    assert generate(tiny_model, "whole.jsonl", *more) == 0
    said = capsys.readouterr().err
    assert "12 responses to 6 rows in whole.jsonl" in said
    assert "accuracy" not in said, "nothing was scored"
    assert sorted(path.name for path in questions.iterdir()) == ["rows.jsonl", "whole.jsonl"], "nothing else is left"
    add, kept = ValidationProgress.add, []

    def dies(self, group):
        kept.append(group.task.id)
        if len(kept) > 3:
            raise RuntimeError("pulled plug")
        add(self, group)

    monkeypatch.setattr(ValidationProgress, "add", dies)
    assert generate(tiny_model, "parts.jsonl", *more) == 1
    assert "3 rows are answered; the same command goes on" in capsys.readouterr().err
    (torn,) = Path("parts.jsonl.job").glob("attempt-*/episodes.unfinished.jsonl")
    torn.write_text(torn.read_text() + '{"task": "rows:5", "mem')
    monkeypatch.setattr(ValidationProgress, "add", add)
    assert generate(tiny_model, "parts.jsonl", *more, "--temperature", "0.5") == 2
    assert "temperature was None, is 0.5" in capsys.readouterr().err
    assert generate(tiny_model, "parts.jsonl", *more) == 0
    assert "3 of 6 rows were answered before" in capsys.readouterr().err
    assert Path("parts.jsonl").read_text() == Path("whole.jsonl").read_text()
    assert not Path("parts.jsonl.job").exists()


def test_a_job_knows_a_model_that_was_written_again_under_its_name(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = _files_of(str(tmp_path))
    assert first == _files_of(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert first != _files_of(str(tmp_path))
    assert _files_of("org/name-of-the-hub") is None


def test_a_job_that_lacks_nothing_but_its_output_writes_it(questions, tiny_model, monkeypatch, capsys):
    from roll.cli import generate as module

    with open("rows.jsonl", "a") as file:
        file.write(json.dumps({"question": "9" * 99}) + "\n")
    more = ["truncation=filter"]

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_rows", full)
        assert generate(tiny_model, "out.jsonl", *more) == 1
    assert generate(tiny_model, "out.jsonl", *more) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows[:6]] == [""] * 6 and "not asked" in rows[6]["error"]


@pytest.mark.parametrize("value", [2**70, "\ud800", {}, {"a": {}}, [{}], {"\ud800": 1}])
def test_values_that_parquet_cannot_hold_are_written_as_json(value, tmp_path):
    write_rows([{"x": value, "y": 1}, {"x": None, "y": 2}], tmp_path / "a.parquet")
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["y"] for row in rows] == [1, 2]
    assert json.loads(rows[0]["x"]) == value


def test_separators_in_a_response_and_a_character_cut_by_a_kill_lose_no_rows(tmp_path):
    folder = tmp_path / "attempt-001"
    folder.mkdir()
    texts = {1: "a\u2028b", 2: "c\x85d", 3: "e", 4: "é"}
    lines = [json.dumps({"task": f"rows:{row}", "member": 0, "text": text}, ensure_ascii=False)
             for row, text in texts.items()]  # fmt: skip
    whole = "\n".join(lines).encode()
    (folder / "episodes.unfinished.jsonl").write_bytes(whole[: whole.rindex("é".encode()) + 1])
    found = Job(tmp_path, samples=1).answers()
    assert {row: episodes[0]["text"] for row, episodes in found.items()} == {row: texts[row] for row in (1, 2, 3)}


def test_columns_are_named_and_long_prompts_have_a_row_without_a_response(questions, tiny_model, capsys):
    Path("rows.jsonl").write_text('{"ask": "1+1="}\n{"ask": "' + "9" * 80 + '"}\n')
    more = ["--prompt_key", "ask", "--response_key", "responses", "--grouped", "--samples", "2", "truncation=filter"]
    assert generate(tiny_model, "out.parquet", *more) == 0
    assert "1 rows have no response: not asked" in capsys.readouterr().err
    first, second = pq.read_table("out.parquet").to_pylist()
    assert first["ask"] == "1+1=" and len(first["responses"]) == 2 and first["error"] == ["", ""]
    assert second["responses"] == [None, None] and "longer than prompt_length" in second["error"][0]


@pytest.mark.parametrize(
    ("row", "arguments", "expected"),
    [
        ('{"prompt": "1", "response": "2"}', [], "a column 'response' already"),
        ('{"prompt": "1", "error": "2"}', [], "columns error are there already"),
        ('{"ask": "1"}', [], "name the column with --prompt_key"),
        ('{"prompt": "1"}', ["--prompt_key", "ask"], "no column 'ask'"),
        ('{"prompt": "1"}', ["--engines", "0"], "--engines: got 0"),
    ],
)
def test_what_cannot_be_asked_is_said_before_a_model_is_loaded(row, arguments, expected, questions, capsys):
    Path("rows.jsonl").write_text(f"{row}\n")
    assert generate(Path("nowhere"), "out.parquet", *arguments) == 2
    assert expected in capsys.readouterr().err
    assert not Path("out.parquet.job").exists()


def test_two_engines_share_the_rows(questions, tiny_model):
    assert generate(tiny_model, "one.jsonl") == 0
    assert generate(tiny_model, "two.jsonl", "--engines", "2") == 0
    assert Path("one.jsonl").read_text() == Path("two.jsonl").read_text()


def test_a_model_that_is_not_there_is_told_without_a_file_that_nobody_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1"}\n')
    assert main(["eval", "generate", "rows.jsonl", "--model", "./nowhere"]) == 2
    said = capsys.readouterr().err
    assert "pretrain: got './nowhere'" in said
    assert "generate.yaml" not in said


# --- score ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def pools_are_kept(one_pool_for_a_reward):
    """They serve `score`."""


def scored(question: str, tag: str, value: float | None) -> ScoredResponse:
    reward = None if value is None else Reward(value)
    result = RewardResult(id="r", status="ok" if reward else "error", reward=reward)
    return ScoredResponse(question=question, tag=tag, result=result)


def test_scores_are_averaged_by_question_and_tag():
    # Question 1 of tag a: right, wrong: accuracy 1/2, pass@1 1/2, pass@2 1. Of question 2 one has no score.
    responses = [scored("1", "a", 1.0), scored("1", "a", 0.0), scored("2", "b", 1.0), scored("2", "b", None)]
    a, b, both = results_table(responses, 1.0, [1, 2])
    assert a == {
        "tag": "a", "rows": 1, "responses": 2, "no response": 0, "failed": 0, "mean score": "0.5", "accuracy": "50.0%",
        "pass@1": "50.0%", "pass@2": "100.0%",
    }  # fmt: skip
    assert (b["failed"], b["mean score"], b["accuracy"], b["pass@2"]) == (1, "1 (1 of 2)", "100.0% (1 of 2)", "–")
    assert (both["tag"], both["rows"], both["accuracy"]) == ("(all)", 2, "75.0% (3 of 4)")
    assert both["pass@2"] == "100.0% (1 of 2)", "question 2 has one response with a score"


def test_an_absent_response_is_not_right_and_a_question_that_never_got_a_score_is_told():
    # One right of three: 1/3. Votes: right with its answer, two that state none: the first of two equal... none win.
    absent = ScoredResponse(question="1", tag="a", result=None)
    right = RewardResult(id="r", status="ok", reward=Reward(1.0, answer="2"))
    (row,) = results_table([ScoredResponse(question="1", tag="a", result=right), absent, absent], 1.0, [1, 2], [3])
    assert (row["responses"], row["no response"], row["failed"]) == (3, 2, 0)
    assert (row["accuracy"], row["mean score"]) == ("33.3%", "1 (1 of 3)")
    # pass@2: 1 - C(2, 2) / C(3, 2) = 2/3; maj@3: two state no answer, one states 2
    assert (row["pass@1"], row["pass@2"], row["maj@3"]) == ("33.3%", "66.7%", "0.0%")
    (row,) = results_table([scored("1", "a", 1.0), scored("2", "a", None)], 1.0, [1])
    assert (row["rows"], row["accuracy"], row["pass@1"]) == (2, "100.0% (1 of 2)", "100.0% (1 of 2)")


def score_rows(rows: list[dict], *arguments: str) -> int:
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return main(["eval", "score", "answers.jsonl", "--reward", "math_rule", *arguments])


def cells(output: str) -> list[list[str]]:
    """Return the cells of the printed table, without its head."""
    return [[cell.strip() for cell in line.strip("│\n").split("│")] for line in output.splitlines() if "│" in line]


CHAT = [{"role": "user", "content": "Solve the problem."}]


@pytest.mark.parametrize(
    "rows",
    [
        # the text is the same, the question is in another column
        [{"prompt": "Solve it.", "problem": f"{i}+1", "answer": str(i + 1), "response": "2"} for i in range(4)],
        # the same text and no other column than the expected answer
        [{"question": "Which number?", "answer": str(i + 1), "response": "2"} for i in range(4)],
        [{"messages": CHAT, "reward_model": {"ground_truth": str(i + 1)}, "response": "2"} for i in range(4)],
        [{"messages": CHAT, "answer": "2", "extra_info": {"index": i}, "response": "2" if i == 1 else "3"}
         for i in range(4)],
        # the question has a name that nobody looks for
        [{"input": f"{i}+1", "answer": str(i + 1), "response": "2"} for i in range(4)],
        # two files whose rows were numbered each by itself
        [{"row": 1, "prompt": f"{i}+1", "answer": str(i + 1), "response": "2"} for i in range(4)],
    ],
)  # fmt: skip
def test_rows_that_differ_in_more_than_the_response_are_questions_of_their_own(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert score_rows(rows, "--pass_at_k", "1", "--pass_at_k", "2") == 0
    captured = capsys.readouterr()
    assert cells(captured.out) == [["all", "4", "4", "0", "0", "0.25", "25.0%", "25.0%", "–"]]
    assert "no question has 2 responses; 1 at most" in captured.err


def test_rows_that_differ_in_the_response_and_its_score_alone_are_one_question(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = {"prompt": CHAT, "answer": "2", "meta": {"a": 1, "b": None}}
    rows = [
        {**common, "response": "2", "score": 1.0, "score_error": "", "sample": 0, "finish_reason": "stop", "error": ""},
        {**common, "response": "3", "score": 0.0, "sample": 1, "finish_reason": "length", "tag": None},
        {"answer": "2", "meta": {"b": None, "a": 1}, "prompt": CHAT, "response": None, "sample": 2, "error": "x"},
    ]
    assert score_rows(rows, "--pass_at_k", "2", "-o", "scores.jsonl") == 0
    captured = capsys.readouterr()
    # 1 of 3 right; pass@2 = 1 - C(2, 2) / C(3, 2)
    assert cells(captured.out) == [["all", "1", "3", "1", "0", "0.5 (2 of 3)", "33.3%", "66.7%"]]
    assert "1 of 3 responses are null" in captured.err
    assert [json.loads(line)["score"] for line in Path("scores.jsonl").read_text().splitlines()] == [1.0, 0.0, None]


def test_a_column_of_the_response_that_makes_questions_is_named_and_prompt_key_mends_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "1+1", "answer": "2", "took": 0.1 * i, "response": str(i)} for i in (1, 2)]
    rows += [{"prompt": "1+1", "answer": "3", "took": 0.5, "response": "2"}]
    assert score_rows(rows) == 0
    assert "1 rows have the prompt and the expected answer of an earlier row, but differ in column took: each" in (
        capsys.readouterr().err
    )
    assert score_rows(rows, "--prompt_key", "prompt", "--pass_at_k", "2") == 0
    captured = capsys.readouterr()
    assert "differ in column" not in captured.err
    # Two expected answers are two questions, whatever they share: (1/2 + 0) / 2
    assert cells(captured.out) == [["all", "2", "3", "0", "0", "0.3333", "25.0%", "100.0% (1 of 2)"]]


def test_a_list_without_responses_is_a_question_without_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": "1+1", "answer": "2", "responses": ["2", "2"]},
        {"prompt": "1+2", "answer": "3", "responses": []},
        {"prompt": "1+3", "answer": "4", "responses": None},
    ]
    assert score_rows(rows, "--response_key", "responses", "--pass_at_k", "1", "-o", "s.jsonl") == 0
    captured = capsys.readouterr()
    assert cells(captured.out) == [["all", "3", "4", "2", "0", "1 (2 of 4)", "33.3%", "33.3%"]]
    assert [json.loads(line)["score"] for line in Path("s.jsonl").read_text().splitlines()] == [[1.0, 1.0], [], None]


def test_each_response_of_a_list_has_its_own_finish_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def ended(response, task, finish_reason):\n    return float(finish_reason == 'stop')\n")
    row = {"prompt": "1+1", "answer": "2", "response": ["2", "2", "2"], "finish_reason": ["stop", "length", "length"]}
    Path("answers.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["eval", "score", "answers.jsonl", "--reward", "mine.py:ended", "-o", "s.jsonl"]) == 0
    assert json.loads(Path("s.jsonl").read_text())["score"] == [1.0, 0.0, 0.0]


def test_a_file_in_which_nothing_was_said_is_no_success(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert score_rows([{"prompt": "1+1", "answer": "2", "response": None}]) == 1
    assert cells(capsys.readouterr().out) == [["all", "1", "1", "1", "0", "–", "0.0%"]]


def test_a_file_of_responses_is_scored(tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    rows = [("1+1=", "2", "2"), ("1+1=", "2", "3"), ("2+2=", "4", "4")]
    lines = [json.dumps({"prompt": p, "answer": a, "response": r, "tag": "sums"}) for p, a, r in rows]
    file.write_text("\n".join(lines) + "\n")
    target = tmp_path / "scores.parquet"
    options = ["--pass_at_k", "1", "--maj_at_k", "2", "-o", str(target)]
    assert main(["eval", "score", str(file), "--reward", "math_rule", *options]) == 0
    said = capsys.readouterr().out
    assert "75.0%" in said  # (1/2 + 1) / 2
    assert "maj@2" in said and "100.0%" in said  # of the two answers to 1+1 the first wins, 2
    assert [row["score"] for row in pq.read_table(target).to_pylist()] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give either --reward"),
        (["--reward", "math_rule", "--response", "said"], "no text in column 'said'"),
        (["--reward", "math_rule", "-o", "x.csv"], "ends in .parquet or .jsonl"),
        (["--reward", "math_rule", "--data_source_key", "kind"], "--data_source_key: "),
        (["--reward", "math_rules"], "unknown name 'math_rules'"),
        (["--reward", "math_rule", "x={"], "x={ is no YAML"),
        (["--reward", "math_rule", "--pass_at_k", "0"], "--pass_at_k: got 0, expected at least 1"),
    ],
)
def test_what_cannot_be_scored_is_said(arguments, expected, tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "1", "answer": "1", "response": "1"}\n')
    assert main(["eval", "score", str(file), *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("model", ["judge", "reward_models.quality"])
def test_a_configuration_whose_reward_asks_a_model_is_not_scored(model, tmp_path, capsys, monkeypatch):
    from roll.configs.schema.reward_config import RewardConfig
    from roll.configs.schema.rlvr_config import RLVRConfig

    config = RLVRConfig(pipeline="rlvr", pretrain="none", rewards={"chat": RewardConfig(name=model)})
    monkeypatch.setattr("roll.configs.parsing.loader.load_config", lambda *_: config)
    (tmp_path / "run.yaml").write_text("pipeline: rlvr\n")
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "1", "answer": "1", "response": "1"}\n')
    assert main(["eval", "score", str(file), "--config", str(tmp_path / "run.yaml")]) == 2
    assert f"rewards.chat asks {model}, which this command doesn't start" in capsys.readouterr().err


def test_files_as_verl_writes_them_are_scored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth) if data_source == 'gsm8k' else 0.25\n"
    )
    rows = [
        {"prompt": [{"role": "user", "content": "1+1"}], "source": "gsm8k", "truth": {"ground_truth": "2"},
         "responses": ["2", "3", None]},
        {"prompt": [{"role": "user", "content": "2+2"}], "source": "other", "truth": {"ground_truth": "4"},
         "responses": ["4", "4", "4"]},
    ]  # fmt: skip
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["--response_key", "responses", "--data_source_key", "source", "--reward_model_key", "truth"]
    assert main(["eval", "score", "answers.jsonl", "--reward", "mine.py:compute_score", *keys, "-o", "s.jsonl"]) == 0
    first, second = (json.loads(line) for line in Path("s.jsonl").read_text().splitlines())
    assert first["score"] == [1.0, 0.0, None] and first["score_error"][2] == "there is no response"
    assert second["score"] == [0.25] * 3
    said = capsys.readouterr().out
    assert "gsm8k" in said and "33.3%" in said  # of three, one of which is null


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "data:\n  path: a b.parquet\n  prompt_key: prompt\n  n_samples: 5\n  output_path: out.parquet\n"
            "model: {path: Qwen/Qwen3-0.6B}\nrollout: {name: vllm, temperature: 0.7, response_length: 512}\n",
            "roll eval generate 'a b.parquet' --model Qwen/Qwen3-0.6B --prompt_key prompt --n_samples 5 "
            "--output_path out.parquet --temperature 0.7 --max_new_tokens 512 --engine vllm",
        ),
        (
            "data:\n  path: r.parquet\n  response_key: responses\n  data_source_key: data_source\n"
            "  reward_model_key: reward_model\ncustom_reward_function: {path: null, name: compute_score}\n",
            "roll eval score r.parquet --reward REWARD.py:compute_score --response_key responses --data_source_key "
            "data_source --reward_model_key reward_model",
        ),
    ],
)
def test_a_file_of_verls_jobs_is_answered_with_the_command(text, expected, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(text)
    assert main(["check", str(tmp_path / "job.yaml")]) == 2
    assert expected in capsys.readouterr().err


def test_prompts_have_the_room_that_a_small_model_leaves(questions, tiny_model, monkeypatch, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "small")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 64}))
    told = ["--model", str(model), "--max_new_tokens", "6", "--template", "plain"]
    assert main(["eval", "generate", "rows.jsonl", "-o", "a.jsonl", *told]) == 0
    assert len(Path("a.jsonl").read_text().splitlines()) == 6
