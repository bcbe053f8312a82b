"""`env_workers.python`: environments under an interpreter that has other packages, or none at all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll.configs.schema.env_config import CustomEnv, EnvManager
from roll.envs.base import InvalidAction, ResetNeeded
from roll.envs.env_pool import EnvPool
from roll.envs.env_registry import EnvLoadError, bare_env, build_env, env_spec
from roll.envs.wrappers import EnvSpec
from roll.isolation.processes.interpreter import own_entries, resolve_interpreter

OWN = """
import sys
import only_there
from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult

class Asks(Env):
    actions = ("Yes", "No")
    def __init__(self, *, answer="Yes"):
        self.instructions = f"{sys.prefix} {only_there.WORD}"
        self.answer, self.open = answer, False
    def reset(self, seed, options):
        self.open = True
        return Observation.of(f"seed {seed}, {sorted(options)}, numpy {'numpy' in sys.modules}")
    def step(self, action):
        if not self.open:
            raise ResetNeeded("reset first")
        if action not in self.actions:
            raise InvalidAction(f"{action} is neither")
        if action == "No":
            raise IndexError("no such luck")
        self.open = False
        return StepResult(reward=1.5, terminated=True, metrics={"success": 1})
    def solution(self, max_actions):
        return [self.answer]
    def render(self):
        return "a picture in words"
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with no packages but one of its own."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("WORD = 'there'\n")
    return str(folder / "bin" / "python")


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own_env.py").write_text(OWN)
    return f"{tmp_path / 'own_env.py'}:Asks"


@pytest.fixture
def spec(own: str, bare_python: str) -> EnvSpec:
    section = CustomEnv(env_type=own, action_pattern=None)
    return env_spec("asks", section, EnvManager(), bare_python)


def test_an_environment_is_held_there_and_asked_from_here(spec: EnvSpec):
    env = bare_env(spec)
    assert env.actions == ("Yes", "No")
    prefix, word = env.instructions.split()
    assert word == "there" and Path(prefix) != Path(sys.prefix)
    assert env.reset(2**62, {"level": 3}).text == f"seed {2**62}, ['level'], numpy False"
    assert env.solution(9) == ["Yes"] and env.render() == "a picture in words"
    with pytest.raises(InvalidAction, match="Maybe is neither"):
        env.step("Maybe")
    assert env.step("Yes").metrics == {"success": 1.0}
    with pytest.raises(ResetNeeded):
        env.step("Yes")
    env.reset(0, {})
    with pytest.raises(RuntimeError, match=r"(?s)IndexError: no such luck.*own_env.py"):
        env.step("No")
    env.close(), env.close()


def test_episodes_of_the_pool_are_played_there(spec: EnvSpec):
    async def episode(pool: EnvPool) -> tuple[str, float]:
        seen = await pool.reset("one", "asks", 7, {})
        return seen.text, (await pool.step("one", "yes")).reward

    with EnvPool({"asks": spec}, num_processes=2) as pool:
        pool.wait_ready()
        assert asyncio.run(episode(pool)) == ("seed 7, [], numpy False", 1.5)


def test_a_response_is_read_here_for_an_environment_there(spec: EnvSpec):
    env = build_env(spec)
    env.reset(0, {})
    result = env.step("perhaps")
    assert result.metrics["invalid_actions"] == 1.0 and "'perhaps' is not an action" in result.observation.text
    env.close()


def test_what_is_missing_there_is_named_with_the_interpreter(bare_python: str, own: str):
    hub = EnvSpec(tag="cliff", env_type="gymnasium:CliffWalking-v1", python=bare_python)
    with pytest.raises(EnvLoadError, match=rf"needs the package gymnasium, which {bare_python} doesn't have"):
        bare_env(hub)
    with EnvPool({"cliff": hub}) as pool, pytest.raises(EnvLoadError, match=rf"(?s)under {bare_python} .*gymnasium"):
        pool.wait_ready()
    unknown = EnvSpec(tag="asks", env_type=own, env_config={"answers": 1}, python=bare_python)
    with pytest.raises(EnvLoadError, match="custom_envs.asks.env_config.answers: .*did you mean 'answer'"):
        bare_env(unknown)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('Python 3.9 is too old')", "Python 3.9 is too old"),
        ("print('I am no interpreter')", "ended with exit code 0"),
    ],
)
def test_a_program_that_is_no_interpreter_is_named(tmp_path: Path, own: str, program: str, said: str):
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{program}\n")
    fake.chmod(0o755)
    with pytest.raises(EnvLoadError, match=rf"(?s)env_workers.python: {fake}.*{said}"):
        bare_env(EnvSpec(tag="asks", env_type=own, python=str(fake)))


def test_an_interpreter_is_a_path_or_a_name_and_a_missing_one_is_refused(tmp_path: Path, own: str):
    assert resolve_interpreter(sys.executable) == str(Path(sys.executable).absolute())
    assert resolve_interpreter("sh") is not None and resolve_interpreter(str(tmp_path)) is None
    with pytest.raises(EnvLoadError, match=r"env_workers.python: there is no program '/no/python'"):
        env_spec("asks", CustomEnv(env_type=own), EnvManager(), "/no/python")


@pytest.fixture
def installed() -> str:
    import numpy

    return str(Path(numpy.__file__).parents[1])


def test_another_interpreter_gets_the_users_folders_and_none_of_our_packages(installed: str, tmp_path: Path):
    path = [str(tmp_path), installed, os.path.dirname(os.__file__), "/usr/lib/python311.zip"]
    assert own_entries(path) == [str(tmp_path)]
