"""The first optimizer step of verl 0.9.1 and OpenRLHF 0.11.2, by the code of their wheels on plain forward passes.

A launch script is read by their own reader (Hydra and verl's YAML, the argument parser of OpenRLHF), so that what it
leaves out has their defaults. Everything is float32, on one rank.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from first_steps import hand_made, moved
from torch import Tensor, nn

RELEASES = ("verl==0.9.1", "openrlhf==0.11.2", "tensordict==0.15.3", "pyvers==0.2.3", "codetiming==1.4.0",
            "pylatexenc==2.11")  # fmt: skip
VARIABLE = "ROLL_PEERS"
"""Folders in which they are installed already, with `pip install --no-deps --target`."""
LONGEST = 12
BEFORE, UPDATE = (1, 0.02), (2, 0.02)
"""Seed and size of the noise on the weights before the old log-probs are computed, and ahead of the update."""
SCORES = [[1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 0.5, 0], [0, 1, 1, 1],
          [0.5, 0, 0, 1], [1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 0]]  # fmt: skip


# --- the wheels -------------------------------------------------------------------------------------------------------


@contextmanager
def installed(folder: Path) -> Iterator[Path]:
    """Have both projects importable, from `ROLL_PEERS` or else `folder`; gives the folder of verl's YAML."""
    folders = [folder for folder in os.environ.get("ROLL_PEERS", "").split(os.pathsep) if folder]
    wanted = [release for release in RELEASES if not any(_holds(Path(folder), release) for folder in folders)]
    if wanted:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *wanted]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"{', '.join(wanted)} can't be fetched")
        folders.append(str(folder))
    before = set(sys.modules)
    sys.path[:0] = folders
    # Both import these at the top of files of which only the losses are called here.
    _stub("torchdata.stateful_dataloader", "StatefulDataLoader")
    _stub("flash_attn.bert_padding", "index_first_axis", "pad_input", "rearrange", "unpad_input")
    _stub("flash_attn.utils.distributed", "all_gather")
    _stub("openrlhf.trainer.ray.launcher", "RayActorGroup", below="openrlhf.trainer")
    yield Path(importlib.import_module("verl.trainer.config").__file__ or "").parent
    del sys.path[: len(folders)]
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("verl", "openrlhf", "torchdata", "flash_attn", "tensordict"):
            del sys.modules[name]


def _holds(folder: Path, release: str) -> bool:
    name, _, version = release.partition("==")
    return (folder / f"{name}-{version}.dist-info").is_dir()


def _stub(name: str, *members: str, below: str = "") -> None:
    """Put an empty module there, and those around it below `below`, which is a real one."""
    words = name.split(".")
    for count in range(1, len(words) + 1):
        part = ".".join(words[:count])
        if len(part) > len(below):
            sys.modules.setdefault(part, types.ModuleType(part))
    for member in members:
        setattr(sys.modules[name], member, object)


