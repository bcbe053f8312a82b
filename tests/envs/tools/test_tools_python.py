"""The tool `python` in a real sandbox: values, errors, limits, sessions."""

from __future__ import annotations

import time

import pytest

from roll.envs.tools.python_tool import PythonSession, PythonTool
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.types.trajectory import Task

TASK = Task(id="t", source="s", payload={}, seed=0, tag="t", domain="d")


@pytest.fixture(scope="module")
def sandbox():
    with open_sandbox("auto") as opened:
        yield opened


def said(tool, code, state=None):
    return tool.call({"code": code}, state or PythonSession())


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(1)\n2 + 3", "1\n5"),
        ("x = 3", "(nothing was printed)"),
        ("None", "(nothing was printed)"),
        ("import sys\nprint('e', file=sys.stderr)\nsys.exit(1)", "e"),
        ("input()", "EOFError: EOF when reading a line"),
        ("def f():\n    return 1 / 0\nf()", 'File "<call 1>", line 2, in f\n    return 1 / 0'),
        ("1 +", "SyntaxError: invalid syntax"),
        ("open('/etc/passwd')", "Error"),
    ],
)
def test_code_gives_what_it_prints_and_the_value_of_its_last_expression(sandbox, code, shown):
    reply = said(PythonTool(sandbox), code)
    assert reply.text.endswith(shown) or shown in reply.text
    assert "python_program" not in reply.text and "run_piece" not in reply.text  # our frames
    assert not reply.is_error  # what the code raised is a result like others


def test_limits_are_told_to_the_policy(sandbox):
    tool = PythonTool(sandbox, seconds=0.5, memory_mb=128)
    begun = time.monotonic()
    slow = said(tool, "print('begun', flush=True)\nwhile True: pass")
    assert time.monotonic() - begun < 5 and slow.is_error
    assert slow.text == "begun\nError: it ran longer than 0.5 s and was stopped"
    assert "MemoryError" in said(tool, "x = [0] * 10**9").text
    loud = said(tool, "print('x' * 10**6)")
    assert loud.is_error and len(loud.text) < 70_000 and "printed too much" in loud.text
    assert said(tool, "import os; os._exit(3)").text == "Error: the process ended"


def test_calls_know_nothing_of_each_other_but_those_of_a_session_do(sandbox):
    alone, tool = PythonTool(sandbox), PythonTool(sandbox, session=True, seconds=1)
    assert not alone.keeps_state and tool.keeps_state
    said(alone, "x = 1")
    assert "NameError" in said(alone, "x").text
    one, other = tool.create(TASK, {}), tool.create(TASK, {})
    said(tool, "import math\nx = math.floor(41.5)", one)
    assert said(tool, "x + 1", one).text == "42"
    assert "NameError" in said(tool, "x", other).text
    late = said(tool, "while True: pass", one)
    assert late.is_error and late.text.endswith("The session begins afresh: its variables are gone.")
    assert "NameError" in said(tool, "x", one).text
    assert said(tool, "import sys; sys.stdout.write('no newline'); None", one).text == "no newline"
    for state in (one, other):
        running = state.running
        tool.close(state)
        assert not running.write(b"{}\n", 0.1)


def test_code_may_import_the_packages_of_the_options_alone(sandbox):
    assert "ModuleNotFoundError" in said(PythonTool(sandbox), "import numpy").text
    tool = PythonTool(sandbox, packages=["numpy"])
    assert said(tool, "import numpy\nnumpy.arange(3).sum().item()").text == "3"


def test_code_that_prints_a_mark_ends_nothing(sandbox):
    tool = PythonTool(sandbox, session=True)
    state = tool.create(TASK, {})
    assert said(tool, "print('0' * 32)\nprint('after')", state).text == f"{'0' * 32}\nafter"
    tool.close(state)
