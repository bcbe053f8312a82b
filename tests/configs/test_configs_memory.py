"""Switches for memory and speed: where each may stand, and what of the machine it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.acts_if_rules import acts_if_rules
from roll.configs.rules.roles_rules import role_rules
from roll.configs.schema.sft_config import SFTConfig
from roll.configs.schema.worker_config import ModelArgs, TrainConfig


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(".", "job", list(overrides))
    return str(caught.value)


MODEL = "actor_train.model_args"
FSDP = "actor_train.strategy_args.strategy_config"
NAMED = "++actor_train.strategy_args.strategy_name=fsdp2_train"


def test_the_switches_are_taken_where_they_act(job):
    switches = ["++actor_train.use_prefix_sharing=true", "++actor_train.use_sequence_packing=true"]
    switches += [f"++{MODEL}.activation_offload=true", f"++{MODEL}.torch_compile=true"]
    config = load_config(".", "job", switches)
    assert config.actor_train.use_prefix_sharing
    args = config.actor_train.model_args
    assert args.activation_offload
    assert args.torch_compile


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["++actor_infer.model_args.torch_compile=true"],
         "torch_compile: this key acts only with fsdp2_* and deepspeed_*"),
        (["++actor_infer.model_args.use_liger=true"], "use_liger: this key acts only with fsdp2_* and deepspeed_*"),
        (["++init_kl_coef=0.1", "++add_token_level_kl=true", "++reference.model_args.activation_offload=true"],
         "activation_offload: this key acts only for roles that train, not for reference"),
        ([f"++{MODEL}.recompute_granularity=selective", "++actor_train.strategy_args.strategy_name=deepspeed_train"],
         "recompute_granularity: this key acts only with fsdp2_*"),
        ([f"++{MODEL}.recompute_granularity=selective", f"++{MODEL}.activation_offload=true"],
         "recompute_granularity: this key acts only without activation_offload"),
        ([f"++{MODEL}.recompute_granularity=selective", f"++{MODEL}.disable_gradient_checkpointing=true"],
         "recompute_granularity: this key acts only without disable_gradient_checkpointing"),
        ([f"++{MODEL}.torch_compile=true", f"++{MODEL}.use_liger=true"],
         "use_liger: this key acts only without torch_compile"),
        (["adv_estimator=gae", "++critic.model_args.use_fused_kernels=true"],
         "acts only for roles that compute log-probs, not for critic"),
        (["++actor_train.strategy_args.strategy_name=megatron_train",
          "++actor_train.strategy_args.strategy_config.moe_aux_loss_coeff=0.01",
          "++actor_train.use_prefix_sharing=true"],
         "use_prefix_sharing: it can't act: strategy_config.moe_aux_loss_coeff balances the tokens of whole rows"),
        (["++actor_train.use_prefix_sharing=true", f"++{MODEL}.torch_compile=true"],
         "use_prefix_sharing: it can't act: with model_args.torch_compile it needs use_sequence_packing: true"),
        (["++actor_train.use_prefix_sharing=true", f"++{MODEL}.lora_rank=4", f"++{MODEL}.lora_dropout=0.1"],
         "use_prefix_sharing: it can't act: with model_args.lora_dropout"),
        (["++actor_train.use_prefix_sharing=true", f"++{MODEL}.attn_implementation=eager"],
         "use_prefix_sharing: it can't act: with model_args.attn_implementation: eager"),
        ([NAMED, f"++{FSDP}.offload_policy=true"], "offload_policy: got true, expected false with one rank"),
        ([NAMED, f"++{FSDP}.reduce_dtype=fp16"], "reduce_dtype: got 'fp16', expected fp32 or bf16"),
    ],
)  # fmt: skip
def test_a_switch_that_would_not_act_is_refused_with_the_reason(job, overrides, message):
    assert message in problems(*overrides)


@pytest.fixture
def devices(monkeypatch):
    """`devices(*names)`: what /dev holds."""
    real = os.listdir

    def show(*names):
        monkeypatch.setattr(os, "listdir", lambda path=".": list(names) if path == "/dev" else real(path))

    return show


NEEDY = {
    f"{MODEL}.use_liger": ("true", "liger-kernel is not installed: pip install -e '.[liger]'"),
    f"{MODEL}.use_fused_kernels": ("true", "liger-kernel is not installed: pip install -e '.[liger]'"),
    f"{MODEL}.attn_implementation": ("fa2", "flash-attn is not installed"),
}


@pytest.mark.parametrize("key", NEEDY)
def test_what_needs_an_accelerator_is_refused_without_one_and_without_its_package(job, devices, monkeypatch, key):
    value, missing = NEEDY[key]
    config = load_config(".", "job", [f"++{key}={value}", f"++{MODEL}.dtype=bf16"])
    devices("null")
    with pytest.raises(ConfigError, match=f"{key}.*expected an accelerator for it, and this machine has none"):
        check_prerequisites(config)
    devices("null", "nvidia0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(config)
    assert missing in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check_prerequisites(config)


def test_offloading_shards_needs_an_accelerator(job, devices):
    overrides = ["executor=ray", "++num_gpus_per_node=2", "++actor_train.world_size=2"]
    config = load_config(".", "job", [*overrides, NAMED, f"++{FSDP}.offload_policy=true"])
    devices("null")
    with pytest.raises(ConfigError, match=r"offload_policy: got true, expected an accelerator for it"):
        check_prerequisites(config)
    devices("null", "nvidia0", "nvidia1")
    check_prerequisites(config)


@dataclass(frozen=True, kw_only=True)
class _TwoModels(SFTConfig):
    """Of a pipeline of the user's own, with a role that this project doesn't know."""

    second: TrainConfig = field(default_factory=lambda: TrainConfig(model_args=ModelArgs(activation_offload=True)))


def test_a_role_by_any_name_trains_if_its_section_is_one_that_trains():
    config = _TwoModels(pipeline="sft", pretrain="model")
    assert not [violation for rule in (acts_if_rules, role_rules) for violation in rule(config)]
    assert list(config.trained_roles) == ["actor_train", "second"]