# --- plain forward passes ---------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model as transformers has it."""

    def __init__(self, folder: Path, *moves: tuple[int, float]) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for seed, scale in moves:
            moved(self, seed, scale)

    def forward(self, rows: list[Row], temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the response tokens, [B, LONGEST], 0 behind their ends."""
        logprobs, entropies = torch.zeros(len(rows), LONGEST), torch.zeros(len(rows), LONGEST)
        for i, row in enumerate(rows):
            logits = self.lm(torch.tensor([row.prompt + row.response]), use_cache=False).logits[0] / temperature
            every = logits[len(row.prompt) - 1 : -1].log_softmax(-1)
            place = (torch.tensor([i]), torch.arange(len(row.response)))
            logprobs = logprobs.index_put(place, every.gather(1, torch.tensor(row.response)[:, None])[:, 0])
            entropies = entropies.index_put(place, -(every.exp() * every).sum(-1))
        return logprobs, entropies


@dataclass(frozen=True)
class Row:
    """A response of the batch."""

    prompt: list[int]
    response: list[int]
    score: float
    group: str


@dataclass(frozen=True)
class Batch:
    """What both sides are given."""

    rows: list[Row]
    ids: list[str]
    mask: Tensor
    sampled: Tensor
    old: Tensor
    reference: Tensor

    def column(self, values: list[float]) -> Tensor:
        """Return [B, LONGEST] with a value at the end of each response."""
        return torch.stack(
            [torch.eye(LONGEST)[len(row.response) - 1] * v for row, v in zip(self.rows, values, strict=True)]
        )


def batch_of(model: Path, temperature: float, domain: str) -> tuple[Batch, list[Any]]:
    """Return the batch, and the same as groups of ours."""
    groups = hand_made(SCORES, vocabulary=100, longest=LONGEST, domain=domain)
    members = [t for group in groups for t in group.trajectories]
    rows = [Row(list(t.turns[0].prompt_ids), list(t.turns[0].response_ids), t.reward, t.task_id) for t in members]
    mask = torch.stack([torch.arange(LONGEST) < len(row.response) for row in rows])
    with torch.no_grad():
        old, reference = Policy(model, BEFORE)(rows, temperature)[0], Policy(model)(rows, temperature)[0]
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(3))
    # Some responses are nearly the trainer's, others far from it: weights are capped, rows are rejected.
    scale = torch.tensor([0.1, 0.3, 0.6, 0.2]).repeat(len(SCORES))[:, None]
    sampled = torch.where(mask, old - scale * noise, 0.0)
    return Batch(rows, [t.id for t in members], mask, sampled, old, reference), groups


# --- verl -------------------------------------------------------------------------------------------------------------


def words_of(script: Path, module: str) -> list[str]:
    """Return the words behind `-m <module>` in a script whose only variable is MODEL."""
    lines = script.read_text("utf-8").replace("\\\n", " ").splitlines()
    model = next(line for line in lines if line.startswith("MODEL=")).removeprefix("MODEL=")
    command = next(line for line in lines if f" -m {module}" in line).replace("$MODEL", model).replace("$@", "")
    words = command.split()
    return words[words.index("-m") + 2 :]


def verl_arguments(script: Path, yaml: Path, name: str = "ppo_trainer") -> Any:
    """What verl reads from a script: its composed configuration."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(yaml), version_base=None):
        return compose(name, overrides=words_of(script, "verl."))


def verl_step(args: Any, batch: Batch, rows: tuple[str, ...], policy: Policy) -> tuple[Tensor, Tensor]:
    """Verl's first optimizer step over these rows: the loss, with its gradient in `policy`, and all advantages."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage, core_algos
    from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode, compute_rollout_correction_and_add_to_batch
    from verl.utils.config import omega_conf_to_dataclass

    data = DataProto.from_dict(
        tensors={
            "response_mask": batch.mask.long(), "old_log_probs": batch.old, "ref_log_prob": batch.reference,
            "rollout_log_probs": batch.sampled, "token_level_scores": batch.column(verl_scores(args, batch)),
        },
        non_tensors={"uid": np.array([row.group for row in batch.rows], dtype=object)},
    )  # fmt: skip
    rule, bypass = args.algorithm.get("rollout_correction"), False
    # As in the `fit` of verl/trainer/ppo/ray_trainer.py.
    if rule is not None and rule.get("bypass_mode", False):
        apply_bypass_mode(data, rule, args.actor_rollout_ref.actor.policy_loss)
        bypass = True
    if args.algorithm.use_kl_in_reward:
        data, _ = apply_kl_penalty(
            data, core_algos.get_kl_controller(args.algorithm.kl_ctrl), args.algorithm.kl_penalty
        )
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    if rule is not None and not bypass:
        data, _ = compute_rollout_correction_and_add_to_batch(data, rule)
    a = args.algorithm
    data = compute_advantage(
        data, a.adv_estimator, a.gamma, a.lam, norm_adv_by_std_in_grpo=a.norm_adv_by_std_in_grpo, config=a
    )
    chosen = [batch.ids.index(name) for name in rows]
    logprobs, entropy = policy([batch.rows[i] for i in chosen], args.actor_rollout_ref.rollout.temperature)
    actor = omega_conf_to_dataclass(args.actor_rollout_ref.actor)
    part = data.batch[chosen]
    output = {"log_probs": logprobs} | ({"entropy": entropy} if actor.entropy_coeff else {})
    loss = verl_loss(
        actor, output, part, args.actor_rollout_ref.actor.ppo_mini_batch_size * args.actor_rollout_ref.rollout.n
    )
    loss.backward()
    return loss.detach(), data.batch["advantages"]


def verl_loss(actor: Any, output: dict[str, Tensor], part: Any, size: int) -> Tensor:
    """Call verl's `ppo_loss` with padded columns; `size` are the responses of a mini-batch."""
    from verl.workers.utils import losses

    class Padded(dict):  # type: ignore[type-arg]
        def select(self, *names: str) -> Padded:
            return Padded({name: self[name] for name in names})

        def to_padded_tensor(self) -> Padded:
            return self

    data = Padded(part.items())
    # As in `train_batch` of verl/workers/engine/base.py, on one rank.
    data |= {"dp_size": 1, "batch_num_tokens": float(data["response_mask"].sum()), "global_batch_size": size}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(losses, "no_padding_2_padding", lambda column, _: column)
        return losses.ppo_loss(actor, output, data)[0]


def verl_scores(args: Any, batch: Batch) -> list[float]:
    """Scores of responses with what verl's reward manager takes off."""
    scores = [row.score for row in batch.rows]
    extra = args.reward.get("reward_kwargs", {}).get("overlong_buffer_cfg")
    if args.reward.reward_manager.name == "dapo" and extra is not None and extra.enable:
        # verl/experimental/reward_loop/reward_manager/dapo.py, lines 108 to 114
        begin = args.reward.reward_kwargs.max_resp_len - extra.len
        beyond = [len(row.response) - begin for row in batch.rows]
        return [s + min(-b / extra.len * extra.penalty_factor, 0) for s, b in zip(scores, beyond, strict=True)]
    return scores


def verl_rates(optim: Any, steps: int) -> list[float]:
    """Learning rates of the steps of a run as shares of the peak, as verl's FSDP engine schedules them."""
    from verl.utils import torch_functional as verl_F

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    # As in `_build_lr_scheduler` of verl/workers/engine/fsdp/transformer_impl.py.
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * steps)
    if optim.lr_scheduler_type == "constant":
        schedule = verl_F.get_constant_schedule_with_warmup(optimizer, warmup)
    else:
        schedule = verl_F.get_cosine_schedule_with_warmup(
            optimizer, warmup, steps, min_lr_ratio=optim.min_lr_ratio, num_cycles=optim.num_cycles,
            zero_indexed_step=optim.zero_indexed_step,
        )  # fmt: skip
    return rates_of(optimizer, schedule, steps)


