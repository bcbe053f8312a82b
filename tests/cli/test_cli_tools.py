"""`roll tools`: what is printed, and the exit status."""

from __future__ import annotations

import pytest

from roll.cli.__main__ import main

JOB = """
pipeline: rlvr
pretrain: some/model
max_steps: 1
tools: [{name: calculator}, {name: double, path: own.py:double}]
rewards: {math: {name: math_rule, tools: [calculator, double]}}
actor_train: {data_args: {file_name: a.jsonl}}
"""
OWN = '''
def double(x: int) -> str:
    """Double a number.

    Args:
        x: the number
    """
    return str(2 * x)
'''


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "job.yaml").write_text(JOB)
    return "job.yaml"


def test_tools_of_a_configuration_are_shown_and_called(job, capsys):
    assert main(["tools", "test", job, "--call", 'double={"x": 21}']) == 0
    told = capsys.readouterr().out
    assert '"name": "double"' in told and '"description": "the number"' in told
    assert told.count("│ ok") == 2 and "│ 42" in told


def test_a_call_that_fails_is_an_exit_code_and_one_that_is_not_made_is_said(job, capsys):
    assert main(["tools", "test", job]) == 0
    assert "give it arguments: --call 'double={...}'" in capsys.readouterr().out
    assert main(["tools", "test", job, "--call", 'double={"y": 1}']) == 1
    assert "wrong arguments" in capsys.readouterr().out
    assert main(["tools", "test", job, "--call", "doubl={}"]) == 2
    assert "there is no tool 'doubl'" in capsys.readouterr().err


def test_built_in_tools_are_listed_and_a_job_without_tools_is_refused(job, capsys):
    assert main(["tools", "list"]) == 0
    assert "session=False" in capsys.readouterr().out
    assert main(["tools", "test", job, "tools=[]", "rewards.math.tools=[]"]) == 2
    assert "there are no tools in it" in capsys.readouterr().err
