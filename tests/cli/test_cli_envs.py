"""`roll envs`: what is printed, and the exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roll.cli.__main__ import main
from roll.configs.catalog.env_table import ENVS

DIAL = str(Path(__file__).parents[2] / "examples" / "custom_env" / "dial.py")

BROKEN = """
from roll.envs.base import Env, Observation, StepResult
class Broken(Env):
    actions = ("Go",)
    def __init__(self, *, fails=False):
        if fails:
            [][1]
    def reset(self, seed, options):
        return Observation.of("x")
    def step(self, action):
        return {}[action]
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def ran(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["envs", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_list_names_every_environment_and_its_arguments(capsys):
    status, out, _ = ran(capsys, "list")
    assert status == 0
    assert all(env_type in out for env_type in ENVS)
    assert "slippery=False" in out


def test_a_good_environment_passes_and_is_played(capsys):
    status, out, _ = ran(capsys, "test", f"{DIAL}:Dial", "--seeds=3", "highest=5", "--episodes=20")
    assert status == 0
    assert "same in another process" in out
    assert "ERROR" not in out
    assert "warning" not in out
    *_, random_row, solution_row, _ = out.splitlines()
    assert random_row.split()[1:4] == ["random", "│", "20"]
    assert solution_row.split()[1:6] == ["solution", "│", "20", "│", "100.0%"]


def test_sokoban_is_played_by_its_solver(capsys):
    status, out, _ = ran(capsys, "test", "sokoban-v1", "--seeds=2", "--episodes=10")
    assert status == 0
    *_, solution_row, _ = out.splitlines()
    assert solution_row.split()[1:6] == ["solution", "│", "10", "│", "100.0%"]


def test_a_broken_one_fails_with_the_line_and_without_a_traceback(capsys, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    status, out, err = ran(capsys, "test", f"{file}:Broken")
    assert status == 1
    assert "KeyError: 'Go'" in out
    assert "broken.py:11 in step" in out
    assert "Traceback" not in out + err


def test_a_constructor_that_raises_is_placed(capsys, tmp_path):
    file = tmp_path / "broken_init.py"
    file.write_text(BROKEN.replace("[][1]", "int('one')"))
    status, _, err = ran(capsys, "test", f"{file}:Broken", "fails=true")
    assert status == 2
    assert "broken_init.py:7 in __init__" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sokoban-v2"], "did you mean 'sokoban-v1'?"),
        (["frozen_lake-v1", "sise=5"], "env_config.sise: frozen_lake-v1 has no such argument"),
        (["frozen_lake-v1", "size"], "got 'size', expected key=value"),
        (["frozen_lake-v1", "size=1"], "size: got 1"),
        (["frozen_lake-v1", "--seeds=0"], "--seeds: got 0"),
        (["frozen_lake-v1", "--config=none.yaml"], "there is no file 'none.yaml'"),
        (["question_answer-v1"], "env_config.file_name: missing"),
    ],
)
def test_what_cannot_be_tested_is_said_in_a_line(capsys, arguments, message):
    status, _, err = ran(capsys, "test", *arguments)
    assert status == 2
    assert message in err


def test_arguments_may_come_from_a_file(capsys, tmp_path):
    alone, sections = tmp_path / "alone.yaml", tmp_path / "sections.yaml"
    alone.write_text("size: 3\nslippery: true\n")
    sections.write_text("custom_envs:\n  lake:\n    env_type: frozen_lake-v1\n    env_config: {size: 3}\n")
    status, out, _ = ran(capsys, "test", "frozen_lake-v1", "size=2", f"--config={alone}", "--seeds=2", "--episodes=2")
    assert (status, "frozen_lake-v1 size=2 slippery=True" in out) == (0, True)
    status, out, _ = ran(capsys, "test", "lake", f"--config={sections}", "--seeds=2", "--episodes=2")
    assert (status, "frozen_lake-v1 size=3" in out) == (0, True)
    status, _, err = ran(capsys, "test", "sea", f"--config={sections}")
    assert (status, "has no tag 'sea'; it has lake" in err) == (2, True)


MISTAKES = [
    ("size: [", [], "no YAML"),
    ("custom_envs: {x: {env_config: {}}}", [], "custom_envs.x.env_type: "),
    ("custom_envs: {x: {env_type: 3}}", [], "custom_envs.x.env_type: "),
    ("custom_envs: {x: {env_type: frozen_lake-v1, env_config: 5}}", [], "custom_envs.x.env_config: got 5"),
    ("custom_envs: {x: frozen_lake-v1}", [], "custom_envs.x: got"),
    ("custom_envs: 5", [], "custom_envs in"),
    ("custom_envs: {x: {env_type: frozen_lake-v1}}", ["size=["], "size=[ is no YAML"),
]


@pytest.mark.parametrize(("text", "arguments", "message"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_in_the_file_or_an_argument_ends_with_2(capsys, tmp_path, text, arguments, message):
    file = tmp_path / "envs.yaml"
    file.write_text(text)
    status, _, err = ran(capsys, "test", "x", f"--config={file}", *arguments)
    assert (status, message in err) == (2, True), err


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "roll.cli", "envs", "test", "nothing"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "error: env_type: no environment 'nothing'" in done.stderr


def test_an_episode_is_printed_as_the_policy_sees_it(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
custom_envs:
  dial:
    env_type: {DIAL}:Dial
    env_config: {{highest: 5}}
    system_template: "Play this. {{instructions}}"
    turn_template: "Turn {{step}} of {{max_steps}}: {{observation}}"
    max_steps: 4
    action_pattern: "I say (.*)"
"""
    )
    status, out, _ = ran(capsys, "test", "dial", f"--config={file}", "--seeds=2", "--episodes=2")
    assert status == 0
    shown = out.partition("One episode as the policy sees it (seed ")[2].splitlines()
    assert shown[1] == "[system]"
    assert shown[2].startswith("Play this. A secret number is between 1 and 5.")
    assert shown[shown.index("[user]") + 1] == "Turn 1 of 4: Guess."
    assert shown[shown.index("[assistant]") + 1].startswith("I say ")
    assert "[reward 1, terminated, success 1]" in shown


def test_recorded_responses_are_played(capsys, tmp_path):
    file = tmp_path / "said.txt"
    file.write_text("I don't know\n<answer>1</answer>\n")
    status, out, _ = ran(capsys, "test", f"{DIAL}:Dial", "--seeds=2", "--episodes=2", f"--responses={file}")
    assert status == 0
    assert "2 responses in 1 episodes" in out
    assert "1 responses without an action" in out
    status, _, err = ran(capsys, "test", f"{DIAL}:Dial", f"--responses={tmp_path / 'none.jsonl'}")
    assert (status, "--responses: there is no file" in err) == (2, True)


def test_another_interpreter_is_the_option_s_or_the_file_s(capsys, tmp_path):
    status, _, err = ran(capsys, "test", "frozen_lake-v1", "--python=no-such-python")
    assert (status, "--python: there is no program 'no-such-python'" in err) == (2, True)
    file = tmp_path / "run.yaml"
    file.write_text("custom_envs: {lake: {env_type: frozen_lake-v1}}\nenv_workers: {python: nowhere/python}\n")
    status, _, err = ran(capsys, "test", "lake", f"--config={file}")
    assert (status, "env_workers.python: there is no program 'nowhere/python'" in err) == (2, True)


def test_scores_that_take_too_long_are_left_out(capsys, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\nfrom roll.envs.base import Env, Observation, StepResult\n"
        "class Slow(Env):\n    actions = ('a',)\n"
        "    def reset(self, seed, options):\n        return Observation.of(str(seed))\n"
        "    def step(self, action):\n        time.sleep(0.05)\n"
        "        return StepResult(reward=0.0, terminated=False, observation=Observation.of('x'))\n"
    )
    status, out, _ = ran(capsys, "test", f"{file}:Slow", "--seeds=2", "--steps=5", "--check_s=1", "--episodes=99")
    assert status == 0
    assert "no scores: not done after 1 s" in out
