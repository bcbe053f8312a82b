"""Losses of TRL's GRPO and RLOO and those of the migrated file, in log-probs that are far from those of the sampler.

No model runs: both are given the same log-probs, of the update, of the weights before it, of the reference and of the
sampler, so ratios are clipped, sequences are cut off and the KL is something. What is compared is the loss and its
gradient in the log-probs of the update; or the new file asks, and the report says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from trl_first_steps import (
    Case,
    completion_of,
    in_reach,
    leaves,
    lines_of,
    migrated,
    our_config,
    their_trainer,
    write_case,
)

from roll.pipelines.credit.credit import credit_stages
from roll.pipelines.credit.stages import StepData
from roll.pipelines.rollouts.assemble import assemble
from roll.pipelines.workers.worker_losses import actor_loss
from roll.strategies.training.micro import denominators
from roll.types.batch import TokenOutputs
from roll.types.trajectory import Group, Task, Trajectory, Turn

PROMPTS, MEMBERS, LIMIT = 4, 4, 8
KEYS = {"learning_rate": 1e-6, "num_generations": MEMBERS, "max_completion_length": LIMIT, "num_iterations": 2,
        "per_device_train_batch_size": PROMPTS * MEMBERS, "reward_funcs": ["lower_case.share"]}  # fmt: skip
VLLM = {"use_vllm": True}
TWO = {"reward_funcs": ["lower_case.share", "lower_case.brief"], "reward_weights": [1.0, 0.5]}
VARIANTS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "a bound above": {"epsilon": 0.1, "epsilon_high": 0.28},
    "a second bound": {"delta": 1.5},
    "KL": {"beta": 0.04},
    "KL without a ratio": {"beta": 0.04, "use_bias_correction_kl": False},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "scaled over the batch": {"scale_rewards": "batch"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo by default": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo over tokens": {"importance_sampling_level": "sequence", "epsilon": 3e-4},
    "truncated ones masked": {"mask_truncated_completions": True},
    "entropy": {"entropy_coef": 0.01},
    "likely tokens left out": {"top_entropy_quantile": 0.5},
    "old samples masked": {"off_policy_mask_threshold": 0.2},
    "two rewards": TWO,
    "gdpo": {**TWO, "multi_objective_aggregation": "normalize_then_sum"},
    "vLLM": VLLM,
    "vLLM, cut at a bound": {**VLLM, "vllm_importance_sampling_mode": "sequence_truncate"},
    "vLLM, tokens masked": {**VLLM, "vllm_importance_sampling_mode": "token_mask",
                            "vllm_importance_sampling_clip_max": 1.3},
    "vLLM, tokens cut": {**VLLM, "vllm_importance_sampling_mode": "token_truncate",
                         "vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_clip_min": 0.8},
    "vLLM without a correction": {**VLLM, "vllm_importance_sampling_correction": False},
    "vLLM and KL": {**VLLM, "beta": 0.04},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny policy, where TRL can be imported."""
    with in_reach(tmp_path_factory.mktemp("trl")) as models:
        yield models["policy"]


@dataclass(frozen=True)
class Logprobs:
    """Of 16 responses of at most 8 tokens, [16, 8]."""

    update: Tensor
    old: Tensor
    reference: Tensor
    sampler: Tensor
    entropy: Tensor

    @classmethod
    def drawn(cls, *, sampler_differs: bool, moved: bool = True) -> Logprobs:
        """Differences of a few tenths: a third of all ratios is clipped at 0.2. `moved`: there was an update before."""
        generator = torch.Generator().manual_seed(3)
        old, first, second, third, entropy = (
            torch.randn(PROMPTS * MEMBERS, LIMIT, generator=generator, dtype=torch.float64) for _ in range(5)
        )
        old = -old.abs() - 0.5
        sampler = old - 0.15 * third if sampler_differs else old
        return cls((old + 0.25 * moved * first).requires_grad_(), old, old + 0.4 * second, sampler, entropy.abs())


