"""Published runs come out of the plan as they were reported."""

from __future__ import annotations

import pytest
from planned import model_folder, plan_of, rlvr_job, sft_job
from published_cases import CASES, ROLLOUTS


@pytest.mark.parametrize("case", CASES)
def test_what_people_reported_of_training(tmp_path, case):
    told = CASES[case]
    model = model_folder(tmp_path / "model", told["model"])
    job = sft_job(model, ranks=told["ranks"], length=told["length"], strategy=told["strategy"], options=told["options"])
    plan = plan_of(tmp_path, job, told["devices"])
    assert plan.fits == told["fits"]
    if "where" in told:
        assert plan.tightest.name == told["where"]
    if "phase" in told:  # the first that is too much; a later one may be even more
        tight = plan.tightest
        assert next(use.phase for use in tight.uses if use.nbytes > (tight.capacity or 0)) == told["phase"]


@pytest.mark.parametrize("case", ROLLOUTS)
def test_what_people_reported_of_rollouts(tmp_path, case):
    told = ROLLOUTS[case]
    model = model_folder(tmp_path / "model", told["model"])
    slots = int(told["devices"].split(":")[1].split(",")[0])
    alone = {"val_only": True, "validation": {"data_args": {"file_name": "rows.jsonl"}}}
    alone["actor_infer"] = {"strategy_args": {"strategy_config": {"gpu_memory_utilization": 0.9}}}
    job = rlvr_job(model, slots=slots, **(alone if told.get("engine_alone") else {}))
    plan = plan_of(tmp_path, job, told["devices"])
    assert plan.fits == told["fits"]
    if "where" in told:
        assert plan.tightest.name == told["where"]
    if told.get("engine_alone"):
        assert "actor_infer" in plan.too_small
