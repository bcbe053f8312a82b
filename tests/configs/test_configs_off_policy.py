"""Samples of older weights are corrected for once: neither never nor twice."""

from __future__ import annotations

import pytest
from refused import check_refused

from roll.configs.catalog.loss_table import LOSSES, loss_of
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.policy_rules import loss_rules
from roll.configs.schema.policy_config import TrainInferCorrection
from roll.configs.schema.reward_config import RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig

FILTERS = TrainInferCorrection(importance_upper=None, ratio_high=5.0)


def wrong(**keys) -> list[str]:
    config = RLVRConfig(pipeline="rlvr", pretrain="p", rewards={"math": RewardConfig(name="math_rule")}, **keys)
    return [str(violation) for violation in loss_rules(config)]


@pytest.mark.parametrize("name", [*LOSSES, "mine.py:loss"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 2.0])
def test_generation_ahead_needs_a_correction_or_permission_to_go_without(name, ratio):
    keys = {"policy_loss": name, "async_generation_ratio": ratio}
    found = wrong(**keys)
    assert bool(found) == (ratio > 0 and not loss_of(name).corrects_staleness)
    for said in found:
        assert said.startswith(f"async_generation_ratio: got {ratio}, expected 0 with policy_loss {name}")
        assert "policy_loss=decoupled_ppo (or tis, topr, cispo)" in said
        assert "allow_uncorrected_async=true" in said
    assert not wrong(**keys, allow_uncorrected_async=True)
    assert not wrong(**keys, train_infer_correction=FILTERS)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_weight_is_never_applied_twice(ratio):
    keys = {"policy_loss": "decoupled_ppo", "async_generation_ratio": ratio}
    (said,) = wrong(**keys, train_infer_correction=TrainInferCorrection(importance_upper=2.0))
    assert said.startswith("train_infer_correction.importance_upper: got 2.0, expected null with policy_loss decoupled")
    assert "applied twice" in said
    assert "policy_loss=ppo" in said
    assert not wrong(**keys, train_infer_correction=FILTERS)
    assert not wrong(policy_loss="ppo", train_infer_correction=TrainInferCorrection(importance_upper=2.0))


def test_the_dual_clip_belongs_to_the_losses_that_have_one(job):
    for loss in ("ppo", "decoupled_ppo"):
        assert load_config(job, "job", [f"policy_loss={loss}", "dual_clip_loss=true"]).dual_clip_loss
    expected = "acts only with policy_loss ppo or decoupled_ppo, and policy_loss is gspo"
    check_refused(job, ["policy_loss=gspo", "dual_clip_loss=true"], "dual_clip_loss", [expected])


def test_decoupled_ppo_and_its_cap_are_set_in_yaml(job):
    loaded = load_config(job, "job", ["policy_loss=decoupled_ppo", "decoupled_ppo_cap=1.5"])
    assert (loaded.policy_loss, loaded.decoupled_ppo_cap) == ("decoupled_ppo", 1.5)
    assert load_config(job, "job", ["decoupled_ppo_cap=null"]).decoupled_ppo_cap is None
    with pytest.raises(ConfigError, match="decoupled_ppo_cap"):
        load_config(job, "job", ["decoupled_ppo_cap=0"])


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"importance_upper": 2.0, "importance_lower": 3.0}, "importance_lower: got 3.0, expected at most"),
        ({"divergence": "k2"}, "divergence: got 'k2', expected a bound"),
        ({"importance_upper": None}, "a weight or a filter"),
    ],
)
def test_corrections_that_do_nothing_or_contradict_themselves(rule, said):
    (found,) = wrong(policy_loss="ppo", train_infer_correction=TrainInferCorrection(**rule))
    assert said in found


def test_a_divergence_alone_is_a_filter():
    rule = TrainInferCorrection(importance_upper=None, row_divergence_high=0.5)
    assert not wrong(policy_loss="ppo", train_infer_correction=rule)
