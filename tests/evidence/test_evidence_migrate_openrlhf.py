"""OpenRLHF's own code and the migrated file on the same rows: advantages, returns, the loss and its gradient.

The wheel is fetched and unpacked, without its dependencies: of a file only the functions are taken, imports of packages
that it needs elsewhere are left out.
"""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from roll.configs.parsing.loader import read_tree
from roll.pipelines.credit.credit import credit_stages
from roll.pipelines.credit.stages import StepData
from roll.pipelines.rollouts.assemble import Rollouts, assemble
from roll.pipelines.workers.worker_losses import actor_loss, critic_loss
from roll.strategies.training.micro import denominators
from roll.types.batch import TokenOutputs
from roll.types.trajectory import Group, Task, Trajectory, Turn
from roll.workbench.migrate import peers
from roll.workbench.migrate.openrlhf_flags import kinds_of
from roll.workbench.migrate.overrides import leaves_of
from roll.workbench.migrate.sources import read_source
from roll.workbench.migrate.translate import migrate

LENGTHS, SCORES = ((3, 5, 2, 4), (6, 1, 2, 3), (2, 2, 4, 1)), ((1.0, 0, 0, 3), (2.0, 2, 2, 2), (0.0, 1, 1, -30))
"""Of three prompts with four responses: tokens, and rewards: one group without spread, one beyond the clip range."""
BASE = (
    "--actor.model_name_or_path none --reward.model_name_or_path none --data.prompt_dataset d.jsonl --data.max_len 20 "
    "--rollout.max_new_tokens 10 --rollout.batch_size 3 --rollout.n_samples_per_prompt 4 --train.batch_size 12 "
    "--vllm.num_engines 1 --train.colocate_all"
    + "".join(f" --{role}.num_gpus_per_node 1" for role in ("actor", "critic", "ref", "reward"))
)
K2 = "--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.init_coef 0.1"
CASES = [  # after --A.
    "--A.gamma 0.9 --A.lambd 0.8",
    "--A.estimator reinforce --algo.kl.estimator k3 --A.gamma 0.9",
    f"--A.estimator group_norm {K2} --actor.eps_clip_low_high 0.2 0.28",
    f"--A.estimator group_norm {K2} --actor.loss_agg_mode token-mean --actor.dual_clip 3",
    "--A.estimator group_norm --algo.kl.init_coef 0 --actor.policy_loss_type gspo --actor.eps_clip 0.1",
    "--A.estimator group_norm --algo.kl.init_coef 0 --actor.loss_agg_mode seq-mean-token-mean",
    "--A.estimator group_norm",
    f"--A.estimator dr_grpo {K2.replace('k2', 'k3')}",
    "--A.estimator dr_grpo --reward.overlong_buffer_len 6",
    f"--A.estimator rloo {K2} --actor.entropy_coef 0.01",
    "--A.estimator rloo --reward.overlong_buffer_len 6 --reward.overlong_penalty_factor 2",
    f"--A.estimator reinforce_baseline {K2}",
    "--A.estimator reinforce_baseline --algo.kl.init_coef 0.1",
    "--A.estimator flash_reinforce",
    "--A.estimator rloo --A.is_correction_level token --A.is_correction_mode clip",
    "--A.estimator rloo --A.is_correction_level token",
    "--A.estimator rloo --A.is_correction_level token --A.is_correction_gating tv --A.is_correction_threshold 0.3",
    "--A.estimator rloo --rollout.top_p 0.9",
]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Their functions: `utils` of models, `loss`, `maker` of experiences."""
    folder, release = tmp_path_factory.mktemp("openrlhf"), peers.release("openrlhf")
    command = [sys.executable, "-m", "pip", "download", f"openrlhf=={release}", "--no-deps", "-q", "-d", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"the wheel of openrlhf {release} can't be fetched")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    (root,) = (path.parent for path in folder.rglob("openrlhf/models"))
    utils = functions(root / "models" / "utils.py", deepspeed=mock.Mock())
    penalties = functions(root / "trainer" / "ppo_utils" / "length_penalty.py", init_logger=logging.getLogger)
    maker = functions(
        root / "trainer" / "ppo_utils" / "experience_maker.py", **vars(utils), ray=mock.Mock(), Experience=object,
        RayActorGroup=object, init_logger=logging.getLogger, apply_length_penalties=penalties.apply_length_penalties,
    )  # fmt: skip
    loss = functions(root / "models" / "loss.py", masked_mean=utils.masked_mean)
    return SimpleNamespace(utils=utils, loss=loss, maker=maker.RemoteExperienceMaker)


def functions(file: Path, **names: Any) -> SimpleNamespace:
    """What a file defines, without what it imports from its own package, Ray and DeepSpeed."""
    own = r"^(from|import) (openrlhf|ray|deepspeed|\.)\S*.*$"
    namespace = {"__name__": file.stem, **names}
    exec(compile(re.sub(own, "", file.read_text("utf-8"), flags=re.M), str(file), "exec"), namespace)
    return SimpleNamespace(**namespace)


def arguments(tree: dict[str, Any]) -> Any:
    """Their arguments as the trainer has them, from a script's flags and the parser's defaults."""
    nested: dict[str, Any] = {}
    flags = {name: default for name, (_, default) in kinds_of("train_ppo_ray").items()} | dict(leaves_of(tree))
    for key, value in flags.items():
        node = nested
        *sections, word = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[word] = value
    args = spaces(nested)
    args.actor.eps_clip_low_high = args.actor.eps_clip_low_high or [args.actor.eps_clip] * 2
    args.algo.advantage.is_correction_threshold = [0.0, *args.algo.advantage.is_correction_threshold][-2:]
    return args


def spaces(node: Any) -> Any:
    return SimpleNamespace(**{key: spaces(value) for key, value in node.items()}) if isinstance(node, dict) else node


def rollouts() -> Rollouts:
    groups = []
    for number, (scores, lengths) in enumerate(zip(SCORES, LENGTHS, strict=True)):
        task = Task(id=f"t{number}", source="hand", payload={}, seed=0, tag="all", domain="all")
        turns = [Turn(prompt_ids=(7, 8), response_ids=tuple(range(10, 10 + length)), logprobs=(-1.0,) * length,
                      versions=(0,) * length, finish_reason="stop") for length in lengths]  # fmt: skip
        played = [Trajectory(task_id=task.id, member=member, turns=(turn,), reward=score, status="ok")
                  for member, (turn, score) in enumerate(zip(turns, scores, strict=True))]  # fmt: skip
        groups.append(Group(task=task, trajectories=tuple(played)))
    return assemble(groups)


def padded(columns: Tensor, rows: Rollouts) -> Tensor:
    """A token column [N] as theirs, [B, T]: responses alone, from the left."""
    lengths = [length for group in LENGTHS for length in group]
    parts = columns[rows.batch.action_mask].split(lengths)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


@pytest.mark.parametrize("flags", CASES)
def test_the_first_step_is_that_of_openrlhf(peer: SimpleNamespace, tmp_path: Path, flags: str):
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 -m openrlhf.cli.train_ppo_ray {BASE} {flags.replace('--A', '--algo.advantage')}\n", "utf-8"
    )
    args = arguments(read_source(script).tree)
    report, tree = migrate(script)
    reading = read_tree(tree, "")
    assert not report.missing and not reading.violations and reading.config is not None
    config: Any = reading.config

    rows, generator = rollouts(), torch.Generator().manual_seed(1)
    names = ("old_logprobs", "ref_logprobs", "sampling_logprobs", "values", "new", "new_values", "entropy")
    column = {name: -torch.rand(len(rows.batch.action_mask), generator=generator) * 1.5 for name in names}
    column["sampling_logprobs"] = column["old_logprobs"] + 0.5 * torch.randn(len(column["new"]), generator=generator)
    column["sampling_logprobs"].clamp_(max=-0.01)
    stored = names[: 4 if config.uses_critic else 3]
    rows = replace(rows, batch=rows.batch.with_columns(**{name: column[name] for name in stored}))
    given = credit_stages(config)(StepData(rows, 1)).rollouts
    theirs = {name: padded(values, rows) for name, values in column.items()}
    mask = padded(torch.ones(len(column["new"])), rows)
    advantages, returns = credited(peer, args, theirs, mask)

    tokens = int(mask.sum())
    # The one difference, which the report names: variances over N tokens, here N - 1.
    factor = math.sqrt((tokens - 1) / tokens) if config.whiten_advantages else 1.0
    assert (factor != 1.0) == any("unbiased deviation" in use.note for use in (*report.uses, *report.filled))
    assert_close(padded(given.batch.advantages, rows), advantages * factor, atol=2e-6, rtol=2e-6)

    source = theirs["new"].clone().requires_grad_()
    loss = policy_loss(peer, args, source, theirs, advantages * factor, mask)
    (gradient,) = torch.autograd.grad(loss, source)
    ours = column["new"].clone().requires_grad_()
    outputs = TokenOutputs(
        row_ids=given.batch.row_ids, offsets=given.batch.offsets, logprobs=ours, entropy=column["entropy"]
    )
    found = actor_loss(config).compute(outputs, given.batch, denominators(given.batch)).loss
    (own,) = torch.autograd.grad(found, ours)
    assert_close(found, loss, atol=1e-6, rtol=1e-6, check_dtype=False)
    assert_close(padded(own, rows), gradient, atol=1e-6, rtol=1e-5)
    if config.uses_critic:
        assert_close(padded(given.batch.returns, rows), returns, atol=1e-6, rtol=1e-6)
        theirs_loss = peer.loss.ValueLoss(args.critic.value_clip)(theirs["new_values"], theirs["values"], returns, mask)
        outputs = TokenOutputs(row_ids=given.batch.row_ids, offsets=given.batch.offsets, values=column["new_values"])
        value = critic_loss(config).compute(outputs, given.batch, denominators(given.batch)).loss
        assert_close(value, theirs_loss, atol=1e-6, rtol=1e-6, check_dtype=False)


def credited(peer: SimpleNamespace, args: Any, columns: dict[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Their advantages and returns, [B, T]."""
    kl = torch.zeros_like(mask)
    if args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss:
        kl = peer.utils.compute_approx_kl(
            columns["old_logprobs"], columns["ref_logprobs"], kl_estimator=args.algo.kl.estimator
        )
    experience = SimpleNamespace(
        index=list(range(len(mask))), rewards=torch.tensor([score for group in SCORES for score in group]),
        action_mask=mask, kl=kl * mask, values=columns["values"], info={}, response_length=mask.sum(1).int(),
        truncated=None,
    )  # fmt: skip
    maker = SimpleNamespace(strategy=SimpleNamespace(args=args), args=args)
    maker.advantage_estimator = args.algo.advantage.estimator
    maker.kl_ctl = SimpleNamespace(value=args.algo.kl.init_coef)
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(maker, name, MethodType(getattr(peer.maker, name), maker))
    (found,) = peer.maker.compute_advantages_and_returns(maker, [experience])
    return found.advantages * mask, found.returns * mask


