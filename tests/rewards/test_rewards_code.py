"""`code`: formats of tests, right and wrong programs, and programs that try to forge their result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from roll.isolation.sandbox.base import Limits, Outcome, Program, Sandbox, SandboxError, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.rewards import code_run
from roll.rewards.base import Reward, RewardLoadError, RewardSpec
from roll.rewards.code import code
from roll.rewards.code_run import same_output, same_value
from roll.rewards.code_tests import BrokenTask
from roll.rewards.reward_registry import load_reward
from roll.types.trajectory import Task


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Programs of this file are ours, and what they try needs no containment: they look for answers, or say them."""
    with open_sandbox("unconfined") as opened:
        yield opened


def task(truth: Any = None, **columns: Any) -> Task:
    payload = {"ground_truth": truth, **columns}
    return Task(id="t:1", source="t", payload=payload, seed=0, tag="t", domain="code")


ASSERTS = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate([1], [2]) == [1, 2]\n"
PYTEST = """
import pytest
from solution import add

@pytest.mark.parametrize("a, b, c", [(1, 2, 3), (0.1, 0.2, pytest.approx(0.3))])
def test_sums(a, b, c):
    assert add(a, b) == c

@pytest.fixture
def one():
    return 1

class TestErrors:
    def test_types(self, one):
        with pytest.raises(TypeError, match="unsupported"):
            add(one, "a")
"""
UNITTEST = """
import unittest
from solution import add

class AddTest(unittest.TestCase):
    def setUp(self):
        self.one = 1

    def test_sum(self):
        self.assertEqual(add(self.one, 2), 3)
        with self.assertRaises(TypeError):
            add(1, "a")
        self.assertFalse(add(1, -1))
"""
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
ADD = "def add(a, b):\n    return a + b\n"
MINUS = "def add(a, b):\n    return a - b\n"
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"

