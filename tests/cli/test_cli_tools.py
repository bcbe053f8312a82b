"""`roll tools`: what is printed, and the exit status."""

from __future__ import annotations

from pathlib import Path

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


def test_the_example_of_the_page_does_what_the_page_says(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/tools.md").read_text()
    (code,) = [block for block in page.split("```python\n")[1:] if "def lookup(" in block.split("```")[0]]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(code.split("```")[0])
    (tmp_path / "my_words.txt").write_text("tree: a plant\nstone: none\n")
    tool = "tools: [{name: lookup, path: my_tools.py:lookup, options: {file: my_words.txt}, timeout_s: 5}]"
    old = "tools: [{name: calculator}, {name: double, path: own.py:double}]"
    (tmp_path / "job.yaml").write_text(JOB.replace(old, tool).replace("[calculator, double]", "[lookup]"))
    assert main(["tools", "test", "job.yaml", "--call", 'lookup={"word": "tree"}']) == 0
    told = capsys.readouterr().out
    assert "│ tree: a plant" in told and '"limit"' in told and '"file"' not in told


def test_keyword_only_arguments_are_the_configurations(job, capsys, tmp_path):
    code = OWN.replace("(x: int)", "(x: int, *, times: int, file: str = 'a')").replace(
        "str(2 * x)", "str(x * times) + file"
    )
    (tmp_path / "own.py").write_text(code)
    assert main(["check", job, "num_nodes=1"]) == 2
    told = capsys.readouterr().err
    assert "tools[1].options.times: expected an argument of own.py:double: it has no default, and the policy" in told
    call = ["tools", "test", job]
    tools = "tools=[{name: calculator}, {name: double, path: 'own.py:double', options: {times: 3}}]"
    assert main([*call, tools, "--call", 'double={"x": 7}']) == 0
    told = capsys.readouterr().out
    assert "│ 21a" in told and '"times"' not in told and '"file"' not in told
    for hidden in ("times", "file"):
        assert main([*call, tools, "--call", f'double={{"x": 7, "{hidden}": 9}}']) == 1
        assert f"there is no argument '{hidden}'" in capsys.readouterr().out
