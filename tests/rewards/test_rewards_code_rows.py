"""`code` on the rows of the usual data sets: all of a row's tests count, or the row is refused by name."""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from code_rows import (
    ADD,
    ADD_STDIN,
    CHEAT,
    CHEAT_STDIN,
    ROWS,
    STDIN_PRIVATE,
    STDIN_PUBLIC,
    UNREAD,
    livecodebench,
    packed,
)

from roll.isolation.sandbox.base import Sandbox
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.rewards import code_numpy, code_tests
from roll.rewards.code import code
from roll.rewards.code_tests import BrokenTask, SourceTests, read_tests
from roll.types.trajectory import Task


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox("unconfined") as opened:
        yield opened


def task(**columns: Any) -> Task:
    return Task(id="t:1", source="t", payload=columns, seed=0, tag="t", domain="code")


def score(program: str, columns: dict[str, Any], sandbox: Sandbox, **options: Any) -> float:
    return code(f"```python\n{program}```", task(**columns), sandbox=sandbox, **options).value


@pytest.mark.parametrize("name", ROWS)
def test_a_row_pays_the_right_program_and_not_one_that_knows_the_public_answer(name: str, sandbox: Sandbox) -> None:
    columns, right, cheat = ROWS[name]
    assert score(right, columns, sandbox) == 1.0
    assert score(cheat, columns, sandbox) == 0.0
    assert score(cheat, columns, sandbox, score="fraction") < 1.0


@pytest.mark.parametrize("name", UNREAD)
def test_a_row_with_tests_that_are_not_read_is_refused_by_name(name: str, sandbox: Sandbox) -> None:
    columns, why = UNREAD[name]
    with pytest.raises(BrokenTask, match=why) as raised:
        score(ADD, columns, sandbox)
    assert "task 't:1'" in str(raised.value)


def test_a_named_ground_truth_counts_alone_but_public_tests_never_do(sandbox: Sandbox) -> None:
    columns = {**ROWS["MBPP+, allclose"][0], "ground_truth": ["assert add(1, 2) == 3"]}  # ground_truth: test_list
    assert score(CHEAT, columns, sandbox) == 1.0
    row = livecodebench(STDIN_PUBLIC, packed(STDIN_PRIVATE))
    columns = {**row, "ground_truth": row["public_test_cases"]}
    assert (score(CHEAT_STDIN, columns, sandbox), score(ADD_STDIN, columns, sandbox)) == (0.0, 1.0)


def test_private_tests_are_unpacked_without_loading_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[{"input": "é\\n"}]'
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(text, protocol)
        assert code_tests.unpacked(base64.b64encode(zlib.compress(pickled)).decode()) == text

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return eval, ("1 / 0",)

    for value in (Evil(), [text], (text, text), None, b"bytes"):
        with pytest.raises(ValueError, match=r"pickle"):
            code_tests.unpacked(base64.b64encode(zlib.compress(pickle.dumps(value))).decode())
    many = b"\x80\x04" + b"\x94" * 10_000 + b"."  # each stores the value before it; a thousandth of it when packed
    with pytest.raises(ValueError, match="more than 64 operations"):
        code_tests.unpacked(base64.b64encode(zlib.compress(many)).decode())
    monkeypatch.setattr(code_tests, "MAX_BYTES", 2**20)
    bomb = base64.b64encode(zlib.compress(pickle.dumps("x" * 2**24))).decode()
    with pytest.raises(ValueError, match="more than 1 MiB when it is unpacked"):
        code_tests.unpacked(bomb)
    with pytest.raises(ValueError, match="cut off"):
        code_tests.unpacked(base64.b64encode(zlib.compress(pickle.dumps(text))[:-5]).decode())


def test_the_program_never_sees_the_expected_results_of_a_loop() -> None:
    for name in ("MBPP+, allclose", "MBPP+, candidate", "HumanEval+, the reference"):
        tests = read_tests(task(**ROWS[name][0]))
        assert isinstance(tests, SourceTests)
        assert "results" not in tests.before
        assert "ref_func" not in tests.before
        assert "numpy" not in tests.before  # there is none where the program is


LOOPS = {
    "while": "i = 0\nwhile i < 3:\n    assert f(i) == i + 1\n    i += 1\n",
    "nested functions": "def inner(x):\n    assert f(x) == x + 1\ndef outer(x):\n    inner(x)\n"
    "for x in range(3):\n    outer(x)\n",
    "a call": "def run():\n    for x in (1, 2):\n        assert f(x) == x + 1\nrun()\n",
    "raising": "def same(a, b):\n    if a != b:\n        raise AssertionError(f'{a} {b}')\nsame(f(1), 2)\n",
    "under main": "if __name__ == '__main__':\n    for x in (1, 2):\n        assert f(x) == x + 1\n    print('ok')\n",
    "with and try": "import contextlib\nwith contextlib.suppress(KeyError):\n    assert f(1) == 2\n",
    "states between": "x = f(1)\nassert x == 2\nx = f(x)\nassert x == 3\nprint(x)\n",
}


