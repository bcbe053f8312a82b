"""A migrated file of verl or OpenRLHF trains what they would have trained: the first step's loss and gradient.

Our side is the pipeline's own code under the migrated configuration (`first_steps.py`), theirs the code of the wheels
under the arguments that they themselves read from the same launch script (`peer_first_steps.py`), so that defaults
count. Both see the same weights, tokens, rewards and sampler's log-probs. What isn't equal must be in the report.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_first_steps as theirs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from first_steps import Migrated, Step, module_of, moved, read_migrated, rl_steps, sft_step, started
from peer_first_steps import BEFORE, UPDATE, Critic, Policy
from tiny_models import build_tiny_model
from torch import Tensor, nn

from roll.strategies.training.optim import schedule_from

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6

VERL = """#!/bin/bash
set -x
MODEL={model}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files={folder}/train.parquet data.val_files={folder}/test.parquet \\
    data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=12 \\
    data.filter_overlong_prompts=True data.truncation=error \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 \\
    trainer.logger=console trainer.project_name=equal trainer.experiment_name={name} {more} $@
"""
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
RL = {
    "grpo": f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 {ACTOR}.kl_loss_type=low_var_kl "
    f"{ACTOR}.entropy_coeff=0",
    "dapo": f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio_c=10.0 "
    f"{ACTOR}.loss_agg_mode=token-mean {ACTOR}.entropy_coeff=0 {ACTOR}.grad_clip=1.0 {ACTOR}.optim.lr_warmup_steps=10 "
    f"{ACTOR}.optim.weight_decay=0.1 actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 "
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 "
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1 "
    "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
    "+reward.reward_kwargs.overlong_buffer_cfg.len=4 +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 "
    "+reward.reward_kwargs.overlong_buffer_cfg.log=False +reward.reward_kwargs.max_resp_len=12",
    "gspo": f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4 "
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean {ACTOR}.optim.lr_warmup_steps_ratio=0.05 "
    "actor_rollout_ref.rollout.temperature=0.9",
    "correction": f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=2.0 "
    f"{CORRECTION}.rollout_rs=seq_sum_k1 {CORRECTION}.rollout_rs_threshold=0.4_2.5 "
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "correction_of_tokens": f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=1.5 "
    f"{CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=0.5_2.0 {ACTOR}.entropy_coeff=0.001 "
    "actor_rollout_ref.rollout.calculate_log_probs=True",
}
OTHERS = {
    "cispo": f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=0.1 {ACTOR}.clip_ratio_high=0.2",
    "geo_mean": f"{ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio_low=0.05 {ACTOR}.clip_ratio_high=0.03",
    "sapo": f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.tau_neg=1.1",
    "dr_grpo": f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=False",
    "kl_in_reward": "algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True "
    "algorithm.kl_ctrl.kl_coef=0.05 algorithm.kl_penalty=low_var_kl",
    "opo": f"algorithm.adv_estimator=opo {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3+ {ACTOR}.kl_loss_coef=0.1",
    "icepop": f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.5_1.5",
    "geometric": f"{CORRECTION}.rollout_rs=seq_mean_k1 {CORRECTION}.rollout_rs_threshold=0.9_1.1",
}
NAMED = {
    f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k1 {ACTOR}.kl_loss_coef=0.1": (
        "kl_loss_type",
        "gradient is that of",
    ),
    f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=2.0 "
    f"{CORRECTION}.rollout_is_batch_normalize=True": ("importance_mean_one", "there of all rows"),
    f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean "
    f"{CORRECTION}.rollout_rs=seq_mean_k3 {CORRECTION}.rollout_rs_threshold=0.05": (
        "loss_agg_mode",
        "they count in it",
    ),
}
"""What isn't equal, and words of the line that says so."""
FLAGS = {
    "reinforce_baseline": "--algo.advantage.estimator reinforce_baseline --algo.advantage.is_correction_level token",
    "rloo": "--algo.advantage.estimator rloo --algo.advantage.is_correction_level token "
    "--algo.advantage.is_correction_mode clip --algo.advantage.is_correction_threshold 0.5 1.5",
    "dr_grpo": "--algo.advantage.estimator dr_grpo --algo.advantage.is_correction_level token "
    "--algo.advantage.is_correction_gating tv --algo.advantage.is_correction_threshold 0.01",
    "flash_reinforce": "--algo.advantage.estimator flash_reinforce",
}

