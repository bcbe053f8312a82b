"""The whole loop against a judge on an engine of the run, and against several reward models at once."""

from __future__ import annotations

import pytest
from tiny_classifiers import build_case_lover
from toy import run_toy, write_toy

from roll.tracking.names import is_timing


def settings_of(model):
    return (
        "rewards.case.name=judge",
        "custom_reward_function=null",
        f"judge={{model_args: {{model_name_or_path: {model}}}, prompt: '{{response}}', max_length: 120, "
        "score_pattern: '([0-9])', score_max: 9, unparsed_score: 0.25, max_in_flight: 4, "
        "generating_args: {temperature: 0.0, max_new_tokens: 4}}",
        "response_length=3",
    )


def comparable(rows):
    return [{name: value for name, value in row.items() if not is_timing(name)} for row in rows]


def test_a_run_with_a_judge_of_its_own_resumes_to_the_bit(tiny_model, tmp_path):
    settings = (*settings_of(tiny_model), "save_steps=1", "rollout_batch_size=4", "rewards.case.weight=2")
    settings += ("actor_train.training_args.per_device_train_batch_size=16",)
    whole = run_toy(write_toy(tmp_path / "whole", tiny_model), *settings, "max_steps=3")
    assert whole[0]["judge/requests"] > 0
    assert whole[0]["judge/prompt_tokens"] > 0
    assert "judge/failures" not in whole[0]
    assert "reward/case/part/judge" in whole[0]
    parts = write_toy(tmp_path / "parts", tiny_model)
    run_toy(parts, *settings, "max_steps=1")
    resumed = run_toy(parts, *settings, "max_steps=3", "resume_from_checkpoint=auto")
    assert comparable(resumed) == comparable(whole)


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