def openrlhf_rates(own: Any, steps: int) -> list[float]:
    """The same of OpenRLHF, whose schedules are those of transformers."""
    from transformers.trainer import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    # As in openrlhf/utils/deepspeed/deepspeed.py, lines 370 to 383.
    assert own.lr_scheduler == "cosine_with_min_lr"
    more = {"min_lr_rate": own.min_lr_ratio}
    warmup = math.ceil(steps * own.lr_warmup_ratio)
    schedule = get_scheduler(own.lr_scheduler, optimizer, warmup, steps, scheduler_specific_kwargs=more)
    return rates_of(optimizer, schedule, steps)


def rates_of(optimizer: Any, schedule: Any, steps: int) -> list[float]:
    """Step through a schedule."""
    rates = []
    for _ in range(steps):
        rates.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return rates


def verl_sft_rows(args: Any, model: Path) -> list[tuple[list[int], list[bool]]]:
    """Tokens of every row as verl's own data set has them, and which of them are learnt."""
    from transformers import AutoTokenizer
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    found = MultiTurnSFTDataset(args.data.train_files, AutoTokenizer.from_pretrained(model), args.data)
    items = [found[i] for i in range(len(found))]
    return [(item["input_ids"].tolist(), item["loss_mask"].bool().tolist()) for item in items]


