"""The whole loop against a reward model: it is learned from, its scores depend on nothing but the response, and its
failures are statuses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from same_runs import comparable
from tiny_classifiers import build_case_lover, build_tiny_classifier
from toy import run_toy, write_toy

from roll.distributed.worker_errors import WorkerRefused
from roll.rollout.episode_groups import FilterBudgetExhausted

MODEL = ("rewards.case.name=reward_model", "custom_reward_function=null", "reward_model.template=plain")
"""Score by the model alone, of the text without any template's tail."""
COMBINED = ("rewards.case.rule_weight=0.5", "rewards.case.reward_model_weight=0.25", "reward_model.template=plain")

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def case_lover(tmp_path_factory) -> Path:
    return build_case_lover(tmp_path_factory.mktemp("case_lover"))


def dropped(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "output" / "logs" / "dropped.jsonl").read_text().splitlines()]


def test_a_policy_learns_what_the_reward_model_likes(tiny_model, case_lover, tmp_path):
    rows = run_toy(write_toy(tmp_path, tiny_model), *MODEL, f"reward_pretrain={case_lover}", "max_steps=30")
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards[:2]) < 0
    assert fmean(rewards[-3:]) > 0.9
    assert all(row["reward/case/part/reward_model"] == pytest.approx(row["reward/mean"]) for row in rows)


def test_rule_and_model_are_combined_by_their_weights_and_logged_apart(tiny_model, case_lover, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    (folder / "case_reward.py").write_text(
        "from roll.rewards.base import Reward\n"
        "def case(response, task):\n    return Reward(3.0 * response[:1].isdigit(), {'digits': 7.0})\n"
    )
    from rollout_files import read_rollouts

    run_toy(
        folder, *COMBINED, "max_steps=1", f"reward_model.model_args.model_name_or_path={case_lover}",
        f"rollout_dump_dir={folder}/dump",
    )  # fmt: skip
    rollouts = read_rollouts(folder / "dump" / "rollouts-000001.parquet")
    for row in rollouts:
        text = row.response
        for special in SPECIAL:
            text = text.replace(special, "")
        rule, model = 3.0 * text[:1].isdigit(), 1.0 if text[-1:].islower() else -1.0
        assert row.reward_parts == pytest.approx({"digits": 7.0, "rule": rule, "reward_model": model}), row.response
        assert row.reward == pytest.approx(0.5 * rule + 0.25 * model)
    assert len({row.reward for row in rollouts}) > 2


@pytest.mark.parametrize("batching", [(), ("reward_model.infer_batch_size=4",)], ids=["alone", "batched"])
def test_two_runs_of_one_seed_are_equal_to_the_bit(tiny_model, tmp_path, batching):
    path = build_tiny_classifier(tmp_path / "model")
    settings = (*MODEL, *batching, f"reward_pretrain={path}", "response_length=6", "max_steps=3")
    settings += ("actor_infer.generating_args.ignore_eos=false",)
    first = comparable(run_toy(write_toy(tmp_path / "one", tiny_model), *settings))
    assert first == comparable(run_toy(write_toy(tmp_path / "two", tiny_model), *settings))
    assert first[0]["reward/std"] > 0


def test_how_many_are_scored_at_once_changes_rounding_only(tiny_model, tmp_path):
    path = build_tiny_classifier(tmp_path / "model")
    settings = (*MODEL, f"reward_pretrain={path}", "max_steps=1")
    alone = run_toy(write_toy(tmp_path / "alone", tiny_model), *settings)[0]["reward/mean"]
    budget = ("reward_model.use_dynamic_batching_in_infer=true", "reward_model.max_tokens_per_microbatch_in_infer=64")
    for name, batching in {"rows": ("reward_model.infer_batch_size=7",), "tokens": budget}.items():
        row = run_toy(write_toy(tmp_path / name, tiny_model), *settings, *batching)[0]
        assert row["reward/mean"] == pytest.approx(alone, abs=1e-6)


def test_a_score_that_is_no_number_is_an_error_of_that_response_and_counted(tiny_model, tmp_path):
    model = build_case_lover(tmp_path / "model", nan_for="abcABC")
    folder = write_toy(tmp_path / "run", tiny_model)
    row = run_toy(folder, *MODEL, f"reward_pretrain={model}", "max_steps=1")[0]
    failed = row["rollout/failed_reward_error"]
    assert row["dropped/failed_response"] == failed > 0
    assert {entry["detail"] for entry in dropped(folder)} == {
        "error after 1 attempts: the reward model gave nan, expected a finite number"
    }
    # Those that remain have a score of 1 or -1: none of the failures was given a 0.
    assert row["rollout/responses"] == 64 - failed
    assert (row["reward/max"], row["reward/min"]) == pytest.approx((1.0, -1.0))


def test_a_text_beyond_the_limit_is_an_error_or_cut_and_counted(tiny_model, case_lover, tmp_path):
    # Prompts have 3 characters, responses up to 2.
    settings = (*MODEL, f"reward_pretrain={case_lover}", "reward_model.max_length=2", "max_steps=1")
    with pytest.raises(FilterBudgetExhausted, match="have 5 tokens for the reward model, more than its limit of 2"):
        run_toy(write_toy(tmp_path / "error", tiny_model), *settings, "max_num_gen_batches=1")
    left = run_toy(write_toy(tmp_path / "left", tiny_model), *settings, "reward_model.truncation=left")[0]
    assert left["reward/case/part/reward_model_truncated"] == 1.0
    settings = (*settings, "reward_model.truncation=left", "reward_model.max_length=5")
    whole = run_toy(write_toy(tmp_path / "whole", tiny_model), *settings)[0]
    assert whole["reward/case/part/reward_model_truncated"] == 0.0
    assert whole["reward/mean"] == left["reward/mean"]  # the end of the text is what counts here
    settings = (*settings, "reward_model.truncation=right", "reward_model.max_length=4")
    right = run_toy(write_toy(tmp_path / "right", tiny_model), *settings)[0]
    assert right["reward/mean"] != left["reward/mean"]


def test_a_model_without_a_chat_template_is_refused_before_any_model_is_loaded(tiny_model, tmp_path):
    path = build_case_lover(tmp_path / "model")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="'native' is the tokenizer's own chat template, and .* has none"):
        run_toy(write_toy(tmp_path, tiny_model), *MODEL[:2], "reward_model={}", f"reward_pretrain={path}")


def test_a_label_that_only_the_loaded_model_can_judge_is_refused_by_name(tiny_model, tmp_path):
    path = build_tiny_classifier(tmp_path / "model", labels=3)
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]  # as a hub id: nothing to read before it is loaded
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkerRefused, match="reward_model rank 0 failed in '__init__': .*3 outputs"):
        run_toy(write_toy(tmp_path, tiny_model), *MODEL, f"reward_pretrain={path}")