VERL_SFT = """#!/bin/bash
MODEL={model}
torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer \\
    data.train_files={folder}/train.parquet data.messages_key=messages data.train_batch_size=8 \\
    data.micro_batch_size_per_gpu=1 data.max_length=200 data.truncation=error data.use_dynamic_bsz=False \\
    model.path=$MODEL optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.1 optim.lr_scheduler_type=cosine \\
    optim.weight_decay=0.1 optim.betas=[0.9,0.95] trainer.n_gpus_per_node=8 trainer.total_epochs=2 \\
    trainer.project_name=equal trainer.experiment_name=sft trainer.logger=console $@
"""
OPENRLHF = """#!/bin/bash
MODEL={model}
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
    --ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 \\
    --critic.num_nodes 1 --critic.num_gpus_per_node 8 --vllm.num_engines 8 --vllm.tensor_parallel_size 1 \\
    --train.colocate_all --vllm.gpu_memory_utilization 0.5 --vllm.enable_sleep --ds.enable_sleep \\
    --actor.model_name_or_path $MODEL --critic.model_name_or_path $MODEL --reward.remote_url {folder}/reward_func.py \\
    --ckpt.output_dir {folder}/out --data.prompt_dataset {folder}/prompts.jsonl --data.input_key prompt \\
    --data.apply_chat_template --train.micro_batch_size 2 --train.batch_size 16 --rollout.micro_batch_size 2 \\
    --rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --rollout.max_new_tokens 12 --data.max_len 28 \\
    --train.num_episodes 2 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 \\
    --algo.kl.init_coef 0.01 --actor.gradient_checkpointing_enable
"""


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.set_num_threads(1)
    with theirs.installed(tmp_path_factory.mktemp("peers")) as yaml:
        yield yaml


def move(role: str, module: nn.Module, when: str) -> None:
    """Move the weights of any role, as `Policy` and `Critic` are moved."""
    del role
    moved(module, *(BEFORE if when == "before" else UPDATE))


def require_equal(name: str, ours: Step, loss: Tensor, module: nn.Module) -> None:
    """Loss and gradient are the same, and there is something to compare."""
    apart = differences(ours, loss, module)
    logger.info("%s: loss %.6f, apart %.1e; gradients apart %.1e", name, float(loss), *apart)
    assert max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None) > 1e-3
    assert max(apart) < TOLERANCE


def differences(ours: Step, loss: Tensor, module: nn.Module) -> tuple[float, float]:
    """How far apart the losses are, and the gradients at the place where they are furthest apart."""
    theirs = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert theirs.keys() == ours.gradients.keys()
    apart = max(float((theirs[name] - ours.gradients[name]).abs().max()) for name in theirs)
    return abs(float(loss) - ours.loss), apart


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("equal") / "model")


