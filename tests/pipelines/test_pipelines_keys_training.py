"""Keys that need the loop: sampling, validation, models, optimisation, edges. Each is shown to act on a small toy."""

from __future__ import annotations

import json
import math
import shutil
import string
from collections import Counter
from unittest import mock

import pytest
import torch
from small import CRITIC, REFERENCE, run_small
from torch.optim.optimizer import register_optimizer_step_pre_hook

from roll.configs.schema.strategy_config import Fsdp2Config
from roll.distributed.weights import WeightSyncError
from roll.strategies.hf.fsdp2 import shard_module
from roll.strategies.hf.hf_build import blocks, hf_module

CONSTANT = "def case(response, task):\n    return 0.5\n"
ARGS = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"
MODEL = "actor_train.model_args"
CORRECTED = "train_infer_correction.importance_upper=2"


@pytest.fixture
def small(tiny_model, tmp_path):
    """Runs the toy in a folder of its own."""
    count = iter(range(99))
    return lambda *overrides, **files: run_small(tmp_path / str(next(count)), tiny_model, *overrides, **files)


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory):
    """One step as the toy has it."""
    return run_small(tmp_path_factory.mktemp("plain") / "run", tiny_model, dump=True)


def distance(run, role="actor_train"):
    return math.sqrt(sum(float((w - run.start[role][n]).square().sum()) for n, w in run.weights(role).items()))


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ([], "max_new_tokens", 2),
        (["response_length=3"], "max_new_tokens", 3),
        (["response_length=1"], "max_new_tokens", 1),
        ([f"{SAMPLING}.max_new_tokens=1"], "max_new_tokens", 1),
        ([f"{SAMPLING}.temperature=0.7"], "temperature", 0.7),
        ([f"{SAMPLING}.top_p=0.5", CORRECTED], "top_p", 0.5),
        ([f"{SAMPLING}.top_k=3", CORRECTED], "top_k", 3),
        ([f"{SAMPLING}.top_k=0"], "top_k", -1),
        ([f"{SAMPLING}.repetition_penalty=1.5", CORRECTED], "repetition_penalty", 1.5),
        ([f"{SAMPLING}.stop_strings=[ab, c]"], "stop_strings", ("ab", "c")),
        ([f"{SAMPLING}.ignore_eos=false"], "ignore_eos", False),
    ],
)
def test_sampling_keys_reach_the_engine(small, keys, field, value):
    run = small(*keys, "max_steps=1")
    assert {getattr(request.params, field) for request in run.requests} == {value}
    assert max(len(request.prompt_ids) for request in run.requests) == 3
    assert run.last["response/length_max"] <= run.requests[0].params.max_new_tokens


def test_top_k_truncates_what_is_drawn(small):
    one = ("rollout_batch_size=1", "num_return_sequences_in_group=4")
    run = small(f"{SAMPLING}.top_k=1", *one, CORRECTED, dump=True)
    assert len({tuple(row.token_ids) for row in run.rollouts()}) == 1
    # The one token left had probability 1 where the trainer saw 1 / 106 or so.
    assert run.last["mismatch/ratio_max"] < 0.2


def test_the_trainer_divides_by_the_temperature(small, plain):
    cold = small(f"{SAMPLING}.temperature=0.5", "ppo_epochs=2")
    assert cold.last["mismatch/kl"] < 1e-9
    assert cold.last["actor/entropy"] < plain.last["actor/entropy"]


@pytest.mark.parametrize(("include", "length"), [("true", 1), ("false", 0)])
def test_stop_strings_end_a_response_and_the_reward_sees_them_as_asked(small, include, length):
    signs = string.digits + string.ascii_uppercase  # none of them is in the name of a special token
    stops = ",".join(f"'{sign}'" for sign in signs)
    keys = (f"{SAMPLING}.stop_strings=[{stops}]", f"{SAMPLING}.include_stop_str_in_output={include}")
    reward = f"def case(response, task):\n    return sum(c in {signs!r} for c in response)\n"
    wide = ("num_return_sequences_in_group=16", f"{ARGS}.per_device_train_batch_size=32", "response_length=4")
    run = small(*keys, *wide, reward=reward, dump=True)
    stopped = [row for row in run.rollouts() if row.status == "ok"]
    assert len(stopped) > 20
    assert {row.reward for row in stopped} == {length}
    # The sign's token is trained on either way, and nothing follows it.
    assert all(row.response[-1] in signs and sum(c in signs for c in row.response) == 1 for row in stopped)
    assert {sum(row.action_mask) for row in stopped} == {1, 2, 3, 4}


