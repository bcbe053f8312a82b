"""Configurations of reward models: which are sound, and one clear error for each that isn't."""

from __future__ import annotations

import json

import pytest
from refused import check_refused_here, refusals

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.parsing.loader import load_config
from roll.configs.rules.validate import warnings_of

MODEL = "reward_model.model_args.model_name_or_path=judge"
ALONE = ["rewards.words.name=reward_model", MODEL]
BOTH = ["rewards.math.rule_weight=1", "rewards.math.reward_model_weight=0.5", MODEL]

BROKEN = [
    # id, overrides, fragments of the one violation's text, and its path unless it is the last override's key
    ("a name without a model", ["rewards.words.name=reward_model"],
     ["rewards.words.name asks for one", "model_name_or_path"], "reward_model"),
    ("weights without a model", BOTH[:2], ["rewards.math.reward_model_weight asks for one"], "reward_model"),
    ("no classifier named", ["rewards.words.name=reward_model", "reward_model={}"],
     ["neither this nor reward_pretrain", "reward_pretrain="], "reward_model.model_args.model_name_or_path"),
    ("the model's weight alone", [BOTH[1], MODEL],
     ["because reward_model_weight is set", "rewards.math.rule_weight=1.0"], "rewards.math.rule_weight"),
    ("the rule's weight alone", [*ALONE, BOTH[0]], ["because rule_weight is set"], "rewards.math.reward_model_weight"),
    ("a rule that counts nothing", ["rewards.math.rule_weight=0", *BOTH[1:]], ["score in vain", "name=reward_model"],
     "rewards.math.rule_weight"),
    ("a model that counts nothing", [BOTH[0], "rewards.math.reward_model_weight=0", MODEL],
     ["score in vain", "remove both weights"], "rewards.math.reward_model_weight"),
    ("a weight with nothing to combine", [*ALONE, "rewards.words.reward_model_weight=2"],
     ["nothing to combine", "rewards.words.weight"]),
    ("processes of a model", [*ALONE, "rewards.words.world_size=2"], ["reward_model.device_mapping"]),
    ("a function's time limit", [*ALONE, "rewards.words.timeout_s=5"], ["rpc_timeout"]),
    ("a function's options", [*ALONE, "rewards.words.reward_kwargs={mode: strict}"], ["in the section reward_model"]),
    ("a misspelt name", [*ALONE, "rewards.math.name=reward_modle"], ["did you mean 'reward_model'"]),
    ("a word of before", ["+reward={}"], ["judge for a model that grades"]),
    ("a training backend", [*ALONE, "reward_model.strategy_args.strategy_name=fsdp2_train"], ["fsdp2_infer"]),
    ("a backend without classifiers", [*ALONE, "reward_model.strategy_args.strategy_name=megatron_infer"],
     ["fsdp2_infer"]),
    ("adapters", [*ALONE, "reward_model.model_args.lora_rank=4"], ["merge"]),
    ("frozen layers", [*ALONE, "reward_model.model_args.freeze_module_prefix=model"],
     ["not for reward_model", "it doesn't train"]),
    ("a split sequence", [*ALONE, "reward_model.model_args.ulysses_size=2", "reward_model.world_size=2", "executor=ray",
                          "num_gpus_per_node=2"], ["whole texts"], "reward_model.model_args.ulysses_size"),
    ("a slot that isn't there", [*ALONE, "executor=ray", "reward_model.device_mapping=[1]"], ["1 isn't there"]),
    ("a template misspelt", [*ALONE, "reward_model.template=nativ"], ["did you mean 'native'"]),
    ("a switch without its budget", [*ALONE, "reward_model.use_dynamic_batching_in_infer=true"],
     ["use_dynamic_batching_in_infer is on"], "reward_model.max_tokens_per_microbatch_in_infer"),
    ("a budget without its switch", [*ALONE, "reward_model.max_tokens_per_microbatch_in_infer=64"],
     ["use_dynamic_batching_in_infer is false"]),
    ("packing of one", [*ALONE, "reward_model.use_sequence_packing=true"], ["infer_batch_size is 1"]),
    ("longer than the model", [*ALONE, "reward_model.max_length=65"], ["got 65", "at most 64"]),
    ("a negative label", [*ALONE, "reward_model.label=-1"], [">= 0"]),
    ("a label beyond", [*ALONE, "reward_model.label=1"], ["an output of the model: 0 (LABEL_0)"]),
    ("several labels", [*ALONE[:1], "reward_model.model_args.model_name_or_path=grader"],
     ["one of the model's 3 outputs: 0 (bad), 1 (fair), 2 (good)"], "reward_model.label"),
    ("a language model", [*ALONE[:1], "reward_model.model_args.model_name_or_path=writer"],
     ["a sequence classifier", "LlamaForCausalLM"]),
    ("a folder that isn't there", [*ALONE[:1], "reward_model={}", "reward_pretrain=./jugde"],
     ["a model folder that exists"]),
]  # fmt: skip


@pytest.fixture
def judged(job):
    """The small valid job, with classifiers beside its model."""
    shape = {"max_position_embeddings": 64}
    one = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    three = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "bad", "1": "fair", "2": "good"}}
    for name, tree in {"judge": one, "grader": three, "writer": {"architectures": ["LlamaForCausalLM"]}}.items():
        (job / name).mkdir()
        (job / name / "config.json").write_text(json.dumps({**shape, **tree}))
    return job


@refusals(BROKEN)
def test_a_broken_reward_model_gives_one_clear_error(judged, overrides, path, fragments):
    check_refused_here(judged, overrides, path, fragments)


@pytest.mark.parametrize(
    "overrides",
    [
        ALONE,
        BOTH,
        [*ALONE, *BOTH],
        [*ALONE, "reward_model.strategy_args.strategy_name=deepspeed_infer"],
        [*ALONE[:1], "reward_model.model_args.model_name_or_path=grader", "reward_model.label=2"],
        [*ALONE[:1], "reward_model={}", "reward_pretrain=judge"],
        [*ALONE, "reward_model.infer_batch_size=8", "reward_model.use_sequence_packing=true"],
        # longer than this model, which is the policy's business, not its
        [*ALONE, "reward_model.max_length=40"],
    ],
)
def test_sound_configurations_start_the_model_on_its_slots(judged, overrides):
    config = load_config(judged, "job", [*overrides])
    check_prerequisites(config)
    assert not [warning for warning in warnings_of(config) if "reward_model" in warning]
    assert "reward_model" in config.roles
    assert config.placement.roles["reward_model"] == ((0,),)
    assert ("actor_train", "reward_model") in config.placement.colocated()
    assert "reward_model" in config.placement.explain()


def test_a_reward_model_that_nobody_uses_is_told_of_and_not_started(judged):
    config = load_config(judged, "job", [MODEL])
    check_prerequisites(config)
    told = "reward_model is configured, but no domain of rewards uses it: it won't be started"
    assert told in warnings_of(config)
    assert "reward_model" not in config.roles


def test_its_model_is_its_own_or_reward_pretrain_and_never_the_policys(judged):
    assert load_config(judged, "job", ALONE).model_path("reward_model") == "judge"
    both = [*ALONE, "reward_pretrain=grader"]
    assert load_config(judged, "job", both).model_path("reward_model") == "judge"
    assert load_config(judged, "job", [*ALONE[:1], "reward_model={}", *both[2:]]).model_path("reward_model") == "grader"