@pytest.mark.parametrize("name", RL)
def test_the_first_step_of_verl(name: str, model: Path, peers: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.sh"
    script.write_text(VERL.format(model=model, folder=tmp_path, name=name, more=RL[name]))
    migrated, args = read_migrated(script), theirs.verl_arguments(script, peers)
    rollout = args.actor_rollout_ref.rollout
    batch, groups = theirs.batch_of(model, rollout.temperature, next(iter(migrated.config.rewards)))
    steps, rollouts, moves = rl_steps(migrated.alone, groups, move, batch.sampled[batch.mask])
    assert moves, "ratios are those of a second update"
    policy = Policy(model, BEFORE, UPDATE)
    loss, advantages = theirs.verl_step(args, batch, steps["actor_train"].rows, policy)
    counts = rollouts.batch.loss_mask[rollouts.batch.action_mask]
    assert counts.all() == (not name.startswith("correction")), "some tokens are rejected, where that is asked for"
    mine = rollouts.batch.advantages[rollouts.batch.action_mask]
    assert (mine - advantages[batch.mask])[counts].abs().max() < TOLERANCE
    require_equal(name, steps["actor_train"], loss, policy)
    same_arithmetic(migrated, args)
    # verl/trainer/ppo/ray_trainer.py, line 435: `train_dataloader` leaves out the last rows.
    require_same_steps(migrated, [20 // args.data.train_batch_size * args.trainer.total_epochs], "in verl")
    number = migrated.config.batch.of("actor_train").optimizer_steps
    require_same_curve(
        migrated, "actor_train", theirs.verl_rates(args.actor_rollout_ref.actor.optim, 40), number, "in verl"
    )


@pytest.mark.parametrize(("more", "words"), [*((more, ()) for more in OTHERS.values()), *NAMED.items()])
def test_other_losses_of_verl(more: str, words: tuple[str, ...], model: Path, peers: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL.format(model=model, folder=tmp_path, name="other", more=more))
    migrated, args = read_migrated(script), theirs.verl_arguments(script, peers)
    batch, groups = theirs.batch_of(
        model, args.actor_rollout_ref.rollout.temperature, next(iter(migrated.config.rewards))
    )
    steps, _, moves = rl_steps(migrated.alone, groups, move, batch.sampled[batch.mask])
    policy = Policy(model, BEFORE, *([UPDATE] if moves else []))
    loss, _ = theirs.verl_step(args, batch, steps["actor_train"].rows, policy)
    if words:
        assert max(differences(steps["actor_train"], loss, policy)) > TOLERANCE
        assert migrated.says(*words)
    else:
        require_equal(more, steps["actor_train"], loss, policy)


@pytest.mark.parametrize("more", ["", " actor_rollout_ref.model.lora_alpha=64"])
def test_adapters_are_those_that_peft_makes_of_verls_arguments(
    more: str, model: Path, peers: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    script = tmp_path / "run.sh"
    more = f"actor_rollout_ref.model.lora_rank=8{more}"
    script.write_text(VERL.format(model=model, folder=tmp_path, name="lora", more=more))
    migrated, args = read_migrated(script), theirs.verl_arguments(script, peers).actor_rollout_ref.model
    # As in verl/workers/engine/fsdp/transformer_impl.py, line 359.
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=args.target_modules,
        bias="none",
    )
    adapted = get_peft_model(Policy(model).lm, lora)
    with started(migrated.alone, total_steps=10) as clusters:
        mine = sorted(tuple(p.shape) for p in module_of(clusters, "actor_train").parameters() if p.requires_grad)
    assert mine == sorted(tuple(p.shape) for p in adapted.parameters() if p.requires_grad)
    own = migrated.config.actor_train.model_args
    assert (own.lora_rank, own.lora_alpha, own.lora_dropout) == (lora.r, lora.lora_alpha, lora.lora_dropout)


@pytest.mark.parametrize("name", FLAGS)
def test_other_estimators_of_openrlhf(name: str, model: Path, peers: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    text = OPENRLHF.format(model=model, folder=tmp_path).replace("--critic.model_name_or_path $MODEL ", "")
    script.write_text(f"{text.rstrip()} {FLAGS[name]}\n")
    args, migrated = theirs.openrlhf_arguments(script, peers), read_migrated(script, "rewards.all.name=math_rule")
    batch, groups = theirs.batch_of(model, args.rollout.temperature, next(iter(migrated.config.rewards)))
    steps, _, moves = rl_steps(migrated.alone, groups, move, batch.sampled[batch.mask])
    policy = Policy(model, BEFORE, *([UPDATE] if moves else []))
    advantages = theirs.openrlhf_experience(args, batch, None).advantages
    if migrated.config.whiten_advantages or migrated.config.adv_estimator == "reinforce_plus_plus":
        advantages = advantages * (1 - 1 / int(batch.mask.sum())) ** 0.5
        assert migrated.says("n - 1 for n tokens")
    loss = theirs.openrlhf_actor(args, batch, advantages, steps["actor_train"].rows, policy)
    require_equal(f"openrlhf, {name}", steps["actor_train"], loss, policy)


def same_arithmetic(migrated: Migrated, args: Any) -> None:
    """Batches, sampling, validation and optimizer are as verl's arguments say."""
    config, rollout, actor = migrated.config, args.actor_rollout_ref.rollout, args.actor_rollout_ref.actor
    batch = config.batch.of("actor_train")
    assert config.batch.rows == args.data.train_batch_size * rollout.n
    assert batch.mini_batch == actor.ppo_mini_batch_size * rollout.n
    assert batch.optimizer_steps == args.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    played = config.actor_infer.generating_args
    assert (played.temperature, played.top_p) == (rollout.temperature, rollout.top_p)
    assert played.top_k in (rollout.top_k, None if rollout.top_k == -1 else rollout.top_k, 0)
    judged, wanted = config.validation.generating_args, rollout.val_kwargs
    assert (judged.temperature, judged.top_p, judged.num_return_sequences) == (
        wanted.temperature, wanted.top_p, wanted.n
    )  # fmt: skip
    assert (config.prompt_length, config.response_length) == (
        args.data.max_prompt_length,
        args.data.max_response_length,
    )
    same_optimizer(config, "actor_train", actor.optim)
    assert config.max_grad_norm == actor.optim.clip_grad
    assert migrated.says("weight_decay", "biases and norms"), "verl decays every parameter"


def same_optimizer(config: Any, role: str, optim: Any) -> None:
    """Adam's constants and the peak of the learning rate are theirs."""
    training = config.sections[role].training_args
    assert training.learning_rate == optim.lr
    assert (training.adam_beta1, training.adam_beta2) == tuple(optim.betas)
    assert training.weight_decay == optim.weight_decay


def require_same_steps(migrated: Migrated, theirs_of_20: list[int], whose: str) -> None:
    """As many steps for 20 rows, or the report names the difference."""
    config = migrated.config
    mine = 20 * config.num_train_epochs // config.rollout_batch_size
    assert [mine] == theirs_of_20 or migrated.says("num_train_epochs", whose)


def require_same_curve(migrated: Migrated, role: str, rates: list[float], number: int, whose: str) -> None:
    """The learning rate of each step of theirs, in which there are `number` optimizer steps, is ours at its first one.

    During a warm-up it isn't, which the report names.
    """
    factor = schedule_from(migrated.config.sections[role].training_args, len(rates) * number)
    warmup = rates.index(max(rates))
    assert [factor(step * number) for step in range(warmup, len(rates))] == pytest.approx(rates[warmup:], abs=TOLERANCE)
    assert not warmup or migrated.says(role, "warm-up", whose)


CONVERSATIONS = [
    [("user", "2+2?"), ("assistant", "4")],
    [("system", "Be brief."), ("user", "Say hi"), ("assistant", "hi"), ("user", "louder"), ("assistant", "HI!")],
    [("user", "spell cat"), ("assistant", "c-a-t"), ("user", "and dog"), ("assistant", "d-o-g, of course")],
    [("system", "You count."), ("user", "1, 2"), ("assistant", "3, 4, 5")],
]


def test_the_first_step_of_fine_tuning_with_verl(model: Path, peers: Path, tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(VERL_SFT.format(model=model, folder=tmp_path))
    messages = [[{"role": role, "content": text} for role, text in row] for row in CONVERSATIONS * 5]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "train.parquet")
    migrated, args = read_migrated(script), theirs.verl_arguments(script, peers, "sft_trainer_engine")
    step, rows = sft_step(migrated.alone)
    their_rows = theirs.verl_sft_rows(args, model)
    assert [row.token_ids.tolist() for row in rows] == [tokens for tokens, _ in their_rows]
    line_break = their_rows[0][0][-1]
    for row, (tokens, learnt) in zip(rows, their_rows, strict=True):
        more = [t for t, mine, other in zip(tokens, row.trained.tolist(), learnt, strict=True) if mine != other]
        assert more and set(more) == {line_break}, "only what the template writes behind the end of a turn"
    assert migrated.says("train_on", "verl also learns", "line break")
    taught = {row.id: (row.token_ids.tolist(), row.trained.tolist()) for row in rows}
    policy = Policy(model)
    require_equal("sft", step, theirs.verl_sft_step([taught[name] for name in step.rows], policy), policy)
    config = migrated.config
    assert config.rows_per_step == args.data.train_batch_size == len(step.rows)
    same_optimizer(config, "actor_train", args.optim)
    assert config.max_grad_norm == args.optim.clip_grad
    # 20 rows: verl takes 20 // 8 x 2 epochs = 4 steps, here it is 20 x 2 / 8 = 5.
    assert migrated.says("num_train_epochs", "in verl")
    require_same_curve(migrated, "actor_train", theirs.verl_rates(args.optim, 40), 1, "in verl")


def test_the_first_step_of_openrlhf(model: Path, peers: Path, tmp_path: Path) -> None:
    script = tmp_path / "ppo.sh"
    script.write_text(OPENRLHF.format(model=model, folder=tmp_path))
    (tmp_path / "reward_func.py").write_text("def reward_func(queries, prompts, labels, **kwargs):\n    return {}\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 20)
    args, migrated = theirs.openrlhf_arguments(script, peers), read_migrated(script, "rewards.all.name=math_rule")
    assert migrated.says("rewards.all.name", "reward_func"), "the new file asks for the reward"
    batch, groups = theirs.batch_of(model, args.rollout.temperature, next(iter(migrated.config.rewards)))
    steps, rollouts, moves = rl_steps(migrated.alone, groups, move, batch.sampled[batch.mask])
    assert moves, "ratios are those of a second update"
    policy, critic = Policy(model, BEFORE, UPDATE), Critic(model, BEFORE, UPDATE)
    with torch.no_grad():
        experience = theirs.openrlhf_experience(args, batch, Critic(model, BEFORE)(batch.rows))
    # Named: they divide by the deviation of n tokens with n, here it is n - 1.
    assert migrated.says("whiten_advantages", "n - 1 for n tokens")
    n = int(batch.mask.sum())
    advantages = experience.advantages * (1 - 1 / n) ** 0.5
    mine = rollouts.batch.advantages[rollouts.batch.action_mask]
    assert (mine - advantages[batch.mask]).abs().max() < 1e-5  # of float32 sums along the response
    loss = theirs.openrlhf_actor(args, batch, advantages, steps["actor_train"].rows, policy)
    require_equal("openrlhf, actor", steps["actor_train"], loss, policy)
    loss = theirs.openrlhf_critic(args, batch, experience, steps["critic"].rows, critic)
    require_equal("openrlhf, critic", steps["critic"], loss, critic)
    assert migrated.says("critic", "starts at 0", "OpenRLHF")
    config = migrated.config
    assert config.batch.rows == args.rollout.batch_size * args.rollout.n_samples_per_prompt
    for role, own in (("actor_train", args.actor), ("critic", args.critic)):
        assert config.batch.of(role).mini_batch == args.train.batch_size
        same_optimizer(config, role, own.adam)
        assert config.max_grad_norm == own.max_norm
        require_same_curve(migrated, role, theirs.openrlhf_rates(own, 40), 1, "in OpenRLHF")
    assert config.actor_infer.generating_args.temperature == args.rollout.temperature
    assert config.actor_infer.generating_args.top_p == args.rollout.top_p
    # openrlhf/trainer/ppo_trainer.py, line 72: the last step of an episode has what is left.
    require_same_steps(migrated, [-(-20 // args.rollout.batch_size) * args.train.num_episodes], "next episode")
