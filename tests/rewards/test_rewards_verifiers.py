"""Verifiers of reasoning-gym that execute the answer: in the sandbox, and only on plain answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from roll.configs.rules.verifier_rules import VERIFIERS_THAT_EXECUTE
from roll.configs.schema.worker_config import ProceduralTask
from roll.data.procedural import procedural_tasks
from roll.isolation.sandbox.base import Sandbox, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import SandboxOnDemand, open_sandbox
from roll.rewards.reasoning_gym import PAYLOAD_KEY, UnsafeVerifier, reasoning_gym
from roll.rewards.verifier_guard import GRAMMARS, is_plain_answer
from roll.rewards.verifiers_in_sandbox import SandboxedVerifier
from roll.types.trajectory import Task

PARAMETERS = {"composite": {"datasets": [DatasetSpec(name="chain_sum", weight=1, config={})]}}
NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        opened = open_sandbox("auto")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    with opened:
        yield opened


def one_task(dataset: str) -> Task:
    return procedural_tasks(ProceduralTask(tag=dataset, dataset=dataset, size=1), seed=1)[0]


def test_the_grammars_cover_the_verifiers_that_execute() -> None:
    assert set(GRAMMARS) == VERIFIERS_THAT_EXECUTE


@pytest.mark.parametrize("dataset", sorted(VERIFIERS_THAT_EXECUTE))
def test_a_hostile_answer_is_contained_and_scores_nothing(dataset: str, sandbox: Sandbox, tmp_path: Path) -> None:
    task, touched = one_task(dataset), tmp_path / "touched"
    gold = str(task.payload["ground_truth"])
    call = f"__import__('pathlib').Path({str(touched)!r}).touch()"
    verifier = SandboxedVerifier(sandbox, dataset, {})
    for attack in (call, f"[{call}, {gold!r}][1]", f"({call}, oracle_answer)[1]"):
        reward = reasoning_gym(attack, task, sandbox=sandbox, extract="whole", partial_credit=True)
        assert reward.value == 0.0
        # The guard aside, the sandbox holds: what the code writes is written nowhere.
        with contextlib.suppress(Exception):  # however it ends
            verifier.score_answer(attack, task.payload[PAYLOAD_KEY]["entry"])
        assert not touched.exists()
    assert reasoning_gym(gold, task, sandbox=sandbox, extract="whole").value == 1.0
    assert reasoning_gym("7", task, sandbox=sandbox).value == 0.0


def test_without_a_sandbox_the_answer_is_never_seen() -> None:
    task = one_task("countdown")
    with pytest.raises(UnsafeVerifier, match="needs a sandbox"):
        reasoning_gym(str(task.payload["ground_truth"]), task)


def test_other_verifiers_open_no_sandbox() -> None:
    class Closed(SandboxOnDemand):
        def _open(self) -> Sandbox:
            raise AssertionError("opened")

    task = one_task("chain_sum")
    assert reasoning_gym(str(task.payload["ground_truth"]), task, sandbox=Closed("auto")).value == 1.0


def test_a_composite_scores_by_the_verifier_of_the_entrys_dataset(sandbox: Sandbox) -> None:
    import reasoning_gym as library

    inner = [DatasetSpec(name=name, weight=1.0, config={}) for name in ("countdown", "spell_backward")]
    sources = set()
    for entry in library.create_dataset("composite", datasets=inner, size=6, seed=2):
        sources.add(entry["metadata"]["source_dataset"])
        payload = {"dataset": "composite", "config": {"datasets": inner}, "entry": entry}
        task = Task(id="t:1", source="t", payload={PAYLOAD_KEY: payload}, seed=0, tag="t", domain="d")
        assert reasoning_gym(str(entry["answer"]), task, sandbox=sandbox).value == 1.0
        assert reasoning_gym("print(24)", task, sandbox=sandbox).value == 0.0
    assert sources == {"countdown", "spell_backward"}


@pytest.mark.parametrize(
    ("answer", "grammar", "plain"),
    [
        ("[[0, 1], [1, 0]]", "values", True),
        ("0 1\n1 0", "values", True),
        ("['a', 'b']", "values", True),
        ("oracle_answer", "values", False),
        ("[x for x in 'ab']", "values", False),
        ("f'{open}'", "values", False),
        ("[" * 99 + "]" * 99, "values", True),
        ("(1 + 2) * 3 - 4/5", "arithmetic", True),
        ("2**3", "arithmetic", True),
        ("9**9**9", "arithmetic", False),
        ("x + 1", "arithmetic", False),
        ("0x18+0x0*1*2*3*4", "arithmetic", False),  # the verifiers count the numbers 1, 2, 3, 4 in it
        ("2_4+0_0*1*2*3*4", "arithmetic", False),
        ("24e0+0e0*1*2*3*4", "arithmetic", False),
        ("0x18 # 1 2 3 4", "arithmetic", False),
        ("5!", "arithmetic", False),
        ("'24'", "arithmetic", False),
        ("True", "arithmetic", False),
        ("24 if 1 else 0", "arithmetic", False),
        ("-exp(x)*sin(2*x)/2 + x**(3/2) + C", "algebra", True),
        ("E**(2*x)", "algebra", True),
        ("x.diff(x)", "algebra", False),
        ("Integral(x, x)", "algebra", False),  # not solved, though its derivative is right
        ("sin(*[x])", "algebra", False),
        ("__import__('os')", "algebra", False),
        ("__class__", "algebra", False),
        ("lambda: x", "algebra", False),
        ("(x := 1)", "algebra", False),
        ("x[0]", "algebra", False),
        ("-" * 9_000 + "1", "algebra", False),
    ],
)
def test_the_guard_lets_plain_answers_through(answer: str, grammar: Any, plain: bool) -> None:
    assert is_plain_answer(answer, grammar) is plain


def references(dataset: str, count: int) -> Iterator[tuple[Any, dict[str, Any], str]]:
    import reasoning_gym as library

    scorer = library.create_dataset(dataset, **PARAMETERS.get(dataset, {}), size=count, seed=5)
    for i in range(count):
        entry = scorer[i]
        yield scorer, entry, entry["answer"]


def scores_alike(datasets: Sequence[str], count: int, sandbox: Sandbox) -> list[str]:
    """Return where a verifier scores a reference answer in the sandbox otherwise than outside."""
    different, without = [], set()
    for dataset in datasets:
        inside = SandboxedVerifier(sandbox, dataset, PARAMETERS.get(dataset, {}))
        for scorer, entry, answer in references(dataset, count):
            if answer is None:
                without.add(dataset)
                continue
            outside = float(scorer.score_answer(answer, entry))
            if inside.score_answer(answer, entry) != outside:
                different.append(f"{dataset}: {json.dumps(answer)}")
    assert without == NO_REFERENCE & set(datasets)
    return different


def test_every_verifier_that_executes_scores_references_in_the_sandbox_as_outside(sandbox: Sandbox) -> None:
    assert scores_alike(sorted(VERIFIERS_THAT_EXECUTE), 1, sandbox) == []


def test_every_verifier_scores_three_reference_answers_in_the_sandbox_as_outside(sandbox: Sandbox) -> None:
    assert scores_alike(sorted(DATASETS), 3, sandbox) == []


def test_every_verifier_scores_twenty_reference_answers_in_the_sandbox_as_outside(sandbox: Sandbox) -> None:
    assert scores_alike(sorted(DATASETS), 20, sandbox) == []