FORMS = {
    "asserts": (ASSERTS, {}, ADD),
    "asserts as json": (json.dumps(ASSERTS), {}, ADD),
    "asserts as text": ("\n".join(ASSERTS), {}, ADD),
    "mbpp": (None, {"test_list": ASSERTS, "test_setup_code": "import math", "challenge_test_list": []}, ADD),
    "roll": ([{"assert_code": text} for text in ASSERTS], {}, ADD),
    "human eval": (None, {"test": CHECK, "entry_point": "add", "prompt": 'def add(a, b):\n    """Add."""\n'}, ADD),
    "check as json": (json.dumps({"test": CHECK, "entry_point": "add"}), {}, ADD),
    "pytest": ({"pytest": PYTEST}, {}, ADD),
    "unittest": (UNITTEST, {}, ADD),
    "stdin": (PAIRS, {}, PROGRAM),
    "stdin as json": (json.dumps(PAIRS), {}, PROGRAM),
    "input_output": (None, {"input_output": json.dumps(PAIRS)}, PROGRAM),
    "pairs": ([{"input": "1 2", "output": "3", "testtype": "stdin"}], {}, PROGRAM),
    "calls": (CALLS, {}, ADD),
    "calls of a class": (json.dumps(CALLS), {}, "class Solution:\n    def add(self, a, b):\n        return a + b\n"),
    "calls, a value a line": (
        [{"input": "1\n[2]", "output": "[1, 2]", "testtype": "functional"}],
        {"metadata": '{"func_name": "add"}'},
        "def add(a, b):\n    return (a, *b)\n",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tests_scores_a_right_program_one_and_wrong_ones_zero(form: str, sandbox: Sandbox) -> None:
    truth, columns, program = FORMS[form]
    right = code(f"I add them:\n```python\n{program}```\nDone.", task(truth, **columns), sandbox=sandbox)
    assert right == Reward(1.0, {"correct": 1.0, "passed": 1.0, "answered": 1.0, "timed_out": 0.0})
    wrong = program.replace("a + b", "a - b").replace("(a, *b)", "(*b, a)")
    assert code(wrong, task(truth, **columns), sandbox=sandbox).value == 0.0
    assert code("no program", task(truth, **columns), sandbox=sandbox).parts["answered"] == 0.0


def test_a_completion_goes_on_from_the_prompt_and_ends_where_something_else_begins(sandbox: Sandbox) -> None:
    row = task(test=CHECK, entry_point="add", prompt="ONE = 1\n\ndef add(a, b):\n    'Add.'\n")
    assert code("    return a + b\n\ndef main():\n    (unfinished", row, sandbox=sandbox).value == 1.0
    assert code("    return a - b\n", row, sandbox=sandbox).value == 0.0


def test_the_fraction_counts_tests_and_a_hang_costs_its_own_test_alone(sandbox: Sandbox) -> None:
    program = "def f(x):\n    while x == 1:\n        pass\n    return x\n"
    row = task(["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 4"])
    reward = code(program, row, sandbox=sandbox, score="fraction", timeout_s=1.0)
    assert (reward.value, reward.parts["timed_out"], reward.parts["correct"]) == (0.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("body", "test"),
    [
        ("return (1, 2.5, 'é\\ud800', None, True, b'\\xff', 1j)",
         "f() == (1, 2.5, 'é\\ud800', None, True, b'\\xff', 1j)"),
        ("return {1: {2}, (3,): frozenset({4})}", "f() == {1: {2}, (3,): frozenset({4})} and type(f()[1]) is set"),
        ("return [float('inf'), float('nan'), -0.0]", "f()[0] > 1 and f()[1] != f()[1] and str(f()[2]) == '-0.0'"),
        ("return 7 ** 9999", "f() == 7 ** 9999"),
        ("import decimal, fractions; return [decimal.Decimal('0.10'), fractions.Fraction(1, 3)]",
         "str(f()[0]) == '0.10' and f()[1] * 3 == 1"),
        ("import collections; return collections.Counter('aab')", "f().most_common(1) == [('a', 2)]"),
        ("yield 1; yield 2", "list(f()) == [1, 2]"),
        ("import itertools; return itertools.count(3)", "next(f()) == 3"),
        ("return lambda x: x + 1", "f()(1) == 2 and list(map(f(), [1, 2])) == [2, 3]"),
        ("return range(3)", "f() == range(3) and len(f()) == 3"),
    ],
)  # fmt: skip
def test_plain_values_and_functions_cross(body: str, test: str, sandbox: Sandbox) -> None:
    row = task([f"assert {test}"])
    assert code(f"def f():\n    {body}\n", row, sandbox=sandbox).value == 1.0, body
    assert code("def f():\n    return 0\n", row, sandbox=sandbox).value == 0.0


def test_objects_stay_with_the_program_and_are_used_from_afar(sandbox: Sandbox) -> None:
    stack = (
        "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n"
        "        self.items.append(x)\n    def pop(self):\n        return self.items.pop()\n"
        "    def __len__(self):\n        return len(self.items)\n"
    )
    lines = ["s = Stack()", "s.push(1)", "s.push(2)", "assert s.pop() == 2", "assert len(s) == 1", "s.items[0] = 5"]
    test = "\n".join([*lines, "assert s.pop() == 1"])
    assert code(stack, task([test]), sandbox=sandbox).value == 1.0
    assert code(stack.replace(".pop()", ".pop(0)"), task([test]), sandbox=sandbox).value == 0.0


def test_a_function_may_change_its_arguments_and_raise(sandbox: Sandbox) -> None:
    row = task(["a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]"])
    assert code("def f(a):\n    a.sort()\n", row, sandbox=sandbox).value == 1.0
    assert code("def f(a):\n    sorted(a)\n", row, sandbox=sandbox).value == 0.0
    row = task(
        ["try:\n    f(0)\n    raise RuntimeError\nexcept ZeroDivisionError as error:\n    assert 'zero' in str(error)"]
    )
    assert code("def f(a):\n    return 1 / a\n", row, sandbox=sandbox).value == 1.0
    assert code("def f(a):\n    return 0\n", row, sandbox=sandbox).value == 0.0


SECRET = "assert f(3) == 'x' * 3 + 'y'"
FORGERIES = {
    "exits well": "import os\nos._exit(0)",
    "exits well when called": "def f(x):\n    import os\n    os._exit(0)",
    "raises SystemExit": "def f(x):\n    raise SystemExit(0)",
    "is equal to everything": "class E:\n    def __eq__(self, o):\n        return True\n    __ne__ = lambda *a: 0\n"
    "def f(x):\n    return E()",
    "a text equal to everything": "class E(str):\n    def __eq__(self, o):\n        return True\n"
    "def f(x):\n    return E('z')",
    "a number equal to everything": "class E(int):\n    def __eq__(self, o):\n        return True\n"
    "def f(x):\n    return E(7)",
    "patches builtins": "import builtins\nbuiltins.len = builtins.all = lambda *a: True\n"
    "builtins.AssertionError = Exception\ndef f(x):\n    return 0",
    "patches unittest and operator": "import unittest, operator\nunittest.TestCase.assertEqual = lambda *a: None\n"
    "operator.eq = lambda *a: True\ndef f(x):\n    return 0",
    "brings its own builtins": "def len(x):\n    return 0\ndef str(x):\n    return 'xxxy'\ndef f(x):\n    return 0",
    "prints results": "print('[0, 0, [\"ok\", true]]')\nprint('{\"results\": []}')\n"
    "def f(x):\n    return 0",
    "writes results to every descriptor": "import os\nfor n in range(1, 64):\n    try:\n"
    "        os.write(n, b'{\"names\": [\"test 1\"], \"results\": [{\"test\": 0, '\n"
    "                    b'\"state\": \"passed\", \"requests\": []}]}\\n')\n"
    "    except OSError:\n        pass\ndef f(x):\n    return 0",
    "answers before it is asked": "import os\nfor n in range(1, 64):\n    try:\n"
    "        os.write(n, b'[\"loaded\"]\\n[0, 0, [\"ok\", true]]\\n[0, 1, [\"ok\", true]]\\n')\n"
    "    except OSError:\n        pass\n"
    "def f(x):\n    return 0",
    "looks for the answer in memory": "import gc, sys\ndef f(x):\n    frame = sys._getframe()\n    seen = []\n"
    "    while frame:\n        seen += [v for v in frame.f_locals.values() if isinstance(v, str)]\n"
    "        seen += [v for v in frame.f_globals.values() if isinstance(v, str)]\n        frame = frame.f_back\n"
    "    for item in gc.get_objects():\n        if isinstance(item, (list, dict)):\n"
    "            seen.append(repr(item)[:10000])\n"
    "    needles = ['* 3 ' + '+ ', 'xx' + 'xy']\n"
    "    return 'xxx' + chr(121) if any(n in t for n in needles for t in seen) else 0",
    "looks for the answer in files": "import os\ndef f(x):\n    for root, _, names in os.walk('.'):\n"
    "        for name in names:\n"
    "            if \"assert f\" in open(os.path.join(root, name), 'r', 1, 'latin1').read():\n"
    "                return 'x' * 3 + chr(121)\n    return 0",
    "raises what the tests raise": "def f(x):\n    class Skipped(BaseException):\n        pass\n    raise Skipped",
    "sends what isn't a value": "import json\n"
    "json.dumps = lambda *a, **k: '[0, 1, [\"ok\", [\"T\", \"__import__\"]]]'\n"
    "def f(x):\n    return 0",
    "sends values nested without end": "import json\n_real = json.dumps\njson.dumps = lambda *a, **k: "
    "'[0, 1, [\"ok\", ' + '[\"l\", [' * 900 + ']]' * 900 + ']]'\ndef f(x):\n    return 0",
    "never ends to print": "import sys\ndef f(x):\n    sys.stderr.write('x' * 10_000_000)\n    return 0",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_that_forges_its_result_scores_nothing(name: str, sandbox: Sandbox) -> None:
    program = FORGERIES[name]
    tests = [SECRET, "assert len(f(2)) == 3 and str(f(2)) == 'xxy'"]
    calls = {"fn_name": "f", "inputs": [[3]], "outputs": ["xxxy"]}
    assert code("import builtins\n" + program, task(tests), sandbox=sandbox, timeout_s=4.0).value == 0.0
    assert code("import builtins\n" + program, task(calls), sandbox=sandbox, timeout_s=4.0).value == 0.0


@pytest.mark.parametrize(
    ("truth", "columns", "problem"),
    [
        (None, {}, "no tests"),
        ([], {}, "no tests"),
        (["assert f( == 1"], {}, "can't be read"),
        (["x = 1"], {}, "none of its tests calls the program"),
        (["assert 1 == 2\nf(1)"], {}, "fails whatever"),
        ("def check(candidate): pass", {}, "entry_point"),
        ("def test_x(): pass", {}, "none of its tests calls"),
        (
            {"pytest": "import pytest\nfrom solution import f\n@pytest.mark.skip\ndef test_x():\n    f()"},
            {},
            "no tests",
        ),
        ({"inputs": ["1"], "outputs": []}, {}, "one length"),
        ({"inputs": [], "outputs": []}, {}, "one length"),
        ({"questions": []}, {}, "nothing is known"),
        (["import nowhere_to_be_found\nf()"], {}, "fails whatever"),
        ('{"inputs": [', {}, "can't be read"),
        (5, {}, "can't be read"),
    ],
)
def test_a_task_with_broken_tests_is_an_error_that_names_it(
    truth: Any, columns: dict[str, Any], problem: str, sandbox: Sandbox
) -> None:
    with pytest.raises(BrokenTask, match=f"'t:1'.*{problem}"):
        code("def f(x):\n    return x\n", task(truth, **columns), sandbox=sandbox)


def test_a_failure_of_the_sandbox_is_no_score() -> None:
    class Down:
        def run(self, *_: Any) -> Any:
            raise SandboxError("down")

    for truth in (PAIRS, CALLS, ["assert add(1, 1) == 2  # elsewhere"]):
        with pytest.raises(SandboxError, match="down"):
            code(ADD, task(truth), sandbox=Down())  # type: ignore[arg-type]


def test_options_are_checked_and_blocks_are_chosen(sandbox: Sandbox) -> None:
    row = task(["assert f() == 1"])
    both = "<think>```python\ndef f(): return 9\n```</think>```py\ndef f(): return 1\n```\n```\ndef f(): return 2\n```"
    assert code(both, row, sandbox=sandbox, extract="first_block").value == 1.0
    assert code(both, row, sandbox=sandbox).value == 0.0
    assert code("```sql\nselect 1\n```", row, sandbox=sandbox).parts["answered"] == 0.0
    for options in ({"score": "some"}, {"extract": "some"}, {"timeout_s": 0}, {"float_tolerance": -1}):
        with pytest.raises(ValueError, match="code:"):
            code("def f(): return 1", row, sandbox=sandbox, **options)  # type: ignore[arg-type]


def test_outputs_are_compared_by_lines_and_numbers_by_tolerance() -> None:
    assert same_output("1 \r\n2\n\n", "1\n2")
    assert not same_output("1\n2", "1 2")
    assert not same_output("0.3000001", "0.3")
    assert same_output("x 0.3000001", "x 0.3", 1e-6)
    assert not same_output("nan", "inf", 1e-6)
    assert same_value((1, [2.0000001]), [1, [2]], 1e-6)
    assert not same_value([1], [1, 2])
    assert same_value({1: 2}, {"1": 2})


def test_an_honest_program_passes_what_the_forgeries_fail(sandbox: Sandbox) -> None:
    program = "def f(x):\n    return 'x' * x + 'y'\n"
    for truth in ([SECRET], {"fn_name": "f", "inputs": [[3]], "outputs": ["xxxy"]}):
        assert code(program, task(truth), sandbox=sandbox).value == 1.0


def test_a_result_that_is_costly_to_compare_is_a_wrong_one(sandbox: Sandbox) -> None:
    row = task({"fn_name": "f", "inputs": [[]], "outputs": [{"1": 2}]})
    for result in ("{10 ** 5000: 1}", "7 ** 10 ** 6", "[[]] * 10 ** 6", "float('nan')"):
        assert code(f"def f():\n    return {result}\n", row, sandbox=sandbox, float_tolerance=0.1).value == 0.0
    assert code("def f():\n    return {1: 2.05}\n", row, sandbox=sandbox, float_tolerance=0.1).value == 1.0


def test_a_test_that_needs_no_program_is_worth_nothing(sandbox: Sandbox) -> None:
    row = task(["assert 1 == 1", "assert f(2) == 4"])
    assert code("```python\n(((\n```", row, sandbox=sandbox, score="fraction").parts["passed"] == 0.0
    assert code("def f(n): return n * n", row, sandbox=sandbox, score="fraction").value == 1.0


def test_the_program_has_the_classes_of_a_text_of_tests_and_not_its_solution(sandbox: Sandbox) -> None:
    row = task(
        "def norm(x): return x\nclass Box:\n    def __init__(self, x): self.x = norm(x)\n"
        "def brute(n): return n * n\nassert f(3) == brute(3)\nassert f(2) == Box(4).x"
    )
    assert code("def f(n): return brute(n)", row, sandbox=sandbox).value == 0.0
    assert code("def f(n): return Box(n * n).x", row, sandbox=sandbox).value == 1.0


@pytest.mark.parametrize("form", ["asserts", "human eval", "pytest"])
def test_calls_that_depend_on_no_answer_take_one_round(
    form: str, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Program] = []
    run = sandbox.run
    monkeypatch.setattr(sandbox, "run", lambda program, limits: [runs.append(program), run(program, limits)][1])
    truth, columns, program = FORMS[form]
    code_run._first_round.cache_clear()
    for expected in (3, 2):  # the tests by themselves, which the second response shares; the program; its tests
        runs.clear()
        assert code(program, task(truth, **columns), sandbox=sandbox).value == 1.0
        assert len(runs) == expected


def test_a_call_may_depend_on_twenty_answers_before_it(sandbox: Sandbox) -> None:
    # x -> 2x + 1 mod 7 from 1: 3, 0, 1, 3, 0, 1, ..., so x is 0 after 20 calls. What is made of an unknown answer can't
    # be asked for, so each round gives one more.
    row = task(["x = 1\nfor _ in range(20):\n    x = f(x + 0)\nassert x == 0"])
    assert code("def f(x): return (2 * x + 1) % 7", row, sandbox=sandbox, total_s=200.0).value == 1.0
    assert code("def f(x): return (2 * x + 2) % 7", row, sandbox=sandbox, total_s=200.0).value == 0.0


class Flooding(Sandbox):
    """Its program writes a million empty lines to the checker's descriptor."""

    name = "flooding"
    start = extended = None  # type: ignore[assignment]

    def run(self, program: Program, limits: Limits) -> Outcome:
        return Outcome(ending="exited", exit_code=0, stdout=b"\n" * 1_000_000, stderr=b"", seconds=0.0)

    def close(self) -> None:
        pass


def test_lines_that_nobody_asked_for_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(code_run, "_parse", read.append)
    row = task({"fn_name": "f", "inputs": [[1]], "outputs": [1]})
    assert code("def f(n): return n", row, sandbox=Flooding()).value == 0.0
    assert len(read) < 10


def test_a_sandbox_that_does_not_work_refuses_code_and_leaves_other_rewards_alone() -> None:
    with pytest.raises(RewardLoadError, match="code needs a sandbox"):
        load_reward(RewardSpec(name="code", sandbox="nowhere"))
    gym = load_reward(RewardSpec(name="reasoning_gym", sandbox="nowhere"))
    assert gym.sandbox is not None
    with pytest.raises(SandboxUnavailable):
        gym.sandbox.run(Program(source=""), Limits())
