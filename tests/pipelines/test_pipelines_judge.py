"""The whole loop against a judge on an engine of the run, and against several reward models at once."""

from __future__ import annotations

import pytest
from tiny_classifiers import build_case_lover
from toy import run_toy, write_toy


def test_two_reward_models_and_a_rule_add_up_by_name(tiny_model, tmp_path):
    first, second = (build_case_lover(tmp_path / name) for name in ("quality", "safety"))
    models = ", ".join(
        f"{name}: {{model_args: {{model_name_or_path: {path}}}, template: plain}}"
        for name, path in {"quality": first, "safety": second}.items()
    )
    row = run_toy(
        write_toy(tmp_path / "run", tiny_model), f"reward_models={{{models}}}", "rewards.case.rule_weight=0.5",
        "rewards.case.reward_models_weights={quality: 0.25, safety: 2.0}", "max_steps=1",
    )[0]  # fmt: skip
    part = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("reward/case/part/")}
    names = {name for name in part if "truncated" not in name}
    assert names == {"rule", "reward_models.quality", "reward_models.safety"}
    total = 0.5 * part["rule"] + 0.25 * part["reward_models.quality"] + 2.0 * part["reward_models.safety"]
    assert row["reward/mean"] == pytest.approx(total)