def _theirs(case: Case, given: Logprobs) -> tuple[float, Tensor, list[list[float]]]:
    """Return TRL's loss, its gradient in the log-probs of the update and the rewards of each function."""
    trainer = their_trainer(case, "use_vllm=False")
    responses = _responses(trainer._tokenizer.eos_token_id)
    sampled = [row[: len(tokens)].tolist() for row, tokens in zip(given.sampler, responses, strict=True)]

    def logprobs(model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        if model is trainer.ref_model:
            return given.reference, given.entropy, None
        return (given.update if torch.is_grad_enabled() else given.old), given.entropy, None

    trainer.use_vllm = bool(case.keys.get("use_vllm"))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    completions: Any = responses if case.job == "rloo" else (responses, sampled if trainer.use_vllm else None)
    with (
        mock.patch.object(trainer, "_generate_single_turn", return_value=completions),
        mock.patch.object(trainer, "_get_per_token_logps_and_entropies", logprobs),
    ):
        rows = [row for row in case.rows for _ in range(MEMBERS)]
        inputs = trainer._generate_and_score_completions(rows)
        loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, given.update)
    texts = trainer.processing_class.batch_decode(responses, skip_special_tokens=True)
    return float(loss.detach()), gradient, [function(completions=texts) for function in trainer.reward_funcs]


def _responses(eos: int) -> list[list[int]]:
    prompts = [(7, 8 + prompt) for prompt in range(PROMPTS)]
    return [completion_of(prompt, member, LIMIT, eos) for prompt in prompts for member in range(MEMBERS)]


def _ours(case: Case, given: Logprobs, rewards: list[list[float]]) -> tuple[float, Tensor]:
    """Return our loss and its gradient, by the pipeline's own credit and loss."""
    config = our_config(case)
    parts = config.rewards["all"].parts or {}
    weights = [part.weight for part in parts.values()] or [1.0]
    rollouts = assemble([_group(prompt, given, rewards, list(parts), weights) for prompt in range(PROMPTS)])
    lengths = [len(tokens) for tokens in _responses(2)]

    def column(values: Tensor) -> Tensor:
        return torch.cat([torch.cat([torch.zeros(2, dtype=values.dtype), row[:length]])
                          for row, length in zip(values, lengths, strict=True)])  # fmt: skip

    batch = rollouts.batch.with_columns(
        old_logprobs=column(given.old), ref_logprobs=column(given.reference), sampling_logprobs=column(given.sampler)
    )
    batch = credit_stages(config)(StepData(replace(rollouts, batch=batch), 1)).batch
    outputs = TokenOutputs(
        row_ids=batch.row_ids, offsets=batch.offsets, logprobs=column(given.update), entropy=column(given.entropy)
    )
    loss = actor_loss(config).compute(outputs, batch, denominators(batch)).loss
    (gradient,) = torch.autograd.grad(loss, given.update)
    return float(loss.detach()), gradient


def _group(prompt: int, given: Logprobs, rewards: list[list[float]], parts: list[str], weights: list[float]) -> Group:
    task = Task(id=str(prompt), source="hand", payload={}, seed=0, tag="all", domain="all")
    trajectories = []
    for member in range(MEMBERS):
        row = prompt * MEMBERS + member
        tokens = _responses(2)[row]
        cut_off = tokens[-1] != 2
        turn = Turn(
            prompt_ids=(7, 8),
            response_ids=tuple(tokens),
            logprobs=tuple(given.sampler[row, : len(tokens)].tolist()),
            versions=(0,) * len(tokens),
            finish_reason="length" if cut_off else "stop",
        )
        scores = [column[row] for column in rewards]
        trajectories.append(
            Trajectory(
                task_id=task.id,
                member=member,
                turns=(turn,),
                reward=sum(weight * score for weight, score in zip(weights, scores, strict=True)),
                reward_parts=dict(zip(parts, scores, strict=False)),
                status="truncated" if cut_off else "ok",
            )
        )
    return Group(task=task, trajectories=tuple(trajectories))