def policy_loss(
    peer: SimpleNamespace, args: Any, new: Tensor, columns: dict[str, Tensor], advantages: Tensor, mask: Tensor
) -> Tensor:
    """Their loss as `ActorPPOTrainer.training_step` puts it together."""
    advantage = args.algo.advantage
    low, high = args.actor.eps_clip_low_high
    loss = peer.loss.PolicyLoss(
        clip_eps_low=low, clip_eps_high=high, dual_clip=args.actor.dual_clip,
        token_level_loss=args.actor.loss_agg_mode == "token-mean", policy_loss_type=args.actor.policy_loss_type,
        is_correction_level=advantage.is_correction_level, is_correction_mode=advantage.is_correction_mode,
        is_correction_gating=advantage.is_correction_gating, is_correction_threshold=advantage.is_correction_threshold,
    )(new, columns["old_logprobs"], advantages, mask, columns["sampling_logprobs"])[0]  # fmt: skip
    if args.algo.kl.use_loss:
        kl = peer.utils.compute_approx_kl(new, columns["ref_logprobs"], columns["old_logprobs"], args.algo.kl.estimator,
                                          args.algo.kl.unbiased_gradient)  # fmt: skip
        loss = loss + peer.loss.aggregate_loss(kl, mask) * args.algo.kl.init_coef
    if args.actor.entropy_coef:
        loss = loss - peer.loss.aggregate_loss(columns["entropy"], mask) * args.actor.entropy_coef
    return loss
