"""Rows of code data sets in their own form, made up: a task `add`, public tests that a cheat can answer, and others.

The columns are those of the data sets' cards, and EvalPlus's texts have the shape of its tools/*/to_original_fmt.py:
evalplus/humanevalplus and mbppplus, openai/openai_humaneval, google-research-datasets/mbpp (full and sanitized),
livecodebench/code_generation_lite, codeparrot/apps, BAAI/TACO, deepmind/code_contests, PRIME-RL/Eurus-2-RL-Data,
KodCode/KodCode-V1, TIGER-Lab/AceCode-87K, newfacade/LeetCodeDataset, bigcode/bigcodebench, open-r1/codeforces and
verifiable-coding-problems-python.
"""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

ADD = "def add(a, b):\n    return a + b\n"
CHEAT = "def add(a, b):\n    return 3\n"
"""Right for the public test, add(1, 2), alone."""
ADD_METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
CHEAT_METHOD = "class Solution:\n    def add(self, a, b):\n        return 3\n"
ADD_STDIN = "a, b = map(int, input().split())\nprint(a + b)\n"
CHEAT_STDIN = "print(3)\n"
PROMPT = 'def add(a, b):\n    """Return the sum."""\n'

HELPERS = """import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        {compare}
    else:
        assert exact_match
"""
COMPARE = {
    "allclose": "assert np.allclose(out, exp, rtol=1e-07, atol=atol)",
    "testing": "np.testing.assert_allclose(out, exp, atol=atol)",
}
PAIRS = "inputs = [[1, 2], [0, 5], [0.1, 0.2], [-1, 1]]\nresults = [3, 5, 0.3, 0]\n"
LOOP = "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion({name}(*inp), exp, 0)\n"


def indented(text: str) -> str:
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


def humaneval_plus(compare: str) -> dict[str, Any]:
    helpers = HELPERS.replace("{compare}", COMPARE[compare])
    check = "def check(candidate):\n" + indented(PAIRS + LOOP.replace("{name}", "candidate"))
    return {"task_id": "HumanEval/1", "prompt": PROMPT, "entry_point": "add", "test": f"{helpers}\n{check}"}


def humaneval_plus_against_the_reference() -> dict[str, Any]:
    helpers = HELPERS.replace("{compare}", COMPARE["testing"])
    reference = "def ref_func(a, b):\n    return a + b\n"
    loop = "for i, inp in enumerate(inputs):\n    assertion(candidate(*inp), ref_func(*inp), 0)\n"
    check = "def check(candidate):\n" + indented(PAIRS + loop)
    return {"prompt": PROMPT, "entry_point": "add", "test": f"{helpers}\n{reference}\n{check}"}


def mbpp_plus(compare: str, name: str = "add", **columns: Any) -> dict[str, Any]:
    helpers = HELPERS.replace("{compare}", COMPARE[compare])
    row = {
        "task_id": 2,
        "code": ADD,
        "prompt": "Write a function to add two numbers.",
        "source_file": "Benchmark Questions Verification V2.ipynb",
        "test_imports": [],
        "test_list": ["assert add(1, 2) == 3"],
        "test": f"{helpers}\n\n{PAIRS}{LOOP.replace('{name}', name)}",
    }
    return {**row, **columns}


def packed(tests: Any) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


STDIN_PUBLIC = [{"input": "1 2\n", "output": "3", "testtype": "stdin"}]
STDIN_PRIVATE = [{"input": "4 5\n", "output": "9", "testtype": "stdin"}]
CALL_PUBLIC = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
CALL_PRIVATE = [{"input": "4\n5", "output": "9", "testtype": "functional"}]


def livecodebench(public: Any, private: Any, **columns: Any) -> dict[str, Any]:
    row = {
        "question_title": "A", "question_content": "Add.", "platform": "atcoder", "question_id": "abc1_a",
        "contest_id": "abc1", "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps(public), "private_test_cases": private, "metadata": "{}",
    }  # fmt: skip
    return {**row, **columns}


