"""The configuration's losses as pure functions of model outputs: what a strategy is given to train with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from roll.algorithms.aggregation import aggregate
from roll.algorithms.corrections import log_ratio_of, mismatch_metrics, perplexity_metrics
from roll.algorithms.kl import clamped_tokens, kl_loss
from roll.algorithms.losses import PolicyLossFn, PolicyLossInputs, entropy_loss, sft_loss, value_loss
from roll.algorithms.masking import masked_sum
from roll.configs.catalog.entries import chosen
from roll.configs.catalog.loss_table import DIVERGENCES, LOSSES
from roll.configs.catalog.pipeline_table import pipeline_of
from roll.configs.schema.distill_args import Distillation, RowDistillation
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.sft_config import SFTConfig
from roll.strategies.base import LossFn, LossTerms, OutputName
from roll.types.batch import Denominators, TokenBatch, TokenOutputs
from roll.types.metrics import Metrics, Scalar
from roll.utils.importing import load_object


def objective(config: RunConfig, kind: Literal["policy", "value", "reward"]) -> LossFn:
    """Return what a role is trained on."""
    made: LossFn = load_object(pipeline_of(config.pipeline).objective, key="pipeline")(config, kind)
    return made


def rl_objective(config: RLConfig, kind: Literal["policy", "value", "reward"]) -> LossFn:
    """Return the actor's or the critic's loss."""
    return actor_loss(config) if kind == "policy" else critic_loss(config)


def divergence_of(config: Distillation | RowDistillation) -> Callable[[TokenOutputs, TokenBatch, Tensor], Tensor]:
    """Return (outputs, batch, mask [B, T]) -> [B, T], the student's divergence from the teacher at each token.

    Reads `student_logprobs`, and `teacher_ids` and `teacher_logprobs` of the batch.
    """
    key = "distill.divergence"
    diverge = chosen(DIVERGENCES, config.divergence, config.divergence_args, key=key, skip=3)
    entry = DIVERGENCES.get(config.divergence)
    defaults = {} if entry is None else {name: option.default for name, option in entry.options.items()}

    def compute(outputs: TokenOutputs, batch: TokenBatch, mask: Tensor) -> Tensor:
        student = outputs.pad("student_logprobs")
        teacher = batch.pad("teacher_logprobs").to(student)
        divergences: Tensor = diverge(student, teacher, mask, **{**defaults, **config.divergence_args})
        return divergences

    return compute


def sft_objective(config: SFTConfig, kind: Literal["policy", "value", "reward"]) -> LossFn:  # noqa: ARG001
    """Return the mean negative log-likelihood over the taught tokens, or with a teacher the divergence from it.

    Reads `loss_mask`, `loss_weight`.
    """
    if config.teacher is not None:
        return _taught(config.distill)

    def compute(outputs: TokenOutputs, batch: TokenBatch, sizes: Denominators) -> LossTerms:
        mask = batch.pad("loss_mask", False)
        nll, metrics = sft_loss(outputs.pad("logprobs"), mask), Metrics()
        tokens = mask.sum()
        metrics.add_mean("sft/loss", nll.detach().double().sum(), tokens)
        metrics.add_sum("sft/tokens", tokens)
        loss = aggregate(nll, mask, sizes, mode="token-mean", row_weights=batch.loss_weight)
        return LossTerms(loss=loss, metrics=metrics)

    return LossFn(compute=compute, needs=("logprobs",))


def _taught(config: RowDistillation) -> LossFn:
    divergence = divergence_of(config)

    def compute(outputs: TokenOutputs, batch: TokenBatch, sizes: Denominators) -> LossTerms:
        mask, metrics = batch.pad("loss_mask", False), Metrics()
        nll, diverged = sft_loss(outputs.pad("logprobs"), mask), divergence(outputs, batch, mask)
        tokens = mask.sum()
        metrics.add_mean("sft/loss", nll.detach().double().sum(), tokens)
        metrics.add_mean("distill/divergence", diverged.detach().double().sum(), tokens)
        metrics.add_sum("sft/tokens", tokens)
        losses = config.coef * diverged + config.sft_coef * nll
        loss = aggregate(losses, mask, sizes, mode="token-mean", row_weights=batch.loss_weight)
        return LossTerms(loss=loss, metrics=metrics)

    return LossFn(compute=compute, needs=("logprobs", "student_logprobs"))


def actor_loss(config: RLConfig) -> LossFn:
    """Return the policy loss, KL and entropy terms and imitation of good responses, as the configuration weighs them.

    Reads `loss_mask`, `advantages`, and where present `old_logprobs` (else the log-probs of this very forward pass: the
    batch gets a single optimizer step), `sampling_logprobs`, `ref_logprobs`, `importance_weights`, `loss_weight`.
    """
    loss_fn: PolicyLossFn = chosen(LOSSES, config.policy_loss, config.policy_loss_args, key="policy_loss")
    uses_kl = config.use_kl_loss and config.kl_loss_coef > 0
    divergence = divergence_of(config.distill) if config.teacher_loss else None

    def compute(outputs: TokenOutputs, batch: TokenBatch, sizes: Denominators) -> LossTerms:
        logprobs, mask = outputs.pad("logprobs"), batch.pad("loss_mask", False)
        old = logprobs.detach() if batch.old_logprobs is None else batch.pad("old_logprobs")
        advantages = batch.pad("advantages")
        inputs = PolicyLossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            mask=mask,
            rollout_logprobs=None if batch.sampling_logprobs is None else batch.pad("sampling_logprobs"),
            selected=None if batch.selected is None else batch.pad("selected", False),
        )
        result = loss_fn(inputs, **config.loss_options)
        metrics = result.metrics
        combine = _Combiner(config, batch, mask, sizes, metrics)
        pg = result.loss if batch.importance_weights is None else result.loss * batch.pad("importance_weights")
        combine.add("actor/pg_loss", pg, config.rl_loss_coef)
        if config.full_kl_loss:
            reference = batch.pad("teacher_logprobs").to(logprobs)
            kl = kl_loss(outputs.pad("student_logprobs"), reference, mask, kind="full")
            combine.add("actor/kl_loss", kl, config.kl_loss_coef)
            metrics.add_max("actor/kl_token_max", kl.detach().amax())
        elif uses_kl:
            reference = batch.pad("ref_logprobs")
            sampler = old if batch.sampling_logprobs is None else batch.pad("sampling_logprobs")
            ratio: dict[str, Any] = (
                {"sampled_logprobs": sampler, "cap": _importance_cap(config)} if config.kl_loss_ratio else {}
            )
            kl = kl_loss(logprobs, reference, mask, kind=config.kl_loss_type, **ratio)
            combine.add("actor/kl_loss", kl, config.kl_loss_coef)
            clamped = clamped_tokens(logprobs, reference, mask)
            metrics.add_mean("actor/kl_clamped_share", clamped, mask.sum())
            metrics.add_max("actor/kl_token_max", kl.detach().amax())
        if config.entropy_loss_coef > 0:
            combine.add("actor/entropy_loss", entropy_loss(outputs.pad("entropy"), mask), config.entropy_loss_coef)
        if config.sft_loss_coef > 0:
            combine.add("actor/sft_loss", sft_loss(logprobs, mask & (advantages > 0)), config.sft_loss_coef)
        if divergence is not None:
            combine.add("distill/divergence", divergence(outputs, batch, mask), config.distill.coef)
        tokens = mask.sum()
        # An unbiased estimate that costs nothing: the entropy is the mean of -log p over tokens drawn from p.
        metrics.add_mean("actor/entropy", -masked_sum(logprobs.detach(), mask), tokens)
        metrics.add_sum("actor/loss_tokens", tokens)
        return combine.terms("actor/loss")

    needs_entropy = config.entropy_loss_coef > 0
    only_policy = not uses_kl and not needs_entropy and divergence is None and config.loss.scales_with_advantage
    needs: list[OutputName] = ["logprobs"]
    needs += ["entropy"] if needs_entropy else []
    needs += ["student_logprobs"] if divergence is not None or config.full_kl_loss else []
    return LossFn(compute=compute, needs=tuple(needs), has_gradient=_has_advantage if only_policy else None)


def _importance_cap(config: RLConfig) -> float:
    """Return the largest importance weight of a token, whichever key bounds it."""
    correction = config.train_infer_correction
    own = config.loss_options.get("behave_cap", config.decoupled_ppo_cap)
    caps = (None if correction is None else correction.importance_upper, own)
    return next((cap for cap in caps if cap is not None), math.inf)


def _has_advantage(batch: TokenBatch) -> Tensor:
    counts = batch.require("loss_mask") & (batch.require("advantages") != 0)
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    result = torch.zeros(len(batch), dtype=torch.bool).index_put((rows[counts],), torch.tensor(True))
    return result if batch.loss_weight is None else result & (batch.loss_weight != 0)


def with_mismatch_metrics(loss_fn: LossFn, version: int, *, mixed_versions: bool) -> LossFn:
    """Return the same loss, which also measures how far the sampler is from the weights of this very pass.

    `version` is that of these weights; with `mixed_versions` there may be tokens that others sampled, told by
    `versions`.
    """

    def compute(outputs: TokenOutputs, batch: TokenBatch, sizes: Denominators) -> LossTerms:
        terms = loss_fn.compute(outputs, batch, sizes)
        acting = batch.pad("action_mask", False)
        trained, sampled = outputs.pad("logprobs").detach(), batch.pad("sampling_logprobs")
        fresh = batch.pad("versions", -1) == version if mixed_versions else None
        terms.metrics.merge(mismatch_metrics(log_ratio_of(trained, sampled, acting), acting, fresh))
        terms.metrics.merge(perplexity_metrics(trained, sampled, acting, fresh))
        return terms

    return replace(loss_fn, compute=compute)


def critic_loss(config: RLConfig) -> LossFn:
    """Return the clipped value loss. Reads `values` (before the update), `returns`, `loss_mask`, `loss_weight`."""

    def compute(outputs: TokenOutputs, batch: TokenBatch, sizes: Denominators) -> LossTerms:
        mask = batch.pad("loss_mask", False)
        loss, metrics = value_loss(
            outputs.pad("values"), batch.pad("values"), batch.pad("returns"), mask, clip=config.value_clip
        )
        metrics.add_sum("critic/loss_tokens", mask.sum())
        combine = _Combiner(config, batch, mask, sizes, metrics)
        combine.add("critic/loss", loss, 1.0)
        return combine.terms(None)

    return LossFn(compute=compute, needs=("values",))


class _Combiner:
    """Adds up terms of a loss, each aggregated in the configured mode and logged under its name."""

    def __init__(
        self, config: RLConfig, batch: TokenBatch, mask: Tensor, sizes: Denominators, metrics: Metrics
    ) -> None:
        self._config, self._batch, self._mask, self._sizes, self._metrics = config, batch, mask, sizes, metrics
        self._total: Tensor | None = None
        # Each micro-batch has a share of the mini-batch's loss; weights that add up to 1 make their mean the whole.
        computed = sizes.tokens if sizes.computed_tokens is None else sizes.computed_tokens
        counted = mask if batch.loss_weight is None else mask & (batch.loss_weight != 0)[:, None]
        self._share: Scalar = counted.sum().double() / computed if computed > 0 else 0.0

    def add(self, name: str, loss: Tensor, coef: float) -> None:
        value = aggregate(
            loss,
            self._mask,
            self._sizes,
            mode=self._config.loss_agg_mode,
            norm_length=self._config.response_length,
            row_weights=self._batch.loss_weight,
        )
        self._metrics.add_mean(name, value.detach(), self._share)
        self._total = coef * value if self._total is None else self._total + coef * value

    def terms(self, name: str | None) -> LossTerms:
        assert self._total is not None, "a loss needs at least one term"
        if name is not None:
            self._metrics.add_mean(name, self._total.detach(), self._share)
        return LossTerms(loss=self._total, metrics=self._metrics)
