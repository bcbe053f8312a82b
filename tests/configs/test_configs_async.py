"""Keys of generation that runs ahead of training, and of the way that weights take."""

from __future__ import annotations

import pytest
from refused import check_refused, refusals

from roll.configs.checks.machine_checks import Machine
from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config

RATIO = "async_generation_ratio=1"
RAY = "executor=ray"
VLLM = "actor_infer.strategy_args={strategy_name: vllm}"
CORRECTION = "train_infer_correction={level: token}"
AHEAD = [RAY, VLLM, RATIO, CORRECTION]

REFUSED = [
    # id, overrides, fragments of the one violation's text, and its path unless it is the last override's key
    ("a negative ratio", ["async_generation_ratio=-1"], [">= 0"]),
    ("no correction", [RAY, VLLM, RATIO],
     ["policy_loss ppo and no train_infer_correction", "decoupled_ppo", "allow_uncorrected_async=true"]),
    ("one process for both", [RATIO, CORRECTION], ["generation stands still", "executor=ray"],
     "async_generation_ratio"),
    ("validation only", [*AHEAD, "val_only=true"], ["no training to run ahead of"], "async_generation_ratio"),
    ("over-sampling", [*AHEAD, "is_use_additional_prompts=true"], ["steps to come"]),
    ("restarts where nothing is on its way", ["partial_rollout=restart"], ["async_generation_ratio is 0"]),
    ("a way of going on that isn't there", [*AHEAD, "partial_rollout=discard"], ["resume, restart"]),
    ("a permission that nobody needs", ["allow_uncorrected_async=true"], ["async_generation_ratio is 0"]),
    ("a permission beside a correction", [*AHEAD, "allow_uncorrected_async=true"], ["train_infer_correction corrects"]),
    ("a permission beside a loss", [RAY, VLLM, RATIO, "policy_loss=decoupled_ppo", "allow_uncorrected_async=true"],
     ["policy_loss decoupled_ppo corrects"]),
    ("memory shared between machines",
     [RAY, "num_nodes=2", "actor_infer.device_mapping=[0,1]", "weight_transport=shared_memory"],
     ["rank 0 is on node 0, engines are on node 1"]),
    ("a way that isn't there", ["weight_transport=nccl"], ["broadcast"]),
    ("no way at all", ["weight_transport=null"], ["expected one of auto", "broadcast"]),
    ("a number for a way", ["weight_transport=3"], ["expected one of auto", "broadcast"]),
    ("changes of nothing", ["delta_weight_sync=true"], ["nothing is sent", "=shared_memory"]),
    ("an empty bucket", ["model_update_buffer_size_mb=0"], [">= 1"]),
    ("a check by name only", ["verify_weight_sync=sha"], ["off, checksum, logprob"]),
    ("a check by switch", ["verify_weight_sync=true"], ["got true", "off, checksum, logprob"]),
    ("a check of nothing", ["verify_weight_sync=checksum", "val_only=true"], ["nothing is sent"], "verify_weight_sync"),
    ("fewer deaths than none", [VLLM, "engine_restarts=-1"], [">= 0"]),
]  # fmt: skip


@refusals(REFUSED)
def test_a_key_of_asynchronous_runs_that_cannot_act_is_refused(job, overrides, path, fragments):
    check_refused(job, overrides, path, fragments)


ALLOWED = [
    AHEAD,
    [*AHEAD, "partial_rollout=restart", "async_generation_ratio=0.5", "engine_restarts=0"],
    [RAY, VLLM, RATIO, "policy_loss=decoupled_ppo"],
    [RAY, VLLM, RATIO, "allow_uncorrected_async=true"],
    [VLLM, RATIO, CORRECTION],  # vLLM computes in processes of its own
    [RAY, RATIO, CORRECTION],
    [*AHEAD, "adv_estimator=remax"],
    ["weight_transport=file"],
    ["weight_transport=file", "delta_weight_sync=true"],
    [RAY, "delta_weight_sync=true"],
    [RAY, "weight_transport=shared_memory", "model_update_buffer_size_mb=1", "verify_weight_sync=logprob"],
    [RAY, "num_nodes=2", "actor_infer.device_mapping=[0,1]", "weight_transport=broadcast"],
    [RAY, "num_nodes=2", "weight_transport=shared_memory"],  # the second node is somebody else's
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_a_key_that_can_act_is_taken(job, overrides):
    load_config(job, "job", overrides)


@pytest.mark.parametrize("word", ["off", "Off", "false", "'off'"])
def test_off_is_off_although_yaml_reads_it_as_false(job, word):
    text = (job / "job.yaml").read_text()
    (job / "job.yaml").write_text(f"{text}verify_weight_sync: {word}\n")
    assert load_config(job, "job").verify_weight_sync == "off"
    assert load_config(job, "job", ["verify_weight_sync=off"]).verify_weight_sync == "off"


GPUS = Machine(accelerators=("NVIDIA H200",) * 8)
TRAIN, INFER = "actor_train.device_mapping=0-3", "actor_infer.device_mapping"
WIDE = [*AHEAD, "num_gpus_per_node=8", TRAIN, "actor_train.training_args.gradient_accumulation_steps=1"]


def test_on_accelerators_training_and_engines_have_slots_of_their_own(job):
    check_prerequisites(load_config(job, "job", [*WIDE, f"{INFER}=4-7"]), GPUS)
    check_prerequisites(load_config(job, "job", [*WIDE, f"{INFER}=0-7"]), Machine())  # processes of a CPU share it
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", [*WIDE, f"{INFER}=3-7"]), GPUS)
    (violation,) = caught.value.violations
    assert violation.path == "actor_train.device_mapping"
    assert "actor_train and the engines would work on slot 3 at the same time" in str(violation)
    assert "e.g. 0-3 and 4-7" in str(violation)


def test_a_reference_beside_the_engines_is_as_much_in_the_way(job):
    overrides = [*WIDE, f"{INFER}=4-7", "use_kl_loss=true", "reference.device_mapping=4-7"]
    with pytest.raises(ConfigError, match="reference and the engines would work on slot 4"):
        check_prerequisites(load_config(job, "job", overrides), GPUS)


def test_taking_turns_on_one_slot_is_fine_without_running_ahead(job):
    check_prerequisites(load_config(job, "job", [RAY, VLLM]), GPUS)


def test_a_broadcast_between_roles_on_one_accelerator_is_refused(job):
    config = load_config(job, "job", [RAY, VLLM, "weight_transport=broadcast"])
    with pytest.raises(ConfigError, match="as actor_train and actor_infer do slot 0"):
        check_prerequisites(config, GPUS)
    check_prerequisites(config, Machine())
