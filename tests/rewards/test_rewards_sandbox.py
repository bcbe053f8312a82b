"""A reward function that asks for a sandbox gets the run's, or isn't called."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.schema.rl_config import UNCONFINED_HAZARD
from roll.isolation.sandbox.base import SandboxUnavailable
from roll.isolation.sandbox.mechanisms import MECHANISMS
from roll.rewards.base import RewardLoadError, RewardRequest, RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.rewards.reward_registry import load_reward
from roll.tracking.run_summary import RunSummary, render
from roll.types.trajectory import Task

TASK = Task(id="t:1", source="t", payload={}, seed=0, tag="t", domain="d")
OWN = """
from roll.isolation.sandbox.base import Limits, Program, SandboxError


def runs(response, task, *, sandbox, wall_s: float = 20.0):
    outcome = sandbox.run(Program(source=response), Limits(wall_s=wall_s))
    return float(outcome.exit_code == 0)


def breaks(response, task, *, sandbox):
    raise SandboxError("the sandbox broke")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "own.py")


def test_the_sandbox_of_the_run_is_given(own: str):
    reward = load_reward(RewardSpec(name=f"{own}:runs", kwargs={"wall_s": 30.0}, sandbox="unconfined"))
    assert (reward("x = 1", TASK).value, reward("1 / 0", TASK).value) == (1.0, 0.0)
    assert reward.sandbox is not None
    reward.sandbox.close()


def test_a_function_is_not_loaded_without_the_sandbox_that_it_asks_for(own: str, monkeypatch: pytest.MonkeyPatch):
    def broken(start: object) -> object:
        raise SandboxUnavailable("not here")

    for name in ("sandlock", "bwrap"):
        monkeypatch.setitem(MECHANISMS, name, broken)
    with pytest.raises(RewardLoadError, match=r"needs a sandbox.*sandlock: .*not here.*bwrap: .*not here"):
        load_reward(RewardSpec(name=f"{own}:runs"))
    with pytest.raises(RewardLoadError, match="expected auto, sandlock"):
        load_reward(RewardSpec(name=f"{own}:runs", sandbox="docker"))


def test_reward_kwargs_cannot_name_another_one(own: str):
    with pytest.raises(RewardLoadError, match="use the key `sandbox` at the top level"):
        load_reward(RewardSpec(name=f"{own}:runs", kwargs={"sandbox": "unconfined"}))


def test_a_sandbox_that_fails_is_a_status_and_no_score(own: str):
    specs = {"d": RewardSpec(name=f"{own}:breaks", sandbox="unconfined")}
    with RewardPool(specs, num_processes=1, retries=0) as pool:
        result = pool.submit(RewardRequest(id="1", domain="d", response="", task=TASK)).result(timeout=60)
    assert (result.status, result.reward) == ("error", None)
    assert "the sandbox broke" in result.error


def test_the_summary_repeats_that_nothing_contained(capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    empty: dict[str, float] = {}
    summary = RunSummary(
        exp_name="x", steps=1, wall_seconds=1.0, accuracy_before=empty, accuracy_after=empty, tokens=1,
        step_seconds=1.0, spans=empty, files={}, hazards=(UNCONFINED_HAZARD,),
    )  # fmt: skip
    Console(width=200).print(render(summary))
    assert UNCONFINED_HAZARD in capsys.readouterr().out
