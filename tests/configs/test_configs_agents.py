"""Agents of `env_type: endpoint` in the configuration: each mistake gives one clear error before anything is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from refused import check_refused
from tiny_models import build_tiny_model

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.validate import warnings_of
from roll.configs.schema.agents_config import AgentEnv
from roll.pipelines.run.stored_config import CONFIG_FILE, store_config

ENV = "custom_envs.game.env_config"
JOB = {
    "pipeline": "agentic",
    "executor": "inline",
    "max_steps": 2,
    "pretrain": "model",
    "rollout_batch_size": 16,
    "prompt_length": 32,
    "response_length": 16,
    "custom_envs": {"game": {"env_type": "endpoint", "env_config": {"agent": "agent.py:play"}}},
    "train_env_manager": {"num_env_groups": 4, "group_size": 4},
    "adv_estimator": "reinforce",
    "actor_train": {"training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}},
}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a sound `job.yaml`, its agent and its model's config.json; also the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "agent.py").write_text("def play(task, base_url, api_key):\n    return 1.0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return tmp_path


def replaced(overrides: list[str]) -> list[str]:
    """The overrides with `env_config={...}` in place of what the file has; Hydra would merge the two."""
    return [f"~{ENV}.agent", *overrides] if any(f"{ENV}={{" in override for override in overrides) else overrides


def program(**more: object) -> str:
    given = ", ".join(f"{key}: {value}" for key, value in {"command": "'python agent.py'", **more}.items())
    return f"{ENV}={{{given}}}"


REFUSED: list[tuple[list[str], str, list[str]]] = [
    # overrides, path of the one violation, fragments of its text
    ([f"~{ENV}.agent"], ENV, ["expected one of command, agent and remote"]),
    (["~custom_envs.game.env_config"], ENV, ["command, agent or remote"]),
    ([f"{ENV}.remote=true"], ENV, ["one of agent and remote", "keep one"]),
    ([f"{ENV}.agnet=x"], f"{ENV}.agnet", ["did you mean 'agent'"]),
    ([f"{ENV}.timeout_s=0"], f"{ENV}.timeout_s", ["> 0"]),
    ([f"{ENV}.ignore_fields=claude_code"], f"{ENV}.ignore_fields", ["'claude_code'", "did you mean claude-code?"]),
    ([f"{ENV}.ignore_fields=[openai-agent]"], f"{ENV}.ignore_fields", ["harness", "did you mean openai-agents?"]),
    ([f"{ENV}.ignore_fields=[my-agent]"], f"{ENV}.ignore_fields", ["a field of requests, or a harness: aider"]),
    ([f"{ENV}.side_calls=policy"], f"{ENV}.side_calls", ["no name of the policy itself", "name of their own"]),
    ([f"{ENV}.side_calls=[codex]"], f"{ENV}.side_calls", ["one of aider, opencode", "no such calls are known"]),
    ([f"{ENV}.ignore_fields=[strict,tools]"], f"{ENV}.ignore_fields", ["'tools'", "says something else"]),
    ([f"{ENV}.tool_parser=herms"], f"{ENV}.tool_parser", ["did you mean 'hermes'"]),
    ([f"{ENV}.timeout_s=4000"], f"{ENV}.timeout_s", ["at most rpc_timeout (3600)", "rpc_timeout=4000"]),
    (["adv_estimator=gigpo"], "adv_estimator", ["requests of agents name no states"]),
    ([f"{ENV}.score=exit"], f"{ENV}.score", ["return, callback, reward with agent"]),
    ([program(score="return")], f"{ENV}.score", ["output, exit, callback, reward with command"]),
    ([program(exit_rewards="{0: 1.0}")], f"{ENV}.exit_rewards", ["no effect with score output"]),
    ([program(score="exit", exit_rewards="{300: 1.0}")], f"{ENV}.exit_rewards", ["exit codes from 0 to 255", "300"]),
    ([program(score="exit")], f"{ENV}.exit_rewards", ["score: exit needs", "1 is also"]),
    ([f"{ENV}.score=reward"], f"{ENV}.reward", ["needs the function that gives it"]),
    ([f"{ENV}.reward={{name: exact}}"], f"{ENV}.reward", ["acts only with score reward"]),
    ([f"{ENV}={{remote: true, cwd: /}}"], f"{ENV}.cwd", ["without remote", "started by nobody here"]),
    ([f"{ENV}={{remote: true, logs: all}}"], f"{ENV}.logs", ["no effect with remote"]),
    ([f"{ENV}={{command: 'python \"x'}}"], f"{ENV}.command", ["No closing quotation"]),
    ([f"{ENV}.sandbox=true"], f"{ENV}.sandbox", ["acts only with command", "a program is started anew"]),
    ([program(sandbox_readable="/")], f"{ENV}.sandbox_readable", ["acts only with sandbox"]),
    ([program(sandbox_disk_mb=5)], f"{ENV}.sandbox_disk_mb", ["acts only with sandbox"]),
    ([program(sandbox_memory_mb=500)], f"{ENV}.sandbox_memory_mb", ["acts only with sandbox"]),
    ([f"{ENV}.models={{policy/white: {{base_url: 'http://x/v1'}}}}"], f"{ENV}.models.policy/white", ["isn't policy"]),
    ([f"{ENV}.models={{judge: {{base_url: 'x'}}}}"], f"{ENV}.models.judge.base_url", ["http://"]),
    (["custom_envs.game.max_steps=5"], "custom_envs.game.max_steps",
     ["no effect with env_type endpoint", "max_calls=5"]),
    (["custom_envs.game.action_pattern=null"], "custom_envs.game.action_pattern", ["the agent writes the prompts"]),
    (["custom_envs.game.role_rewards=shared"], "custom_envs.game.role_rewards", ["no effect with env_type endpoint"]),
    (["sample_unit=step"], "sample_unit", ["trajectory with env_type endpoint"]),
    (["gateway.token_env=T"], "gateway.token_env", ["without an agent with remote"]),
    (["gateway.address=trainer:80"], "gateway.address", ["fix: http://trainer:80"]),
    (["custom_envs.game.env_type=sokoban-v1", "~custom_envs.game.env_config", "gateway.port=80"], "gateway.port",
     ["no effect without an environ"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "path", "fragments"), REFUSED, ids=[str(row[0][-1]) for row in REFUSED])
def test_a_mistake_gives_one_error(play, overrides, path, fragments):
    check_refused(play, replaced(overrides), path, fragments)


MISSING: list[tuple[list[str], list[str]]] = [
    ([f"{ENV}.agent=agent.py:plya"], [f"{ENV}.agent", "did you mean 'play'"]),
    ([f"{ENV}.agent=agnet.py:play"], [f"{ENV}.agent", "a Python file that exists"]),
    ([f"{ENV}.agent=no_such_package:play"], [f"{ENV}.agent", "no package 'no_such_package'"]),
    ([f"{ENV}={{command: no-such-agent}}"], [f"{ENV}.command", "no 'no-such-agent' on the PATH"]),
    ([f"{ENV}={{command: 'python no_such.py'}}"], [f"{ENV}.command", "a script that exists"]),
    ([f"{ENV}={{command: ls, python: /usr/bin/env}}"], [f"{ENV}.python", "doesn't begin with python"]),
    ([f"{ENV}.python=/no/such/python"], [f"{ENV}.python", "an interpreter that exists"]),
    ([f"{ENV}.cwd=/no/such/folder"], [f"{ENV}.cwd", "a folder that exists"]),
    ([f"{ENV}.tasks=tasks.jsonl"], [f"{ENV}.tasks", "a file that exists"]),
    ([program(sandbox="true", sandbox_readable="/no/such/folder")], [f"{ENV}.sandbox_readable", "that exist"]),
    ([f"{ENV}.pass_env=NO_SUCH_VARIABLE"], [f"{ENV}.pass_env", "export NO_SUCH_VARIABLE"]),
    ([f"{ENV}.score=reward", f"{ENV}.reward={{name: 'agent.py:no'}}"], [f"{ENV}.reward.name", "it has play"]),
    ([f"{ENV}.score=reward", f"{ENV}.reward={{name: exct}}"], [f"{ENV}.reward.name", "did you mean 'exact'"]),
    ([f"{ENV}={{remote: true}}", "gateway.token_env=NO_SUCH_TOKEN"], ["gateway.token_env", "export NO_SUCH_TOKEN"]),
]


@pytest.mark.parametrize(("overrides", "fragments"), MISSING, ids=[str(row[0][-1]) for row in MISSING])
def test_what_is_not_there_is_said_before_anything_starts(play, overrides, fragments):
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(play, "job", replaced(overrides)))
    assert len(caught.value.violations) == 1
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_missing_extra_is_named_with_the_line_that_installs_it(play, monkeypatch):
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    with pytest.raises(ConfigError, match=r"pip install 'roll-rl\[serve\]'"):
        check_prerequisites(load_config(play, "job"))


SOUND = (
    "agent: 'agent.py:play'",
    f"agent: 'agent.py:play', python: {sys.executable}, cwd: ., env: {{A: b}}, pass_env: PATH",
    "command: [ls, -l], score: exit, exit_rewards: {0: 1.0, 3: 0.5}",
    "command: 'python agent.py --flag', score: callback",
    "remote: true, timeout_s: 10",
    "agent: 'agent.py:play', score: reward, reward: {name: exact}",
)


@pytest.mark.parametrize("config", SOUND)
def test_a_sound_agent_passes_all_checks(play, config):
    from roll.envs.env_registry import check_envs

    loaded = load_config(play, "job", replaced([f"{ENV}={{{config}}}"]))
    check_prerequisites(loaded)
    check_envs(loaded)
    assert warnings_of(loaded) == []
    assert isinstance(loaded.custom_envs["game"].agent, AgentEnv)


@pytest.mark.parametrize("config", SOUND)
def test_the_configuration_that_a_run_keeps_can_be_loaded_again(play, config):
    loaded = load_config(play, "job", replaced([f"{ENV}={{{config}}}"]))
    store_config(loaded)
    assert load_config(loaded.output_path, CONFIG_FILE).custom_envs == loaded.custom_envs


def test_exit_codes_are_numbers_however_they_are_written(play):
    for codes in ({0: 1, 3: 0.5}, {"0": 1.0, "3": 0.5}):
        job = {**JOB, "custom_envs": {"game": {"env_type": "endpoint", "env_config": {
            "command": "ls", "score": "exit", "exit_rewards": codes}}}}  # fmt: skip
        (play / "job.yaml").write_text(yaml.safe_dump(job))
        assert load_config(play, "job").custom_envs["game"].agent.rewards_by_exit_code == {0: 1.0, 3: 0.5}


def test_too_few_agents_for_what_is_played_at_once_are_warned_of(play):
    (warning,) = warnings_of(load_config(play, "job", [f"{ENV}.max_agents=3"]))
    assert "max_agents is 3, and 16 episodes are played at once" in warning


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_package\ndef play(*_): pass", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import os\nos._exit(3)\ndef play(*_): pass", "ended with code 3 while it was imported"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_by_the_check(
    play, capsys, checks_start_no_process, source, said
):
    from roll.cli.train import start_pipeline

    build_tiny_model(play / "model")  # the command looks at tokenizer and weights, too
    job = ["--config_path", str(play), "--config_name", "job", "--check"]
    assert start_pipeline(job, play) == 0
    (play / "agent.py").write_text(source)
    assert start_pipeline(job, play) == 2
    assert said in capsys.readouterr().err


def test_calls_beside_the_task_are_known_by_a_models_name_by_words_and_by_harness():
    env = AgentEnv(agent="x:y", side_calls=("small", "You name things.", "opencode"))
    assert env.side_models == {"small"}
    assert env.side_prompts[0] == "You name things." and "title generator" in env.side_prompts[1]
    assert AgentEnv(agent="x:y", ignore_fields=("smolagents", "audio")).ignored_fields == {"tool_choice", "audio"}
