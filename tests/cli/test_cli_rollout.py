"""`roll rollout`: a model plays environments; what is written where, and what is said when it can't."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
from rollout_files import read_rollouts
from tiny_models import build_tiny_model

from roll.cli.__main__ import main
from roll.cli.rollout import configuration
from roll.configs.parsing.loader import load_config

DIAL = f"{Path(__file__).parents[2]}/examples/custom_env/dial.py:Dial"
SHORT = ("prompt_length=32", "response_length=8")

ODD = """
from roll.envs.base import Env, Observation, StepResult
class Odd(Env):
    def __init__(self, fails=False):
        self.fails = fails
    def reset(self, seed, options):
        if self.fails:
            raise KeyError("[/bold] no such room")
        return Observation.of("?")
    def step(self, action):
        return StepResult(reward=0.5, terminated=True)
class Echo(Odd):
    def step(self, action):
        return StepResult(reward=0.0, terminated=False, observation=Observation.of(f"got {action!r}."))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With room for a few turns."""
    return build_tiny_model(tmp_path_factory.mktemp("roomy") / "llama", max_position_embeddings=1024)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def ran(capfd, tmp_path, monkeypatch):
    """Runs the command in an empty folder: (exit status, what it said)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = main(["rollout", *map(str, arguments)])
        captured = capfd.readouterr()
        return status, captured.out + captured.err

    return run


def options_of(*envs, **changes):
    given = {"model": "m", "env": list(envs), "episodes": 4, "max_steps": 3, "engine": "hf_infer", "output_dir": "out"}
    return argparse.Namespace(**{**given, "output_dir": Path("out"), **changes})