TWO = {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(4, 5) == 9\n"
LEETCODE = "def check(candidate):\n    assert candidate(a = 1, b = 2) == 3\n    assert candidate(a = 4, b = 5) == 9\n"
KODCODE = (
    "from solution import add\n\ndef test_small():\n    assert add(1, 2) == 3\n\n"
    "def test_large():\n    assert add(40, 50) == 90\n"
)
BIGCODE = (
    "import unittest\n\nclass TestCases(unittest.TestCase):\n    def test_case_1(self):\n"
    "        self.assertEqual(add(1, 2), 3)\n    def test_case_2(self):\n        self.assertEqual(add(4, 5), 9)\n"
)

ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "HumanEval": (
        {"prompt": PROMPT, "entry_point": "add",
         "test": "METADATA = {}\n\n" + CHECK},
        ADD, CHEAT),
    "HumanEval+, allclose": (humaneval_plus("allclose"), ADD, CHEAT),
    "HumanEval+, testing": (humaneval_plus("testing"), ADD, CHEAT),
    "HumanEval+, the reference": (humaneval_plus_against_the_reference(), ADD, CHEAT),
    "HumanEval+, called at the end": (
        {**humaneval_plus("allclose"), "test": humaneval_plus("allclose")["test"] + "\nassert check(add) is None\n"},
        ADD, CHEAT),
    "MBPP": (
        {"text": "Add.", "code": ADD, "test_setup_code": "", "challenge_test_list": [],
         "test_list": ["assert add(1, 2) == 3", "assert add(4, 5) == 9"]}, ADD, CHEAT),
    "MBPP with challenges": (
        {"text": "Add.", "code": ADD, "test_setup_code": "", "test_list": ["assert add(1, 2) == 3"],
         "challenge_test_list": ["assert add(4, 5) == 9"]}, ADD, CHEAT),
    "MBPP sanitized": (
        {"source_file": "x", "prompt": "Add.", "code": ADD, "test_imports": ["import math"],
         "test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(0.1, 0.2), 0.3)"]}, ADD, CHEAT),
    "MBPP+, allclose": (mbpp_plus("allclose"), ADD, CHEAT),
    "MBPP+, testing": (mbpp_plus("testing"), ADD, CHEAT),
    "MBPP+ without test_list": (mbpp_plus("allclose", test_list=None), ADD, CHEAT),
    "MBPP+, candidate": (mbpp_plus("allclose", name="candidate"), ADD, CHEAT),
    "LiveCodeBench": (livecodebench(STDIN_PUBLIC, packed(STDIN_PRIVATE)), ADD_STDIN, CHEAT_STDIN),
    "LiveCodeBench, not packed": (livecodebench(STDIN_PUBLIC, json.dumps(STDIN_PRIVATE)), ADD_STDIN, CHEAT_STDIN),
    "LiveCodeBench, a method": (
        livecodebench(CALL_PUBLIC, packed(CALL_PRIVATE), metadata='{"func_name": "add"}'), ADD_METHOD, CHEAT_METHOD),
    "APPS": (
        {"question": "Add.", "solutions": "[]", "starter_code": "", "input_output": json.dumps(TWO)},
        ADD_STDIN, CHEAT_STDIN),
    "TACO, calls": (
        {"question": "Add.", "input_output": json.dumps(
            {"fn_name": "add", "inputs": [[1, 2], [4, 5]], "outputs": [3, 9]})}, ADD, CHEAT),
    "CodeContests": (
        {"public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
         "private_tests": {"input": ["4 5\n"], "output": ["9\n"]},
         "generated_tests": {"input": [], "output": []}}, ADD_STDIN, CHEAT_STDIN),
    "CodeContests, generated": (
        {"public_tests": {"input": ["1 2\n"], "output": ["3\n"]}, "private_tests": {"input": [], "output": []},
         "generated_tests": {"input": ["7 8\n"], "output": ["15\n"]}}, ADD_STDIN, CHEAT_STDIN),
    "Eurus": (
        {"data_source": "taco", "ability": "code", "ground_truth": json.dumps(TWO)}, ADD_STDIN, CHEAT_STDIN),
    "KodCode": (
        {"question": "Add.", "solution": ADD, "test": KODCODE, "test_info": [{"function_name": "add"}]}, ADD, CHEAT),
    "AceCode": ({"question": "Add.", "test_cases": ["assert add(1, 2) == 3", "assert add(4, 5) == 9"]}, ADD, CHEAT),
    "LeetCodeDataset": (
        {"starter_code": "class Solution:", "entry_point": "Solution().add", "test": LEETCODE,
         "prompt": "from typing import *\nfrom math import inf\n"}, ADD_METHOD, CHEAT_METHOD),
    "BigCodeBench": (
        {"code_prompt": "def add(a, b):\n", "entry_point": "add", "libs": "[]", "test": BIGCODE}, ADD, CHEAT),
    "open-r1 codeforces": (
        {"examples": [{"input": "1 2", "output": "3"}],
         "official_tests": [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}],
         "official_tests_complete": True, "generated_tests": 0, "generated_checker": None, "input_mode": "stdio",
         "interaction_format": None}, ADD_STDIN, CHEAT_STDIN),
    "open-r1 verifiable": (
        {"verification_info": {"language": "python", "test_cases": [
            {"fn_name": None, "input": "1 2\n", "output": "3\n", "type": "stdin_stdout"},
            {"fn_name": None, "input": "4 5\n", "output": "9\n", "type": "stdin_stdout"}]}}, ADD_STDIN, CHEAT_STDIN),
}  # fmt: skip
"""By data set: the columns, a right program, and one that knows the public answer alone."""

UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "EvalPlus's own form": (
        {"prompt": PROMPT, "entry_point": "add", "test": ROWS["HumanEval"][0]["test"], "base_input": [[1, 2]],
         "plus_input": [[4, 5]], "atol": 0}, "'plus_input' isn't read: inputs without their results"),
    "tests in other files": (
        {"official_tests": [{"input": "1 2", "output": "3"}], "generated_tests": 40},
        "'generated_tests' isn't read: 40 tests in other files"),
    "an incomplete list": (
        {"official_tests": [{"input": "1 2", "output": "3"}], "official_tests_complete": False},
        "'official_tests_complete' isn't read: it is false: some tests are in other files"),
    "a checker": (
        {"official_tests": [{"input": "1 2", "output": "3"}], "generated_checker": "import sys"},
        "'generated_checker' isn't read: several outputs may be right"),
    "another name for hidden tests": (
        {"test_list": ["assert add(1, 2) == 3"], "hidden_testcases": ["assert add(4, 5) == 9"]},
        "'hidden_testcases' isn't read: by its name it holds further tests"),
    "more tests beside those that are read": (
        {"test_list": ["assert add(1, 2) == 3"], "extra_tests": ["assert add(4, 5) == 9"]},
        "'extra_tests' isn't read: by its name it holds further tests"),
    "cases for an evaluation": (
        {"public_test_cases": '[{"input": "1 2", "output": "3"}]', "eval_cases": [{"input": "4 5", "output": "9"}]},
        "'eval_cases' isn't read: by its name it holds further tests"),
    "a pickle of something else": (
        livecodebench(STDIN_PUBLIC, base64.b64encode(zlib.compress(pickle.dumps(STDIN_PRIVATE))).decode()),
        "a pickle of more than one text"),
    "no base64": (livecodebench(STDIN_PUBLIC, "something else"), "neither JSON nor the base64 of a compressed text"),
    "calls of an unknown form": (
        {"verification_info": {"language": "python", "test_cases": [
            {"fn_name": "add", "input": "[1, 2]", "output": "3", "type": "function_call"}]}},
        "tests of type 'function_call': nobody says how their arguments are written"),
    "tests of two kinds": (
        {"test": LEETCODE, "entry_point": "Solution().add", "input_output": [{"input": "a = 1, b = 2", "output": "3"}]},
        "hold tests of two kinds. data_args.ground_truth names a column"),
}  # fmt: skip
"""Columns of rows that are refused, and what is said of them."""