def verl_sft_step(rows: list[tuple[list[int], list[bool]]], policy: Policy) -> Tensor:
    """Return verl's loss over rows, with its gradient in `policy`."""
    from verl.workers.utils.losses import sft_loss

    logprobs = []
    for tokens, _ in rows:
        logits = policy.lm(torch.tensor([tokens]), use_cache=False).logits[0]
        following = torch.tensor([*tokens[1:], tokens[0]])
        logprobs.append(logits.log_softmax(-1).gather(1, following[:, None])[:, 0])
    mask = torch.nested.as_nested_tensor([torch.tensor(m, dtype=torch.float32) for _, m in rows], layout=torch.jagged)
    data = {"dp_size": 1, "batch_num_tokens": float(mask.values().sum()), "loss_mask": mask}
    output = {"log_probs": torch.nested.as_nested_tensor(logprobs, layout=torch.jagged)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("verl.workers.utils.losses.tu.get_non_tensor_data", lambda data, key, default: default)
        loss: Tensor = sft_loss(None, output, data)[0]
    loss.backward()
    return loss.detach()


# --- OpenRLHF ---------------------------------------------------------------------------------------------------------


def openrlhf_arguments(script: Path, peers: Path) -> Any:
    """What OpenRLHF reads from a script: the namespace that its `train` is called with."""
    words = words_of(script, "openrlhf.cli")
    tree = ast.parse((peers.parents[2] / "openrlhf" / "cli" / "train_ppo_ray.py").read_text("utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(main.body[-1]) == "train(args)"
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["train_ppo_ray", *words])
        exec(compile(ast.Module(main.body[:-1], []), "train_ppo_ray", "exec"), names)
    return names["args"]


class Critic(nn.Module):
    """A backbone with a head for values, which begin at 0."""

    def __init__(self, folder: Path, *moves: tuple[int, float]) -> None:
        from transformers import AutoModel

        super().__init__()
        self.backbone = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.value_head = nn.Linear(self.backbone.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)
        for seed, scale in moves:
            moved(self, seed, scale)

    def forward(self, rows: list[Row]) -> Tensor:
        """Return the value before each response token is chosen, [B, LONGEST]."""
        values = torch.zeros(len(rows), LONGEST)
        for i, row in enumerate(rows):
            hidden = self.backbone(torch.tensor([row.prompt + row.response]), use_cache=False).last_hidden_state[0]
            of_tokens = self.value_head(hidden[len(row.prompt) - 1 : -1])[:, 0]
            values = values.index_put((torch.tensor([i]), torch.arange(len(row.response))), of_tokens)
        return values


def openrlhf_experience(args: Any, batch: Batch, values: Tensor | None) -> Any:
    """Return the batch with OpenRLHF's rewards, advantages and returns."""
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

    assert args.algo.kl.target is None
    assert not args.algo.kl.use_loss
    # As in its `make_experience`.
    experience = Experience(
        rewards=torch.tensor([row.score for row in batch.rows]),
        values=values,
        action_mask=batch.mask,
        kl=compute_approx_kl(batch.old, batch.reference, kl_estimator=args.algo.kl.estimator) * batch.mask,
        index=list(range(len(batch.rows))),
    )
    maker = object.__new__(RemoteExperienceMaker)
    maker.strategy = maker.args = SimpleNamespace(args=args)
    maker.advantage_estimator = args.algo.advantage.estimator
    maker.kl_ctl = FixedKLController(args.algo.kl.init_coef)
    return maker.compute_advantages_and_returns([experience])[0]


def openrlhf_actor(args: Any, batch: Batch, advantages: Tensor, rows: tuple[str, ...], policy: Policy) -> Tensor:
    """Return the loss of the actor's first optimizer step, with its gradient in `policy`."""
    from openrlhf.models.loss import PolicyLoss, aggregate_loss
    from openrlhf.utils.loss_utils import _optimizer_step_loss_norm

    a, chosen = args.algo.advantage, [batch.ids.index(name) for name in rows]
    # As in PPO's trainer of openrlhf/trainer/ray/ppo_actor.py.
    loss_fn = PolicyLoss(
        clip_eps_low=args.actor.eps_clip_low_high[0],
        clip_eps_high=args.actor.eps_clip_low_high[1],
        dual_clip=args.actor.dual_clip,
        token_level_loss=args.actor.loss_agg_mode == "token-mean",
        policy_loss_type=args.actor.policy_loss_type,
        is_correction_level=a.is_correction_level,
        is_correction_mode=a.is_correction_mode,
        is_correction_gating=a.is_correction_gating,
        is_correction_threshold=a.is_correction_threshold,
    )
    logprobs, entropy = policy([batch.rows[i] for i in chosen], args.rollout.temperature)
    mask = batch.mask[chosen]
    sizes = _optimizer_step_loss_norm([mask], None, 1, 1)
    loss = loss_fn(logprobs, batch.old[chosen], advantages[chosen], mask, batch.sampled[chosen], **sizes)[0]
    if args.actor.entropy_coef:
        loss = loss - args.actor.entropy_coef * aggregate_loss(entropy, mask, **sizes)
    loss.backward()
    return loss.detach()


def openrlhf_critic(args: Any, batch: Batch, experience: Any, rows: tuple[str, ...], critic: Critic) -> Tensor:
    """Return the loss of the critic's first optimizer step, with its gradient in `critic`."""
    from openrlhf.models.loss import ValueLoss
    from openrlhf.utils.loss_utils import _optimizer_step_loss_norm

    chosen = [batch.ids.index(name) for name in rows]
    mask, old, returns = batch.mask[chosen], experience.values[chosen], experience.returns[chosen]
    sizes = _optimizer_step_loss_norm([mask], None, 1, 1)
    loss: Tensor = ValueLoss(args.critic.value_clip)(
        critic([batch.rows[i] for i in chosen]), old, returns, mask, **sizes
    )
    loss.backward()
    return loss.detach()