def test_max_running_requests_is_the_decode_batch(small):
    run = small("max_running_requests=3")
    assert max(run.running) == 3
    assert max(small().running) == 4


# --- validation -------------------------------------------------------------------------------------------------------

VALIDATION = "validation.generating_args"


def validating(run):
    return [batch for batch in run.submitted if batch[0].id.startswith("val/")]


def test_validation_samples_by_its_own_keys(small):
    keys = (
        f"{VALIDATION}.temperature=0.6",
        f"{VALIDATION}.top_k=5",
        f"{VALIDATION}.max_new_tokens=1",
        f"{VALIDATION}.num_return_sequences=3",
        "validation.pass_at_k=[1,3]",
        "validation.pass_threshold=0.5",
    )
    run = small("val_only=true", "val_batch_size=5", *keys)
    params = {request.params for batch in validating(run) for request in batch}
    assert {(p.temperature, p.top_k, p.max_new_tokens) for p in params} == {(0.6, 5, 1)}
    assert [len(batch) for batch in validating(run)] == [15, 15, 15, 3]
    assert run.last["val/responses"] == 48
    assert run.last["val/case/pass_at_1"] == pytest.approx(run.last["val/case/accuracy"])
    assert run.last["val/case/pass_at_3"] > run.last["val/case/pass_at_1"] > 0
    strict = small("val_only=true", *keys[:-1], "validation.pass_threshold=2")
    assert strict.last["val/accuracy"] == 0.0


def test_do_sample_off_is_greedy(small):
    run = small("val_only=true", f"{VALIDATION}.do_sample=false", f"{VALIDATION}.temperature=0.6")
    assert {r.params.temperature for batch in validating(run) for r in batch} == {0.0}
    assert [len(batch) for batch in validating(run)] == [16]


def test_repetition_penalty_keeps_greedy_validation_from_repeating(small):
    reward = "def case(response, task):\n    return len(set(response)) / max(len(response), 1)\n"
    keys = ("val_only=true", "response_length=6")
    assert small(*keys, f"{VALIDATION}.repetition_penalty=1000.0", reward=reward).last["val/case/reward"] == 1.0
    assert small(*keys, reward=reward).last["val/case/reward"] < 1.0


def test_a_failed_reward_in_validation_is_counted_and_left_out_of_the_means(small):
    reward = (
        "def case(response, task):\n    if task.payload['ground_truth'] == 'upper':\n        raise OSError('x')\n"
        "    return 1.0\n"
    )
    run = small("val_only=true", reward=reward)
    assert run.last["val/case/failed"] == 8
    assert run.last["val/case/accuracy"] == run.last["val/case/reward"] == 1.0


# --- models and roles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "started"),
    [
        ([], False),
        (["use_kl_loss=true"], True),
        (["use_kl_loss=true", "kl_loss_coef=0"], False),
        (["add_token_level_kl=true"], True),
        (["add_token_level_kl=true", "init_kl_coef=0"], False),
        (["add_token_level_kl=true", "init_kl_coef=0", "use_kl_loss=true", "allow_both_kl=true"], True),
    ],
)
def test_the_reference_is_started_only_for_a_kl_term(small, keys, started):
    run = small(*REFERENCE, *keys)
    assert ("reference" in run.strategies) == started
    assert ("actor/kl_loss" in run.last) == (started and "use_kl_loss=true" in keys)
    if started and "init_kl_coef=0" not in keys and "add_token_level_kl=true" in keys:
        assert run.last["kl/reference"] == pytest.approx(0.0, abs=1e-6)