def test_episodes_a_table_and_pictures_of_two_environments(ran, model, tmp_path):
    status, said = ran(
        "--model", model, "--env", "frozen_lake-v1", "--env", "sokoban-v1", "--episodes=3", "--max_steps=2",
        "--output_dir=out", *SHORT, "sequence_length=1024", "render_save_dir=pictures", "log_val_generations=2",
        "track_with=[jsonl,tensorboard]",
    )  # fmt: skip
    assert status == 0, said
    content = json.loads(Path("out/scores.json").read_text())
    assert (content["model"], content["step"]) == (str(model), 0)
    lake, sokoban = content["scores"]
    assert (lake["tag"], lake["episodes"], lake["failed"], lake["turns"]) == ("frozen_lake_v1", 3, 0, 2.0)
    assert (sokoban["tag"], sokoban["episodes"], sokoban["failed"]) == ("sokoban_v1", 3, 0)
    assert lake["success"] == 0.0
    assert lake["counts"]["format_errors"] == 2.0
    assert "frozen_lake_v1" in said
    assert "0.0% ± 0.0%" in said
    episodes = [json.loads(line) for line in Path("out/episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 6
    assert all(episode["seed"] % 2 for episode in episodes), "validation's seeds"
    assert [len(episode["turns"]) for episode in episodes] == [2] * 6
    assert "You are on a frozen lake" in episodes[0]["turns"][0]["prompt"]
    rows = [row for file in Path("out/episodes").glob("*.parquet") for row in read_rollouts(file)]
    assert {row.task_id for row in rows} == {episode["task"] for episode in episodes}
    assert episodes[0]["turns"][0]["prompt"] == rows[0].prompt
    (row,) = [json.loads(line) for line in Path("out/logs/metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["val/frozen_lake_v1/accuracy"]) == (0, 0.0)
    assert list(Path("out/logs/tensorboard").iterdir())
    assert len(Path("out/logs/samples.jsonl").read_text().splitlines()) == 2
    assert sorted(file.relative_to(tmp_path).as_posix() for file in (tmp_path / "pictures").rglob("*.*")) == [
        f"pictures/step-000000/{task}/{name}"
        for task in ("frozen_lake_v1-val-0", "sokoban_v1-val-1")
        for name in ("episode.png", "episode.txt", "first.png")
    ]
    again = load_config(Path("out"), "rollout", [])
    assert (again.max_sequence_length, again.val_env_manager.num_env_groups) == (1024, 6)


def test_the_file_it_leaves_plays_the_same_again(ran, model):
    arguments = ("--model", model, "--env", DIAL, "--episodes=2", "--max_steps=2")
    status, said = ran(*arguments, "--output_dir=first", "seed=5", *SHORT, "sequence_length=1024")
    assert status == 0, said
    from roll.pipelines import run_pipeline

    run_pipeline(load_config(Path("first"), "rollout", ["output_dir=second"]))
    assert Path("first/episodes.jsonl").read_text() == Path("second/episodes.jsonl").read_text()


def test_prompts_without_room_are_counted_and_named(ran, model):
    arguments = ("--model", model, "--env", "frozen_lake-v1", "--episodes=2", "--max_steps=3", "--output_dir=out")
    status, said = ran(*arguments, *SHORT)
    assert status == 1, said
    assert "every episode failed" in said
    assert "2 failed, e.g. frozen_lake_v1-val-0#0: truncated: turn 0 has" in said
    assert "tokens of context and no room to respond" in said
    (score,) = json.loads(Path("out/scores.json").read_text())["scores"]
    assert (score["episodes"], score["failed"], score["success"]) == (2, 2, None)
    # Room for the first turn, but not for the second.
    status, said = ran(*arguments, *SHORT, "sequence_length=360")
    assert status == 0, said
    assert "2 cut off, e.g. frozen_lake_v1-val-0#0: turn 1 has" in said
    (score,) = json.loads(Path("out/scores.json").read_text())["scores"]
    assert (score["failed"], score["no_room"], score["turns"]) == (0, 2, 1.0)


def test_an_environment_that_fails_is_told_from_one_that_is_lost(ran, model, tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    odd = f"{tmp_path}/odd.py:Odd"
    keys = (*SHORT, "sequence_length=256", "custom_envs.Odd_2.env_config={fails: true}")
    status, said = ran("--model", model, "--env", odd, "--env", odd, "--episodes=2", "--output_dir=out", *keys)
    assert status == 0, said
    assert "2 failed, e.g. Odd_2-val-1#0: env_error" in said
    assert "KeyError: '[/bold] no such room'" in said
    good, bad = json.loads(Path("out/scores.json").read_text())["scores"]
    assert (good["tag"], good["failed"], bad["tag"], bad["failed"]) == ("Odd", 0, "Odd_2", 2)


def test_a_rollout_in_which_every_episode_fails_is_a_failure(ran, model, tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    keys = (*SHORT, "sequence_length=256", "custom_envs.Odd.env_config={fails: true}")
    environment = f"{tmp_path}/odd.py:Odd"
    status, said = ran("--model", model, "--env", environment, "--episodes=2", "--output_dir=out", *keys)
    assert status == 1, said
    assert "error: every episode failed, the first because of: KeyError: '[/bold] no such room' (" in said
    assert "odd.py, line " in said


def test_pictures_show_what_the_environment_got(ran, model, tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    stops = "{stop_strings: [a, e, i, o, u, A, E, '1', '2', '3', '4'], include_stop_str_in_output: false}"
    keys = ("sequence_length=512", "custom_envs.Echo.action_pattern=null", "render_save_dir=pictures")
    status, said = ran(
        "--model", model, "--env", f"{tmp_path}/odd.py:Echo", "--episodes=4", "--max_steps=3", "--output_dir=out",
        "prompt_length=32", "response_length=24", f"val_env_manager.generating_args={stops}", *keys,
    )  # fmt: skip
    assert status == 0, said
    for line in Path("out/episodes.jsonl").read_text().splitlines():
        episode = json.loads(line)
        text = Path("pictures/step-000000", episode["task"], "episode.txt").read_text()
        shown = re.findall(r"^got .*$", text, re.MULTILINE)
        assert len(shown) == 2
        for turn, observation in zip(episode["turns"][1:], shown, strict=True):
            assert observation in turn["prompt"]


# --- what can't be run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--env=frozen_lke-v1",), "no environment 'frozen_lke-v1'; did you mean 'frozen_lake-v1'?"),
        (("--env=gone.py:Gone",), "custom_envs.Gone.env_type: got 'gone.py', expected a Python file that exists"),
        (("--env=sokoban-v1", "custom_envs.sokoban_v1.env_config={boxes: 5}"), "boxes: sokoban-v1 has no such"),
        (("--env=frozen_lake-v1", "--model=./gone"), "pretrain: got './gone', expected a model folder that exists"),
        (("--env=frozen_lake-v1", "--episodes=0"), "--episodes: got 0, expected at least 1"),
        (("--env=frozen_lake-v1", "--max_steps=-1"), "--max_steps: got -1, expected at least 1"),
        (("--env=frozen_lake-v1", "--engine=vlm"), "did you mean 'vllm'"),
        (("--env=frozen_lake-v1", "pretrian=x"), "did you mean 'pretrain'"),
        (("--env=frozen_lake-v1", "pipeline=rlvr"), "agentic"),
        (("--env=frozen_lake-v1", "--output_dir=taken"), "--output_dir: taken is a file, expected a folder"),
    ],
)
def test_what_can_be_mended_is_said_in_a_line(ran, model, tmp_path, arguments, expected):
    (tmp_path / "taken").write_text("")
    given = () if any(argument.startswith("--model") for argument in arguments) else ("--model", model)
    status, said = ran(*given, "--output_dir=out", *arguments, *SHORT)
    assert status == 2
    assert expected in said
    assert "Traceback" not in said
    assert not Path("out/scores.json").exists()


def test_a_model_with_too_few_positions_is_told_what_fits(ran, tiny_model):
    status, said = ran("--model", tiny_model, "--env", "frozen_lake-v1")
    assert status == 2
    assert "sequence_length: got 2048, expected at most 256 tokens" in said
    assert "fix: prompt_length=128 response_length=128" in said
    status, said = ran("--model", tiny_model, "--env", DIAL, "--episodes=1", "prompt_length=128", "response_length=128")
    assert status == 0, "what it says works"
    status, said = ran("--model", tiny_model, "--env", DIAL, *SHORT, "sequence_length=500")
    assert "fix: prompt_length=32 response_length=8 sequence_length=256" in said


def test_what_fails_later_leaves_its_traceback_in_a_file(ran, model, tmp_path):
    shutil.copytree(model, tmp_path / "torn")
    (tmp_path / "torn/model.safetensors").write_bytes(b"torn")
    status, said = ran("--model=torn", "--env", DIAL, "--episodes=1", "--output_dir=out", *SHORT)
    assert status == 1, said
    assert "error: " in said
    assert "SafetensorError: " in said
    assert "traceback: out/logs/error.txt" in said
    assert "Traceback" in Path("out/logs/error.txt").read_text()
    assert "most recent call" not in said


# --- the configuration ------------------------------------------------------------------------------------------------


def test_environments_of_one_name_are_told_apart():
    envs = ("sokoban-v1", "a/game.py:Game", "b/game.py:Game", "my.games:Game", "sokoban-v1", "so$ k:Böx 2", "x:")
    tags = configuration(options_of(*envs))["custom_envs"]
    assert {tag: section["env_type"] for tag, section in tags.items()} == dict(
        zip(("sokoban_v1", "Game", "Game_2", "Game_3", "sokoban_v1_2", "Böx_2", "env"), envs, strict=True)
    )


def test_every_environment_gets_its_episodes(tmp_path):
    import yaml

    tree = configuration(options_of("sokoban-v1", "countdown-v1", "frozen_lake-v1", episodes=7))
    (tmp_path / "rollout.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    config = load_config(tmp_path, "rollout", [])
    assert config.partition_of(config.val_env_manager) == (7, 7, 7)
    assert config.validation_groups == 21
    assert {env.max_steps for env in config.custom_envs.values()} == {3}


@pytest.mark.parametrize("engine", ["hf_infer", "vllm", "sglang"])
def test_engines_run_where_they_can(tmp_path, engine):
    import yaml

    (tmp_path / "rollout.yaml").write_text(yaml.safe_dump(configuration(options_of("sokoban-v1", engine=engine))))
    config = load_config(tmp_path, "rollout", [])
    assert config.executor == ("inline" if engine == "hf_infer" else "ray")
    assert config.actor_infer.strategy_args.strategy_name == engine
    assert config.val_only
