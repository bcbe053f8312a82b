"""Environments by id, module or file, and what is said when there is none."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from roll.configs.catalog.env_table import ENVS
from roll.configs.schema.env_config import CustomEnv, EnvManager
from roll.envs.base import Env
from roll.envs.env_registry import EnvLoadError, bare_env, build_env, env_spec, load_env
from roll.envs.frozen_lake import FrozenLake
from roll.envs.wrappers import EnvSpec

OWN = """
from roll.envs.base import Env, Observation, StepResult
made = 0

class Echo(Env):
    def __init__(self, *, times, loud=False):
        if times < 1:
            raise ValueError(f"times: got {times}, expected at least 1")
    def reset(self, seed, options):
        return Observation.of("say something")
    def step(self, action):
        return StepResult(reward=float(len(action)), terminated=True, metrics={"success": 1})

class Unfinished(Env):
    def reset(self, seed, options):
        return Observation.of("")

class Needs(Echo):
    def __init__(self):
        raise ValueError("needs a file that isn't there")

class Foreign:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own_env.py"
    file.write_text(OWN)
    return str(file)


@pytest.mark.parametrize("env_type", ENVS)
def test_every_id_is_a_class_and_has_a_version(env_type):
    assert issubclass(load_env(env_type), Env)
    assert env_type.rpartition("-v")[2].isdigit()


@pytest.mark.parametrize("env_type", ENVS)
def test_the_page_of_environments_names_every_argument(env_type):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf-8")
    section = page.split(f"### `{env_type}`")[1].split("\n#")[0]
    documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.+?) \|", section, re.MULTILINE))))
    assert documented == set(inspect.signature(load_env(env_type)).parameters)


def test_a_class_is_found_by_module_and_by_file(own):
    assert load_env("roll.envs.frozen_lake:FrozenLake") is FrozenLake
    assert load_env(f"{own}:Echo") is load_env(f"{own}:Echo")


def test_an_episode_is_played_against_the_wrapped_environment(own):
    spec = EnvSpec(tag="echo", env_type=f"{own}:Echo", env_config={"times": 1}, max_steps=1)
    env = build_env(pickle.loads(pickle.dumps(spec)))
    env.reset(0, {})
    assert env.step("<answer>abc</answer>").reward == 3
    env.reset(0, {})
    assert env.step("abc").truncated


def test_a_spec_has_the_rules_of_its_section():
    section = CustomEnv(
        env_type="frozen_lake-v1",
        env_config={"size": 5},
        max_steps=7,
        max_actions_per_step=2,
        action_separator=";",
        action_lookup={"west": "Left"},
        thinking_tags=("<think>", "</think>"),
    )
    spec = env_spec("lake", section, EnvManager(format_penalty=-0.5, invalid_action_penalty=-0.25))
    assert spec == EnvSpec(
        tag="lake",
        env_type="frozen_lake-v1",
        env_config={"size": 5},
        max_steps=7,
        action_separator=";",
        action_lookup={"west": "Left"},
        max_actions_per_step=2,
        thinking_tags=("<think>", "</think>"),
        format_penalty=-0.5,
        invalid_action_penalty=-0.25,
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"env_type": "sokobann-v1"}, "custom_envs.x.env_type: .*did you mean 'sokoban-v1'"),
        ({"env_type": "zzz"}, "known: countdown-v1, endpoint, frozen_lake-v1"),
        ({"env_type": "frozen_lake-v1", "env_config": {"sise": 4}}, "x.env_config.sise: .*did you mean 'size'"),
        ({"env_type": "question_answer-v1"}, "custom_envs.x.env_config.file_name: missing"),
        ({"env_type": "no.such:Thing"}, "custom_envs.x.env_type: can't import 'no.such'"),
        ({"env_type": "no_such.py:Thing"}, "there is no file 'no_such.py'"),
        ({"env_type": "{own}:Eco"}, "no class 'Eco'; did you mean 'Echo'"),
        ({"env_type": "{own}:Foreign"}, "derive its class from roll.envs.base.Env"),
        ({"env_type": "{own}:Unfinished"}, "Unfinished lacks step"),
    ],
)
def test_a_section_that_makes_no_environment_is_refused_by_key(own, section, message):
    section["env_type"] = section["env_type"].replace("{own}", own)
    with pytest.raises(ValueError, match=message):
        env_spec("x", CustomEnv(**section), EnvManager())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            EnvSpec(tag="x", env_type="frozen_lake-v1", env_config={"size": "4"}),
            "env_config.size: got '4', expected a whole number",
        ),
        (EnvSpec(tag="x", env_type="{own}:Echo", env_config={"times": 0}), "times: got 0"),
        (EnvSpec(tag="x", env_type="{own}:Echo", env_config={"times": "two"}), "TypeError"),
        (EnvSpec(tag="x", env_type="frozen_lake-v1", action_lookup={"u": "N"}), "x.action_lookup: .*'N'"),
        (EnvSpec(tag="x", env_type="{own}:Needs"), "Needs can't be made without arguments: needs a file"),
    ],
)
def test_arguments_that_a_class_refuses_are_named(own, spec, message):
    spec = EnvSpec(
        tag=spec.tag,
        env_type=spec.env_type.replace("{own}", own),
        env_config=spec.env_config,
        max_steps=spec.max_steps,
        action_lookup=spec.action_lookup,
    )
    with pytest.raises(EnvLoadError, match=message):
        build_env(spec)


def test_a_file_that_fails_to_import_says_so_and_can_be_mended(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(EnvLoadError, match=r"broken.py' fails to import: ZeroDivisionError"):
        load_env(f"{file}:Echo")
    file.write_text(OWN)
    assert issubclass(load_env(f"{file}:Echo"), Env)


def test_the_bare_environment_takes_its_own_actions():
    env = bare_env(EnvSpec(tag="x", env_type="frozen_lake-v1"))
    env.reset(0, {})
    assert env.step("Down").reward == 0