def test_a_model_of_its_own_for_critic_and_reference(small, tmp_path):
    from tiny_models import build_tiny_model

    other = build_tiny_model(tmp_path / "other", hidden=16, seed=5)
    run = small(
        *CRITIC,
        *REFERENCE,
        "use_kl_loss=true",
        f"reward_pretrain={other}",
        f"reference.model_args.model_name_or_path={other}",
    )
    hidden = {role: next(iter(s._module.parameters())).shape[1] for role, s in run.strategies.items()}
    assert hidden == {"actor_train": 32, "reference": 16, "critic": 16}
    assert run.last["actor/kl_loss"] > 0
    own = small(*CRITIC, f"reward_pretrain={tmp_path}/none", f"critic.model_args.model_name_or_path={other}")
    assert next(iter(own.strategies["critic"]._module.parameters())).shape[1] == 16


def test_how_a_model_is_loaded(small):
    run = small(
        f"{MODEL}.disable_gradient_checkpointing=false",
        f"{MODEL}.attn_implementation=eager",
        f"{MODEL}.dtype=bf16",
        "actor_infer.model_args.dtype=bf16",
        "ppo_epochs=2",
    )
    lm = run.strategies["actor_train"]._module.lm
    assert lm.is_gradient_checkpointing and lm.config._attn_implementation == "eager"
    assert {p.dtype for p in lm.parameters()} == {torch.float32}
    assert {p.dtype for p in run.engines[0]._model.parameters()} == {torch.bfloat16}
    # Half precision shows where sampler and trainer are compared.
    assert run.last["mismatch/abs_log_ratio_mean"] > 1e-4
    computed = small(
        f"{MODEL}.dtype=bf16",
        "actor_train.strategy_args={strategy_name: fsdp2_train, strategy_config: {param_dtype: fp32}}",
        "ppo_epochs=2",
    )
    assert computed.last["mismatch/abs_log_ratio_mean"] < 1e-5


def test_model_config_kwargs_change_the_model_of_their_role_and_unknown_ones_are_refused(small):
    changed = f"{MODEL}.model_config_kwargs={{hidden_act: relu}}"
    with pytest.raises(WeightSyncError, match="another policy than the one that samples"):
        small(changed)
    run = small(changed, CORRECTED)
    assert run.strategies["actor_train"]._module.lm.config.hidden_act == "relu"
    assert run.last["mismatch/abs_log_ratio_mean"] > 1e-4  # the engine computes with another activation
    with pytest.raises(Exception, match="has no such option; did you mean 'hidden_act'"):
        small(f"{MODEL}.model_config_kwargs={{hidden_akt: relu}}")


@pytest.mark.parametrize(
    ("options", "shape", "kind"),
    [
        (Fsdp2Config(fsdp_size=2, reshard_after_forward=False, offload_policy=True), (3, 2), "CPUOffloadPolicy"),
        (Fsdp2Config(), (6,), "OffloadPolicy"),
    ],
)
def test_fsdp_options_reach_torch(plain, options, shape, kind):
    model = plain.strategies["actor_train"]._model
    with (
        mock.patch("torch.distributed.device_mesh.init_device_mesh") as mesh,
        mock.patch("torch.distributed.fsdp.fully_shard") as shard,
    ):
        shard_module(model, list(blocks(hf_module(model))), options, torch.float32, "cpu", 6)
    assert mesh.call_args.args[1] == shape  # copies x ranks of each
    assert shard.call_count == 2 + 1  # decoder layers, root
    *layers, root = (call.kwargs for call in shard.call_args_list)
    assert all(given["reshard_after_forward"] is options.reshard_after_forward for given in layers)
    assert root["reshard_after_forward"] is False  # its backward pass comes next
    assert {type(given["offload_policy"]).__name__ for given in (*layers, root)} == {kind}


