"""`kl_penalty: full` and `kl_loss_type: full`: the KL over the whole vocabulary, against plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from preferences import policy_in
from small import Run, run_small
from tiny_models import build_tiny_model
from toy import write_toy

from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config

IN_LOSS = ("use_kl_loss=true", "kl_loss_type=full", "kl_loss_coef=1", "rl_loss_coef=0")
IN_REWARD = ("add_token_level_kl=true", "kl_penalty=full", "init_kl_coef=0.1", "adv_estimator=reinforce")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("reference") / "model", seed=7)


def run_with(folder: Path, model: Path, reference: Path, *overrides: str, **files: Any) -> Run:
    keys = (f"reference.model_args.model_name_or_path={reference}", *overrides)
    return run_small(folder, model, *keys, dump=True, **files)


def exact(policy: torch.nn.Module, reference: torch.nn.Module, row: Any, top_k: int | None = None) -> torch.Tensor:
    """KL(policy | reference) in float64 at each sampled token of a row, [n]."""
    ids, mask = torch.tensor(row.token_ids), torch.tensor(row.action_mask)
    tables = [
        model(input_ids=ids[None]).logits[0].double().log_softmax(-1)[:-1][mask[1:]] for model in (policy, reference)
    ]
    if top_k is not None:
        best = tables[1].topk(top_k).indices
        kept = [table.gather(1, best) for table in tables]
        tables = [torch.cat([table, torch.log1p(-table.exp().sum(1, keepdim=True))], 1) for table in kept]
    mine, theirs = tables
    return (mine.exp() * (mine - theirs.detach())).sum(1)


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_step_of_the_full_kl_loss_is_that_of_plain_transformers(tiny_model, other, tmp_path, top_k):
    keys = (*IN_LOSS, *([f"kl_top_k={top_k}"] if top_k else []))
    run = run_with(tmp_path, tiny_model, other, *keys)
    policy, reference = policy_in(tiny_model), policy_in(other)
    terms = torch.cat([exact(policy, reference, row, top_k) for row in run.rollouts()])
    mean = float(terms.detach().mean())
    terms.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    assert run.last["actor/kl_loss"] == pytest.approx(mean, rel=1e-4)
    assert run.last["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_with_adapters_the_reference_is_the_actor_without_them(tiny_model, tmp_path):
    keys = (*IN_LOSS, "actor_train.model_args.lora_rank=2", "max_steps=2", "reference=null", "rl_loss_coef=1")
    run = run_small(tmp_path, tiny_model, *keys)
    first, second = run.column("actor/kl_loss")
    assert first == pytest.approx(0.0, abs=1e-7)
    assert second > 1e-9


def test_the_full_kl_penalty_is_taken_off_every_token(tiny_model, other, tmp_path):
    run = run_with(tmp_path, tiny_model, other, *IN_REWARD)
    policy, reference = policy_in(tiny_model), policy_in(other)
    (role, batch), rows = run.trained[0], {tuple(row.token_ids): row for row in run.rollouts()}
    assert role == "actor_train"
    found, expected = [], []
    for i in range(len(batch)):
        row = rows[tuple(batch.row("token_ids", i).tolist())]
        rewards = batch.row("token_rewards", i)[batch.row("action_mask", i)].double()
        rewards[-1] -= row.reward
        found.append(rewards)
        expected.append(-0.1 * exact(policy, reference, row).detach())
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-6)
    assert batch.teacher_logprobs is None  # they don't travel further
    assert run.last["kl/reference"] == pytest.approx(-float(torch.cat(expected).mean()) / 0.1, rel=1e-4)


def test_names_of_estimators_in_other_projects_are_taken(tiny_model, tmp_path):
    write_toy(tmp_path, tiny_model, 8)
    for given, name in {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3+": "low_var_kl+", "k2+": "mse"}.items():
        config = load_config(tmp_path, "toy", [f"kl_loss_type={given}", f"kl_penalty={given}"])
        assert (config.kl_loss_type, config.kl_penalty) == (name, name.removesuffix("+"))


def test_a_full_kl_with_a_teacher_is_refused(tiny_model, other, tmp_path):
    write_toy(tmp_path, tiny_model, 8)
    keys = (*IN_LOSS, "reference={}", f"teacher.model_args.model_name_or_path={other}")
    with pytest.raises(ConfigError, match=r"kl_loss_type: .* with a teacher"):
        load_config(tmp_path, "toy", keys)
