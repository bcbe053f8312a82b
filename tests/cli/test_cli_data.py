"""`roll data check`: what it finds, and its exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from data_tokenizers import CHAT_TEMPLATE, word_tokenizer

from roll.cli.__main__ import main

GOOD = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "tag": "sums"} for i in range(12)]
CONFIG: dict[str, Any] = {
    "pipeline": "rlvr",
    "executor": "inline",
    "max_steps": 2,
    "pretrain": "model",
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 4,
    "prompt_length": 32,
    "response_length": 16,
    "rewards": {"sums": {"name": "math_rule"}, "words": {"name": "math_rule"}},
    "actor_train": {
        "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "data_args": {"file_name": "train.jsonl"},
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_a_file_that_is_not_there_is_the_users_mistake(capsys: Any) -> None:
    write("training.jsonl", GOOD)
    assert main(["data", "check", "traning.jsonl"]) == 2
    told = capsys.readouterr()
    assert "did you mean 'training.jsonl'?" in told.err
    assert told.out == ""


def test_an_empty_file_is_told_without_an_empty_table(capsys: Any) -> None:
    write("train.jsonl", [])
    assert main(["data", "check", "train.jsonl"]) == 1
    told = capsys.readouterr().out
    assert "train: no rows" in told
    assert "column" not in told


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_good_files_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    write("train.jsonl", [*GOOD, GOOD[3]])
    write("val.jsonl", [GOOD[5], {"prompt": "new", "answer": "3", "tag": "sums"}])
    assert main(["data", "check", "train.jsonl", "--validation", "val.jsonl"]) == 0
    printed = capsys.readouterr().out
    for part in ("training data: 13 rows", "tags: sums 13", "1 of 13 prompts repeat", "1 validation rows are in",
                 "no problems"):  # fmt: skip
        assert part in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_bad_rows_are_listed_with_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    write("train.jsonl", [*GOOD[:4], {"prompt": "p", "answer": "", "tag": "sums"}])
    assert main(["data", "check", "train.jsonl"]) == 1
    assert "train.jsonl:5: column 'answer' (the ground truth) is empty" in capsys.readouterr().out
    assert main(["data", "check", "train.jsonl", "prompt=question"]) == 1
    assert "no column 'question' (named for prompt)" in capsys.readouterr().out
    assert main(["data", "check", "none.jsonl"]) == 2
    assert main(["data", "check", "train.jsonl", "prompts=question"]) == 2


def test_the_data_of_a_configuration_meet_their_domains_and_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    unread = {"prompt": "p", "answer": ["a", "list"], "tag": "sums"}
    write("train.jsonl", [*GOOD, unread, {"prompt": "q", "answer": "1", "tag": "other"}])
    Path("job.yaml").write_text(yaml.safe_dump(CONFIG))
    assert main(["data", "check", "job.yaml"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("1 rows that the reward of 'sums' can't score train:13:", "tags that no domain includes other: 1 rows",
                 "domain 'words' has no rows", "lengths aren't measured"):  # fmt: skip
        assert part in printed
    write("train.jsonl", [*GOOD, {"prompt": "q", "answer": "1", "tag": "words"}])
    assert main(["data", "check", "job", "--no_rewards"]) == 0


def test_a_ground_truth_that_is_a_sentence_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    sentences = ["The area is 50 m²", "Alice has 3 apples."]
    fine = ["50", "January 5", "x = 5 or x = 3", "The answer is \\boxed{50}", r"\text{It is}"]
    write("train.jsonl", [{"prompt": f"{i}?", "answer": truth} for i, truth in enumerate([*sentences, *fine])])
    config = {**CONFIG, "rewards": {"train": {"name": "math_rule"}}}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", "check", "c"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "2 rows whose ground truth is a sentence, which no answer equals in 'train'" in told
    assert "train:1: '50 m²' gets no full marks" in told


def test_a_generator_whose_verifier_pays_any_text_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    made = [{"tag": "life", "dataset": "game_of_life_halting"}, {"tag": "grid", "dataset": "mini_sudoku"}]
    rewards = {
        "life": {"name": "reasoning_gym"},
        "grid": {"name": "reasoning_gym", "reward_kwargs": {"extract": "first_line"}},
    }
    data = {**CONFIG["actor_train"], "data_args": {"procedural": made}}
    Path("c.yaml").write_text(yaml.safe_dump({**CONFIG, "rewards": rewards, "actor_train": data}))
    assert main(["data", "check", "c"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "the verifier of 'game_of_life_halting' gives full marks to" in told
    assert "the answers of mini_sudoku have several lines, of which the first alone is never right" in told
    assert "fix: rewards.grid.reward_kwargs.extract=auto" in told
    assert main(["check", "c"]) != 0
    assert "the verifier of 'game_of_life_halting' gives full marks to" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        {"name": "judge"},
        {"name": "reward_models.quality"},
        {"name": "exact", "rule_weight": 1.0, "judge_weight": 1.0},
        {"name": "weighted", "parts": {"a": {"name": "http", "reward_kwargs": {"url": "http://127.0.0.1:9"}}}},
    ],
)
def test_a_check_asks_neither_models_nor_servers(words: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    write("train.jsonl", [*GOOD, {"prompt": "q", "answer": "1", "tag": "words"}])
    models = (
        {"reward_models": {"quality": {"model_args": {"model_name_or_path": "model"}}}} if "." in words["name"] else {}
    )
    judge = {} if models else {"judge": {"endpoint": "http://127.0.0.1:9/v1", "model": "m"}}
    rewards = {**CONFIG["rewards"], "words": {**words, "tag_included": "words"}}
    Path("job.yaml").write_text(yaml.safe_dump({**CONFIG, **judge, **models, "rewards": rewards}))
    main(["data", "check", "job.yaml"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"the reward of 'words' ({words['name']}) wasn't tried" in printed


def test_conversations_of_a_fine_tuning_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    user, system = {"role": "user", "content": "u"}, {"role": "system", "content": "s"}
    answer = {"role": "assistant", "content": "a"}
    write("train.jsonl", [{"messages": m} for m in ([user, answer], [user, user, answer], [user, system, answer])])
    config = {"pipeline": "sft", "pretrain": "model", "max_steps": 1, "sequence_length": 8, "executor": "inline",
              "actor_train": {"data_args": {"file_name": "train.jsonl", "messages": "messages"}}}  # fmt: skip
    Path("job.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", "check", "job.yaml"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 rows: the conversation has two messages of one role in a row" in printed
    assert "1 rows: the conversation has a system message that isn't the first" in printed
    write("train.jsonl", [{"messages": [user, answer]}, {"messages": [user]}])
    assert main(["data", "check", "job.yaml"]) == 1
    assert "train.jsonl:2: 'messages' ends with a message of the user" in capsys.readouterr().out


def test_columns_that_nothing_reads_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "look: <image>"}, {"role": "assistant", "content": "a"}]
    write("train.jsonl", [{"messages": chat, "source": "web", "rank": 1}, {"messages": chat, "source": "web"}])
    config = {"pipeline": "sft", "pretrain": "model", "max_steps": 1, "sequence_length": 8, "executor": "inline",
              "actor_train": {"data_args": {"file_name": "train.jsonl"}}}  # fmt: skip
    Path("job.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", "check", "job.yaml"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "note: training data: unused columns: source (2 rows), rank (1 rows)" in printed
    assert "2 rows: the conversation has a place for a picture in its text, such as <image>, and no picture" in printed
    write("prompts.jsonl", [{"prompt": "a", "answer": "b", "level": 3}])
    assert main(["data", "check", "prompts.jsonl"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "columns beside the prompt, which rewards get and nothing else reads: level (1 rows)" in printed


def test_a_check_refuses_what_a_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained("model")
    Path("model/config.json").write_text('{"model_type": "llama", "vocab_size": 9, "max_position_embeddings": 64}')
    user = {"role": "user", "content": "w0"}
    rows = [
        {"messages": [user, {"role": "assistant", "content": "w1"}]},
        {"messages": [user, {"role": "assistant", "content": "w2"}]},  # number 9
        {"messages": [user, {"role": "assistant", "content": "w1", "thinking": "w0"}]},
        {"messages": [user, {"role": "assistant", "content": "w1"}], "images": ["a.png"]},
        {"messages": [user, {"role": "assistant", "content": "w1"}], "tools": [{"name": "f"}]},
        {"messages": [user, {"role": "assistant", "content": "w1", "loss": 0}]},
    ]
    write("train.jsonl", rows)
    config = {"pipeline": "sft", "pretrain": "model", "max_steps": 1, "sequence_length": 64, "executor": "inline",
              "actor_train": {"data_args": {"file_name": "train.jsonl"}}}  # fmt: skip
    Path("job.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", "check", "job.yaml"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "5 bad rows" in printed
    for line, message in (
        (2, "the conversation has the token 'w2' with number 9, and model has an embedding of 9 tokens"),
        (3, "the chat template leaves out 'thinking' of message 2"),
        (4, "the column 'images' holds pictures, videos or sounds"),
        (5, "the chat template leaves out the row's tools (f)"),
        (6, "the flags of its messages leave no token of the assistant to learn"),
    ):
        assert f"train.jsonl:{line}: {message}" in printed
    write("prompts.jsonl", [{"prompt": "w0", "answer": "w1"}, {"prompt": "w2", "answer": "w1"}])
    config = {"pipeline": "rlvr", "pretrain": "model", "max_steps": 1, "rollout_batch_size": 1, "executor": "inline",
              "prompt_length": 8, "response_length": 8, "rewards": {"d": {"name": "exact"}},
              "actor_train": {"training_args": {"per_device_train_batch_size": 1},
                              "data_args": {"file_name": "prompts.jsonl"}}}  # fmt: skip
    Path("job.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", "check", "job.yaml", "--no_rewards"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "the prompt has the token 'w2' with number 9" in printed


def test_keys_of_messages_that_the_template_leaves_out_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    word_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained("model")
    Path("model/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000}))
    chat = [{"role": "user", "content": "a", "id": 7}, {"role": "assistant", "content": "b", "learn": False}]
    write("train.jsonl", [{"messages": chat}, {"messages": chat}])
    config = {"pipeline": "sft", "pretrain": "model", "max_steps": 1, "sequence_length": 64, "executor": "inline",
              "actor_train": {"data_args": {"file_name": "train.jsonl"}}}  # fmt: skip
    Path("job.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", "check", "job.yaml"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "unused columns: id of messages (2 rows), learn of messages (2 rows)" in printed