@dataclass(frozen=True)
class Comparison:
    """What became of a file."""

    asked: tuple[str, ...]
    lines: list[str]
    loss: float = float("nan")
    gradient: float = float("nan")

    def names(self, *words: str) -> bool:
        """Whether a line of the report has all of these words."""
        return any(all(word in line for word in words) for line in self.lines)


def _compared(case: Case, given: Logprobs) -> Comparison:
    """Return how far loss and gradient are apart, as shares of the largest, or what the new file asks."""
    report, ours = migrated(case)
    if asked := tuple(place for place, value in leaves(ours) if value == "???"):
        return Comparison(asked, lines_of(report))
    loss, gradient, rewards = _theirs(case, given)
    our_loss, our_gradient = _ours(case, given, rewards)
    apart = float((gradient - our_gradient).abs().max() / gradient.abs().max())
    return Comparison((), lines_of(report), abs(loss - our_loss) / max(1.0, abs(loss)), apart)


NAMED = {
    "scaled over the batch": ("scale_rewards = batch", "1e-06"),
    "vLLM and KL": ("use_bias_correction_kl", "sampler"),
}
"""Variants that differ, by words of the report's line that says so."""
ASKED = {"vespo": "loss_type", "likely tokens left out": "top_entropy_quantile"}
"""Variants without a counterpart, by the key that the new file's question is about."""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_loss_of_grpo_is_theirs_or_the_report_says_what_differs(
    name: str, model: Path, tmp_path: Path, evidence_folder: Path
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(PROMPTS)]
    keys = VARIANTS[name]
    case = write_case(tmp_path / "run", "grpo", model, rows, **{**KEYS, **keys})
    found = _compared(case, Logprobs.drawn(sampler_differs="use_vllm" in keys))
    _note(evidence_folder, f"GRPO, {name}", found)
    assert bool(found.asked) is (name in ASKED), found.lines
    if found.asked:
        assert found.names(f"{found.asked[0]}: {ASKED[name]} = "), found.lines
    elif found.loss > 1e-6 or found.gradient > 1e-6:
        assert found.names(*NAMED[name]), (found.loss, found.gradient, found.lines)


PARTLY = {"num_iterations": 1}
RLOO: dict[str, dict[str, Any]] = {
    "the defaults": PARTLY,
    "without KL": {**PARTLY, "beta": 0.0},
    "rewards cut off": {**PARTLY, "reward_clip_range": [-0.5, 0.5]},
    "advantages whitened": {**PARTLY, "normalize_advantages": True},
    "two steps of a batch": {},
}


@pytest.mark.parametrize("name", RLOO)
def test_a_gradient_of_rloo_is_theirs_or_the_new_file_asks(
    name: str, model: Path, tmp_path: Path, evidence_folder: Path
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(PROMPTS)]
    case = write_case(tmp_path / "run", "rloo", model, rows, **{**KEYS, "normalize_advantages": False, **RLOO[name]})
    found = _compared(case, Logprobs.drawn(sampler_differs=False, moved="num_iterations" not in RLOO[name]))
    _note(evidence_folder, f"RLOO, {name}", found)
    asked = {"advantages whitened": "normalize_advantages", "two steps of a batch": "num_iterations"}
    assert bool(found.asked) is (name in asked), found.lines
    if found.asked:
        assert found.names(f"{found.asked[0]}: {asked[name]} = "), found.lines
    else:
        assert found.gradient <= 1e-6


def _note(folder: Path, name: str, found: Comparison) -> None:
    shown = f"asks for {', '.join(found.asked)}" if found.asked else f"{found.loss:.1e} | {found.gradient:.1e}"
    with (folder / "migrate-trl-losses.md").open("a") as file:
        file.write(f"| {name} | {shown} |\n")