@pytest.mark.parametrize("name", LOOPS)
def test_statements_that_assert_are_tests(name: str, sandbox: Sandbox) -> None:
    for columns in ({"test": LOOPS[name]}, {"ground_truth": LOOPS[name]}):
        assert score("def f(x):\n    return x + 1\n", columns, sandbox) == 1.0
        assert score("def f(x):\n    return 5\n", columns, sandbox) == 0.0
    almost = "def f(x):\n    return 2 if x == 1 else 0\n"  # right for 1 alone, which is all that two of them ask for
    assert score(almost, {"test": LOOPS[name]}, sandbox) == float(name in ("raising", "with and try"))


NUMPY = [
    ("np.allclose(f(), [1.0, 2.0])", "[1.0, 2.0 + 1e-9]", "[1.0, 2.1]"),
    ("np.allclose(f(), 1.0)", "1.0", "[1.0]"),  # numpy itself would spread the number over the list
    ("np.allclose(f(), [[1], [2]], atol=0.1)", "[[1.05], [2]]", "[[1.2], [2]]"),
    ("not np.allclose(f(), float('nan'))", "float('nan')", "None"),
    ("np.testing.assert_allclose(f(), float('nan')) is None", "float('nan')", "1.0"),
    ("np.isclose(f(), np.inf)", "float('inf')", "1e308"),
    ("np.array_equal(f(), [1, 2])", "(1, 2)", "[1, 3]"),
    ("np.testing.assert_almost_equal(f(), 0.3) is None", "0.1 + 0.2", "0.3001"),
    ("np.testing.assert_array_equal(f(), [1, 2]) is None", "[1, 2]", "[2, 1]"),
    ("not isinstance(f(), np.ndarray)", "1", "1 / 0"),
]


@pytest.mark.parametrize(("test", "right", "wrong"), NUMPY)
def test_a_stand_in_for_numpy_compares_plain_values(test: str, right: str, wrong: str, sandbox: Sandbox) -> None:
    columns = {"test": f"import numpy as np\nassert {test}\n"}
    assert score(f"def f():\n    return {right}\n", columns, sandbox) == 1.0
    assert score(f"def f():\n    return {wrong}\n", columns, sandbox) == 0.0


def test_the_stand_in_agrees_with_numpy_on_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    own = code_numpy._Functions(lambda: False)
    numbers = [0.0, -0.0, 1.0, 1 + 1e-6, 1e-9, float("inf"), float("-inf"), float("nan"), 1e300, -1, True, 1 + 1j]
    for a in numbers:
        for b in numbers:
            assert own.allclose(a, b) == bool(numpy.allclose(a, b)), (a, b)
            assert own.allclose(a, b, rtol=1e-7, atol=1e-6) == bool(numpy.allclose(a, b, rtol=1e-7, atol=1e-6)), (a, b)
            assert own.allclose([a, 1], [b, 1], equal_nan=True) == bool(numpy.allclose([a, 1], [b, 1], equal_nan=True))


def test_what_the_stand_in_lacks_makes_a_broken_task_that_names_it(sandbox: Sandbox) -> None:
    with pytest.raises(BrokenTask, match=r"module 'numpy' has no attribute 'linalg'"):
        score(
            "def f():\n    return 1\n", {"test": "import numpy as np\nnp.linalg.norm([1])\nassert f() == 1\n"}, sandbox
        )


def test_a_right_program_without_time_for_all_tests_is_told_apart(sandbox: Sandbox) -> None:
    many = {"inputs": ["1 2\n"] * 200, "outputs": ["3\n"] * 200}
    reward = code(f"```python\n{ADD_STDIN}```", task(ground_truth=many), sandbox=sandbox, total_s=0.3)
    assert (reward.value, reward.parts["timed_out"]) == (0.0, 1.0)


def test_columns_of_lists_beside_each_other_are_read() -> None:
    tests = read_tests(task(inputs=["1 2"], outputs=["3"]))
    assert (tests.inputs, tests.outputs) == (("1 2",), ("3",))  # type: ignore[union-attr]
    assert len(read_tests(task(public_test_cases=STDIN_PUBLIC, private_test_cases=STDIN_PRIVATE)).inputs) == 2  # type: ignore[union-attr]