OWN_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_trust_remote_code_lets_a_models_own_code_run(tiny_model, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model = shutil.copytree(tiny_model, tmp_path / "own")
    (model / "own.py").write_text(OWN_MODEL)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (model / "config.json").write_text(json.dumps(config))
    trusting = (f"{MODEL}.trust_remote_code=true", "actor_infer.model_args.trust_remote_code=true")
    run = run_small(tmp_path / "run", model, *trusting)
    assert type(run.strategies["actor_train"]._module.lm).__name__ == "OwnModel"
    with pytest.raises(Exception, match="trust_remote_code"):
        run_small(tmp_path / "refused", model)


def test_freeze_module_prefix_keeps_parameters_where_they_are(small):
    layers = f"{MODEL}.freeze_module_prefix=[model.embed_tokens, model.layers.0]"
    run = small(layers, "num_return_sequences_in_group=8", f"{ARGS}.per_device_train_batch_size=16")
    still = {name for name, moved in run.moved().items() if not moved}
    assert still == {n for n in run.weights() if "embed_tokens" in n or "layers.0." in n}
    assert len(still) < len(run.weights())


# --- optimisation -----------------------------------------------------------------------------------------------------

WIDE = ("num_return_sequences_in_group=8", f"{ARGS}.per_device_train_batch_size=16")
"""16 responses, so that some group has a gradient."""


def test_critic_warmup_trains_the_critic_alone_at_first(small):
    run = small(*CRITIC, "critic_warmup=2", "max_steps=3", "save_steps=2")
    assert [role for role, _ in run.trained] == ["critic", "critic", "critic", "actor_train"]
    assert run.column("actor/optimizer_steps") == [1.0]
    assert run.column("critic/optimizer_steps") == [1.0] * 3
    # The schedule of the actor is as long as its training.
    assert run.strategies["actor_train"]._spec.total_optimizer_steps == 1
    assert run.strategies["critic"]._spec.total_optimizer_steps == 3


def test_before_critic_warmup_ends_the_actor_stays_as_it_was(small):
    run = small(*CRITIC, "critic_warmup=1", "max_steps=2", f"{ARGS}.learning_rate=0.0")
    assert not any(run.moved().values())
    assert run.moved("critic")["value_head.weight"]


def test_ppo_epochs_times_mini_batches_are_the_optimizer_steps(small):
    run = small("ppo_epochs=3", f"{ARGS}.per_device_train_batch_size=1", f"{ARGS}.gradient_accumulation_steps=2")
    assert run.last["actor/optimizer_steps"] == 6
    assert [len(batch) for _, batch in run.trained] == [2] * 6
    epochs = [sum((batch.row_ids for _, batch in run.trained[i : i + 2]), ()) for i in (0, 2, 4)]
    assert len({frozenset(rows) for rows in epochs}) == 1
    assert len(set(epochs)) > 1


WHOLE = "actor_train.use_prefix_sharing=false"
"""Rows come into passes as the limits say, whatever they have in common."""


def test_per_device_batch_and_dynamic_batching_change_passes_and_nothing_else(small):
    shared = ("num_return_sequences_in_group=8", "use_kl_loss=true", *REFERENCE, "rollout_batch_size=2")
    base = (*shared, WHOLE, "reference.use_prefix_sharing=false")
    runs = {
        "whole": small(*base, f"{ARGS}.per_device_train_batch_size=16"),
        "cut": small(*base, f"{ARGS}.per_device_train_batch_size=2", f"{ARGS}.gradient_accumulation_steps=8"),
        "dynamic": small(
            *base,
            f"{ARGS}.per_device_train_batch_size=16",
            "actor_train.use_dynamic_batching_in_train=true",
            "actor_train.max_tokens_per_microbatch_in_train=20",
            "reference.use_dynamic_batching_in_infer=true",
            "reference.max_tokens_per_microbatch_in_infer=30",
        ),
        "infer": small(*base, f"{ARGS}.per_device_train_batch_size=16", "reference.infer_batch_size=5"),
    }
    together = small(*shared, f"{ARGS}.per_device_train_batch_size=2", f"{ARGS}.gradient_accumulation_steps=8")
    assert together.last["actor/shared_tokens"] >= 80 - 6 * 3 - 16 * 2  # six passes, each with its prompt
    assert not any("actor/shared_tokens" in run.last for run in runs.values())
    # Every row has 3 + 2 tokens: a budget of 20 holds 4 of them, one of 30 holds 6.
    trains = {name: [rows for role, grad, rows, _ in run.passes if grad] for name, run in runs.items()}
    assert trains == {"whole": [16], "cut": [2] * 8, "dynamic": [4] * 4, "infer": [16]}
    infers = {name: [rows for role, grad, rows, _ in run.passes if not grad] for name, run in runs.items()}
    assert infers == {"whole": [8, 8], "cut": [8, 8], "dynamic": [6, 6, 4], "infer": [5, 5, 5, 1]}
    for run in (*runs.values(), together):
        assert run.last["actor/loss"] == pytest.approx(runs["whole"].last["actor/loss"], abs=1e-6)
        assert run.last["actor/grad_norm"] == pytest.approx(runs["whole"].last["actor/grad_norm"], rel=1e-4)


def test_use_dynamic_batching_in_infer_of_the_actor(small):
    keys = ("add_token_level_kl=true", *REFERENCE, "train_infer_correction.importance_upper=2", WHOLE)
    run = small(
        *keys, "actor_train.use_dynamic_batching_in_infer=true", "actor_train.max_tokens_per_microbatch_in_infer=18"
    )
    assert [rows for role, grad, rows, _ in run.passes if role == "actor_train" and not grad] == [3, 1]
    one = small(*keys, "actor_train.infer_batch_size=1")
    assert [rows for role, grad, rows, _ in one.passes if role == "actor_train" and not grad] == [1] * 4


@pytest.mark.parametrize(
    ("keys", "factors"),
    [
        (["lr_scheduler_type=constant"], [1, 1, 1, 1]),
        (["lr_scheduler_type=linear"], [1, 0.75, 0.5, 0.25]),
        (["lr_scheduler_type=linear", "min_lr_ratio=0.5"], [1, 0.875, 0.75, 0.625]),
        (["lr_scheduler_type=cosine"], [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        (["lr_scheduler_type=wsd"], [1, 1, 1, 1]),
        (["warmup_steps=3"], [0.25, 0.5, 0.75, 1]),
        (["warmup_ratio=0.5"], [1 / 3, 2 / 3, 1, 1]),
        (["learning_rate=0.5"], [50, 50, 50, 50]),
        (["warmup_steps=3", "warmup_init_ratio=0.2"], [0.4, 0.6, 0.8, 1]),
        (["lr_scheduler_type=inverse_sqrt", "lr_timescale=1"], [1, 0.5**0.5, 3**-0.5, 0.5]),
        (["lr_scheduler_type=WSD", "wsd_decay_ratio=0.5", "wsd_decay_style=1-sqrt"], [1, 1, 1, 1 - 0.5**0.5]),
        (["lr_scheduler_type=linear", "lr_decay_steps=2"], [1, 0.5, 0, 0]),
    ],
)
def test_learning_rate_schedules(small, keys, factors):
    run = small("max_steps=4", *(f"{ARGS}.{key}" for key in keys))
    assert run.column("actor/lr") == pytest.approx([0.01 * factor for factor in factors])


def test_optimizer_keys_reach_adamw(small):
    keys = {"weight_decay": 0.3, "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 0.001}
    run = small(*(f"{ARGS}.{key}={value}" for key, value in keys.items()), reward=CONSTANT)
    groups = run.strategies["actor_train"]._groups()
    assert [(g["weight_decay"], g["betas"], g["eps"]) for g in groups] == [
        (0.3, (0.5, 0.6), 0.001),
        (0.0, (0.5, 0.6), 0.001),
    ]
    # Equal rewards give no gradient; decay alone shrinks the matrices: w (1 - 0.01 * 0.3).
    matrices = [name for name, value in run.weights().items() if value.dim() > 1]
    for name in matrices:
        assert torch.allclose(run.weights()[name], run.start["actor_train"][name] * 0.997)


@pytest.mark.parametrize(("limit", "expected"), [("0.01", 0.01), ("null", None)])
def test_max_grad_norm(small, limit, expected):
    norms = []

    def keep_norm(optimizer, *_):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))

    hook = register_optimizer_step_pre_hook(keep_norm)
    try:
        run = small(*WIDE, f"max_grad_norm={limit}")
    finally:
        hook.remove()
    assert norms[-1] == pytest.approx(expected or run.last["actor/grad_norm"], rel=1e-3)
    assert run.last["actor/grad_norm"] > 0.1


def test_l2_pulls_towards_the_weights_at_the_start(small):
    keys = ("max_steps=6", *WIDE, "max_grad_norm=null")
    free, pulled = small(*keys), small(*keys, "l2=1000")
    assert distance(pulled) < 0.7 * distance(free)
    assert not any(small("l2=1000", reward=CONSTANT).moved().values())


def test_own_estimator_and_own_loss_act_in_the_loop(small, tmp_path):
    (tmp_path / "own.py").write_text(
        "from roll.algorithms.advantages import to_tokens\n"
        "from roll.algorithms.losses import PolicyLoss\nfrom roll.types.metrics import Metrics\n\n\n"
        "def sevens(inputs):\n    a = to_tokens(inputs.rewards * 0 + 7, inputs.action_mask)\n    return a, a\n\n\n"
        "def nothing(inputs):\n    return PolicyLoss(inputs.logprobs * 0, Metrics())\n"
    )
    run = small(f"adv_estimator={tmp_path}/own.py:sevens", f"policy_loss={tmp_path}/own.py:nothing", dump=True)
    assert {a for row in run.rollouts() for a in row.advantages} == {0.0, 7.0}
    assert not any(run.moved().values())


def test_remax_asks_for_one_greedy_response_per_prompt_under_the_sampling_keys(small):
    # ignore_eos is on in the toy: without it a greedy response could be shorter than any sampled one.
    run = small("adv_estimator=remax")
    greedy = [request for request in run.requests if request.id.startswith("greedy/")]
    assert len(greedy) == 2
    assert {(r.params.temperature, r.params.ignore_eos, r.params.max_new_tokens) for r in greedy} == {(0.0, True, 2)}


def test_a_greedy_response_that_cannot_be_scored_takes_its_group_out_of_the_loss(small):
    # The third response to a prompt is the greedy one; that of prompt 0 fails.
    reward = (
        "from collections import Counter\n\ncalls = Counter()\n\n\ndef case(response, task):\n"
        "    calls[task.id] += 1\n    if calls[task.id] == 3 and task.id.endswith(':0'):\n"
        "        raise OSError('x')\n    return 1.0 / calls[task.id]\n"
    )
    run = small("adv_estimator=remax", "actor_train.data_args.shuffle=false", reward=reward, dump=True)
    assert run.last["rollout/failed_greedy"] == 2
    ((_, batch),) = run.trained
    counted = dict(zip(batch.row_ids, batch.pad("loss_mask", False).any(1).tolist(), strict=True))
    assert counted == {name: "1#" in name for name in batch.row_ids}
    # Prompt 1 scored 1 and 1/2, its greedy response 1/3.
    advantages = sorted(row.advantages[-1] for row in run.rollouts() if row.task_id.endswith(":1"))
    assert advantages == pytest.approx([1 / 2 - 1 / 3, 1 - 1 / 3])
    assert finite(run)


def test_pf_ppo_and_weights_and_masks_reach_the_trainer(small):
    run = small(*WIDE, "pf_ppo.reweight_method=max_min", "max_len_mask=true", f"{SAMPLING}.ignore_eos=false")
    ((_, batch),) = run.trained
    assert batch.loss_weight is not None
    # Nearly all responses of two tokens are cut off.
    assert run.last["rollout/masked_share"] == pytest.approx(
        1 - float(batch.pad("loss_mask", False).any(1).float().mean())
    )
    assert run.last["rollout/masked_share"] > 0.5


# --- edges ------------------------------------------------------------------------------------------------------------


def finite(run):
    return all(math.isfinite(value) for row in run.rows for value in row.values())


def test_one_prompt_with_one_response(small):
    one = ("rollout_batch_size=1", "num_return_sequences_in_group=1", f"{ARGS}.per_device_train_batch_size=1")
    run = small(*one, "adv_estimator=reinforce", "response_length=1", "max_steps=2")
    assert run.column("rollout/responses") == [1, 1]
    assert run.column("response/length_max") == [1, 1]
    assert finite(run)


def test_equal_rewards_teach_nothing_and_break_nothing(small):
    run = small(*WIDE, reward=CONSTANT)
    assert run.last["group/zero_signal_share"] == 1.0
    assert run.last["actor/grad_norm"] == 0.0
    assert finite(run)
    assert not any(run.moved().values())
    # Whitening and normalising have nothing to divide by.
    assert finite(small(*WIDE, "reward_norm=group", "whiten_advantages=true", reward=CONSTANT))


def test_a_batch_that_a_mask_empties_trains_nothing(small):
    run = small("max_len_mask=true")  # every response of the toy is cut off
    assert run.last["rollout/masked_share"] == 1.0
    assert finite(run)
    assert not any(run.moved().values())


def test_ranks_slots_and_environment_on_ray(small, tmp_path):
    # An own loss reports what its process sees: its variables, and how wide its rows are.
    (tmp_path / "spy.py").write_text(
        "import os\nimport torch.distributed as dist\n\n"
        "from roll.algorithms.losses import reinforce\n\n\n"
        "def spy(inputs):\n    result = reinforce(inputs)\n    rank = dist.get_rank()\n"
        "    result.metrics.add_max(f'custom/width_{rank}', inputs.logprobs.shape[1])\n"
        "    for name in ('TOY_A', 'TOY_B'):\n"
        "        result.metrics.add_max(f'custom/{name}', float(os.environ[name]))\n    return result\n"
    )
    data = [
        {"id": str(i), "tag": "case", "prompt": "x" * (12 if i == 0 else 3), "ground_truth": "lower"} for i in range(2)
    ]
    run = small(
        "executor=ray",
        "num_gpus_per_node=2",
        "actor_train.device_mapping='0-1'",
        f"{ARGS}.per_device_train_batch_size=2",
        "system_envs={TOY_A: '1', TOY_B: '2'}",
        "actor_train.system_envs.TOY_B='3'",
        "balance_batch=false",
        "actor_train.data_args.shuffle=false",
        "rpc_timeout=120",
        f"policy_loss={tmp_path}/spy.py:spy",
        data=data,
    )
    assert (run.last["custom/TOY_A"], run.last["custom/TOY_B"]) == (1.0, 3.0)
    # Rows in order: both long ones on the first rank. Balanced they would be one on each.
    assert (run.last["custom/width_0"], run.last["custom/width_1"]) == (14.0, 5.0)
    logs = run.folder / "output" / "logs" / "workers"
    assert Counter(path.name.rsplit("-", 1)[0] for path in logs.glob("*.log")) == {"actor_train": 2, "actor_infer": 1}


# --- whole mini-batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "policy_loss={name: kl_cov, cov_ratio: 0.3, kl_coef: 0.5}",
        "policy_loss={name: clip_cov, cov_ratio: 0.3, cov_low: -9, cov_high: 9}",
        "loss_agg_mode=prompt-mean",
        "loss_agg_mode=token-sum",
    ],
)
def test_what_depends_on_a_whole_mini_batch_depends_on_no_cut_of_it(small, plain, key):
    keys = (key, "ppo_epochs=2")
    one = small(*keys).last
    cut = small(*keys, f"{ARGS}.per_device_train_batch_size=1", f"{ARGS}.gradient_accumulation_steps=4").last
    for name in ("actor/grad_norm", "actor/loss"):
        assert cut[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
    if "cov" in key:
        assert one["actor/cov_share"] == cut["actor/cov_share"] > 0


def test_a_token_of_a_prompt_with_few_tokens_counts_more(small):
    run = small("loss_agg_mode=prompt-mean", "response_length=3")
    ((_, batch),) = [(role, batch) for role, batch in run.trained if role == "actor_train"]
    weights, tokens = batch.require("loss_weight"), torch.zeros(len(batch))
    for row in range(len(batch)):
        tokens[row] = batch.row("loss_mask", row).sum()
    groups = sorted(set(batch.group_ids))
    of_group = {group: sum(float(tokens[i]) for i, g in enumerate(batch.group_ids) if g == group) for group in groups}
    expected = [float(tokens.sum()) / (len(groups) * of_group[group]) for group in batch.group_ids]
    assert weights.tolist() == pytest.approx(expected)


def test_short_right_and_long_wrong_answers_are_rewarded(small):
    keys = ("cosine_length={right: [2.0, 1.0], wrong: [-4.0, 0.0], exceeded: -3.0}", "adv_estimator=reinforce")
    run = small(*keys, dump=True, reward=CONSTANT.replace("0.5", "float(len(response) % 2)"))
    for row in run.rollouts():
        count = sum(row.action_mask)
        start, end = (2.0, 1.0) if row.reward > 0 else (-4.0, 0.0)
        expected = -3.0 if count >= 2 else end + (start - end) * (1 + math.cos(math.pi * count / 2)) / 2
        assert row.advantages[-1] == pytest.approx(expected)
    assert "reward/shaping/cosine_length" in run.last
