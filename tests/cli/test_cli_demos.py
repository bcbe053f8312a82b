"""`roll demos`: solved episodes in a file that fine-tuning reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll.cli.__main__ import main

ENVS = {
    "lake": {"env_type": "frozen_lake-v1", "max_steps": 10},
    "boxes": {"env_type": "sokoban-v1", "max_steps": 12, "max_actions_per_step": 2},
}


@pytest.fixture
def ran(capsys, tmp_path, monkeypatch):
    """Runs the command in a folder with game.yaml: (exit status, what it said)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    manager = {"num_env_groups": 4, "group_size": 2}
    tree = {"pipeline": "agentic", "pretrain": "none", "custom_envs": ENVS, "train_env_manager": manager}
    Path("game.yaml").write_text(yaml.safe_dump({**tree, "rollout_batch_size": 8}, sort_keys=False))

    def run(*arguments):
        status = main(["demos", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def rows_of(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_solved_episodes_become_rows_that_end_with_the_assistant(ran):
    status, said = ran("game.yaml", "new/folder/demos.jsonl", "--episodes=8")
    assert status == 0, said
    rows = rows_of("new/folder/demos.jsonl")
    assert said.startswith(f"{len(rows)} rows of {len(rows)} episodes in new/folder/demos.jsonl")
    assert {row["tag"] for row in rows} == {"lake", "boxes"}
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
        assert row["messages"][-1]["content"].startswith("<answer>")
    assert any("||" in message["content"] for row in rows for message in row["messages"])
    assert [file.name for file in Path("new/folder").iterdir()] == ["demos.jsonl"]


def test_keys_and_the_form_of_responses_are_a_matter_of_arguments(ran):
    status, _ = ran(
        "game.yaml", "demos.jsonl", "--episodes=2", "--response=I say <answer>{action}</answer>", "sample_unit=step",
        "train_env_manager.tags=[lake]", "custom_envs.lake.history_length=0", "custom_envs.lake.env_config={size: 5}",
    )  # fmt: skip
    assert status == 0
    rows = rows_of("demos.jsonl")
    assert len(rows) > 2, "a row per turn"
    assert {len(row["messages"]) for row in rows} == {3}
    assert all(row["messages"][2]["content"].startswith("I say <answer>") for row in rows)
    assert len(rows[0]["messages"][1]["content"].splitlines()) == 5


def test_rows_are_what_fine_tuning_reads(ran, tiny_model):
    keys = ("sample_unit=step", "custom_envs.lake.history_length=0", "custom_envs.lake.system_template=null")
    assert ran("game.yaml", "demos.jsonl", "--episodes=4", *keys, "train_env_manager.tags=[lake]")[0] == 0
    from roll.pipelines import run_pipeline

    tree = {
        "pipeline": "sft", "executor": "inline", "pretrain": str(tiny_model), "max_steps": 1, "output_dir": "sft",
        "sequence_length": 200, "track_with": ["jsonl"],
        "actor_train": {"data_args": {"file_name": "demos.jsonl", "messages": "messages"}},
    }  # fmt: skip
    Path("sft.yaml").write_text(yaml.safe_dump(tree))
    from roll.configs.parsing.loader import load_config

    run_pipeline(load_config(Path(), "sft", []))
    assert rows_of("sft/logs/metrics.jsonl")


def test_episodes_that_werent_solved_are_counted(ran):
    status, said = ran("game.yaml", "demos.jsonl", "--episodes=40", "custom_envs.boxes.max_steps=3")
    assert status == 0
    rows = rows_of("demos.jsonl")
    assert 20 <= len(rows) < 40
    expected = f"{len(rows)} rows of {len(rows)} episodes in demos.jsonl"
    assert said == f"{expected}; {40 - len(rows)} weren't solved within max_steps\n"


def test_without_a_solved_episode_nothing_is_written_over(ran):
    Path("demos.jsonl").write_text("before\n")
    status, said = ran("game.yaml", "demos.jsonl", "--episodes=3", "custom_envs.lake.max_steps=1",
                       "train_env_manager.tags=[lake]")  # fmt: skip
    assert status == 2
    assert "none of 3 episodes is solved within its max_steps" in said
    assert Path("demos.jsonl").read_text() == "before\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("gone.yaml", "demos.jsonl"), "game"),
        (("game.yaml", "demos.jsonl", "--episodes=0"), "--episodes: got 0, expected at least 1"),
        (("game.yaml", "demos.txt"), "demos.txt: expected a name that ends in .jsonl"),
        (("game.yaml", "folder.jsonl"), "folder.jsonl is a folder"),
        (("game.yaml", "demos.jsonl", "--response=Up"), "response: got 'Up', expected a text with {action}"),
        (("game.yaml", "demos.jsonl", "--response={action}"), "isn't understood as"),
        (("game.yaml", "demos.jsonl", "custom_envs.lake.env_type=frozn_lake-v1"), "did you mean 'frozen_lake-v1'?"),
        (("game.yaml", "demos.jsonl", "custom_envs.lake.env_config={p: 2}"), "custom_envs.lake.env_config"),
        (("sft.yaml", "demos.jsonl"), "sft.yaml is a file of pipeline sft, expected one of pipeline agentic"),
    ],
)
def test_what_can_be_mended_is_said_in_a_line(ran, arguments, expected):
    Path("folder.jsonl").mkdir()
    data = {"file_name": "a.jsonl", "messages": "messages"}
    tree = {"pipeline": "sft", "pretrain": "m", "max_steps": 1, "sequence_length": 8}
    Path("sft.yaml").write_text(yaml.safe_dump({**tree, "actor_train": {"data_args": data}}))
    status, said = ran(*arguments, *(() if "--episodes=0" in arguments else ("--episodes=4",)))
    assert status == 2
    assert expected in said
    assert "Traceback" not in said
    assert not Path("demos.jsonl").exists()


def test_an_option_that_isnt_there_is_refused(ran, capsys):
    with pytest.raises(SystemExit):
        ran("game.yaml", "demos.jsonl", "--episode_count=3", "seed=1")
    assert "unrecognized arguments: --episode_count=3" in capsys.readouterr().err
