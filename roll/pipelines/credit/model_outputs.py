"""What models say about the sampled tokens: stages for the reference, teachers, the trainer itself and the critic.

What a later stage needs decides which passes are made, and what they return.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from roll.algorithms.kl import kl_divergence
from roll.configs.checks.teacher_checks import difference, teacher_roles
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.data.templates import EmbeddingRows
from roll.distributed.cluster import Cluster
from roll.pipelines.credit.stages import Stage, StepData
from roll.pipelines.rollouts.off_policy import OldLogprobs
from roll.pipelines.rollouts.rollout_rows import recorded_outputs
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.workers.train_worker import resolved_model_args
from roll.strategies.base import Output, TopK
from roll.strategies.training.pretrained import load_tokenizer
from roll.tracking.timing import Timers
from roll.types.batch import TokenBatch, TokenOutputs

_TOKENS_AT_ONCE = 256
"""Whose distributions are compared at once: what that takes on the way is small beside the distributions."""


class Forward(Protocol):
    """The other model's forward pass."""

    def __call__(self, batch: TokenBatch, *outputs: Output) -> TokenOutputs: ...


class Models(Protocol):
    """The pipeline, as these stages see it."""

    config: RLConfig
    clusters: Clusters
    timers: Timers
    tokenizer: Any
    old_logprobs: OldLogprobs

    def forward(self, cluster: Cluster, batch: TokenBatch, *outputs: Output, adapters: bool = True) -> TokenOutputs:
        """Run one forward pass over all rows."""
        ...


def model_stages(models: Models, needed: Collection[str]) -> Iterator[Stage]:
    """Yield the stages that make what is `needed`, names of `MODEL_OUTPUTS`."""
    config, clusters = models.config, models.clusters
    if clusters.reference is not None or config.reference_is_actor:
        yield Reference(models)
    if clusters.teachers:
        yield Teachers(models)
    yield Trainer(models, needed)
    if clusters.critic is not None:
        yield Critic(models)


class Reference(Stage):
    """Log-probs of the frozen policy, with a `full` KL also its distributions."""

    gives = ("ref_logprobs",)

    def __init__(self, models: Models) -> None:
        self._models, config = models, models.config
        cluster = models.clusters.reference or models.clusters.actor_train
        self._forward = functools.partial(models.forward, cluster, adapters=not config.reference_is_actor)

    def __call__(self, data: StepData) -> None:
        config = self._models.config
        with self._models.timers.span("reference", waits=True):
            if config.full_kl:
                vocabulary = vocabulary_of(config, self._models.tokenizer)
                data.batch = with_reference(data.batch, self._forward, top_k=config.kl_top_k, vocabulary=vocabulary)
            else:
                data.batch = data.batch.join(self._forward(data.batch, "logprobs"), ref_logprobs="logprobs")


class Teachers(Stage):
    """What each row's teacher says of its sampled tokens, or of the distributions that they come from."""

    gives = ("teacher_logprobs",)

    def __init__(self, models: Models) -> None:
        self._models = models

    def __call__(self, data: StepData) -> None:
        models, config, batch = self._models, self._models.config, data.batch
        vocabulary = None if config.teacher_advantages else vocabulary_of(config, models.tokenizer)
        roles = [config.teacher_of(data.rollouts.tasks[i].tag) for i in data.rollouts.row_trajectory.tolist()]
        parts = []
        with models.timers.span("teacher", waits=True):
            for role, cluster in models.clusters.teachers.items():
                if rows := [row for row, own in enumerate(roles) if own == role]:
                    forward = functools.partial(models.forward, cluster)
                    top_k = config.distill.top_k
                    parts.append(with_teacher(batch.select(rows), forward, top_k=top_k, vocabulary=vocabulary))
        data.batch = TokenBatch.concat(parts).reorder(batch.row_ids)


class Trainer(Stage):
    """What the policy says before its update, in one forward pass; none where nobody reads it."""

    gives = ("old_logprobs", "entropies", "logit_gradients", "reference_kl")

    def __init__(self, models: Models, needed: Collection[str]) -> None:
        config = models.config
        self._models, self._needed = models, frozenset(needed)
        self._source = models.old_logprobs.source
        self._compares = config.full_kl_penalty
        wanted: list[Output] = ["student_logprobs"] if self._compares else []
        wanted += ["logit_gradients"] if "logit_gradients" in needed else []
        wanted += ["entropy"] if "entropies" in needed or "entropies" in config.rollout_dump_outputs else []
        passes = self._source == "forward" or bool(config.rollout_dump_outputs) or bool(wanted)
        self._outputs: tuple[Output, ...] = ("logprobs", *wanted) if passes else ()

    def __call__(self, data: StepData) -> None:
        models, config = self._models, self._models.config
        if self._outputs:
            with models.timers.span("old_logprobs", waits=True):
                outputs = models.forward(models.clusters.actor_train, data.batch, *self._outputs)
            recorded = recorded_outputs(data.batch, outputs, config.rollout_dump_outputs)
            data.rollouts = replace(data.rollouts, recorded=recorded)
            if self._compares:
                data.batch = with_reference_kl(data.batch, outputs)
                if not config.full_kl_loss:
                    data.add_columns(teacher_ids=None, teacher_logprobs=None)
            if "logit_gradients" in self._needed:
                data.batch = data.batch.join(outputs, logit_gradients="logit_gradients")
            if "entropies" in self._needed:
                data.update(entropies=data.view.pad(outputs.reorder(data.batch.row_ids).require("entropy")))
            if self._source == "forward":
                data.batch = data.batch.join(outputs, old_logprobs="logprobs")
        if self._source == "sampler":
            data.add_columns(old_logprobs=data.batch.sampling_logprobs)


class Critic(Stage):
    """Values before the update."""

    gives = ("values",)

    def __init__(self, models: Models) -> None:
        self._models = models

    def __call__(self, data: StepData) -> None:
        models, cluster = self._models, self._models.clusters.critic
        assert cluster is not None, "only made where there is one"
        with models.timers.span("values", waits=True):
            outputs = models.forward(cluster, data.batch, "values")
        data.batch = data.batch.join(outputs, values="values")


def require_same_tokens(config: RunConfig, tokenizer: Any) -> None:
    """Raise `ValueError` unless the teacher, where there is one, numbers tokens as the student's tokenizer does."""
    for role in teacher_roles(config):
        theirs = load_tokenizer(resolved_model_args(config, role)).get_vocab()
        if (ours := tokenizer.get_vocab()) != theirs:
            raise ValueError(
                f"{role}: {config.model_path(role)} has another tokenizer than the student: "
                f"{difference(ours, theirs)}; take a teacher of the same family, or its texts as rows for sft"
            )


def vocabulary_of(config: RunConfig, tokenizer: Any) -> int:
    """Return how many tokens the policy and its teachers, or its reference, have: a tokenizer may have more."""
    others = teacher_roles(config) or [role for role in config.roles if role == "reference"]
    models = [(role, config.roles[role].model_args.model_config_kwargs) for role in others]
    models.append(("actor_train", config.roles["actor_train"].model_args.model_config_kwargs))
    shapes = [read_shape(config.model_path(role), more) for role, more in models]
    return min([len(tokenizer), *(shape.vocab for shape in shapes if shape is not None and shape.vocab)])


def smallest_embedding(config: RunConfig, *, pictures: bool = False) -> EmbeddingRows | None:
    """Return the smallest embedding that the rows' tokens meet; None where no model's config.json is at hand.

    `pictures`: rows may show some.
    """
    readers = ["actor_train", "actor_infer", "reference", "critic", *teacher_roles(config)]
    sizes = []
    for role in (role for role in readers if role in config.roles):
        model = config.model_path(role)
        shape = read_shape(model, config.roles[role].model_args.model_config_kwargs)
        if shape is not None and shape.vocab:
            sizes.append(EmbeddingRows(shape.vocab, str(model), () if pictures else shape.places))
    return min(sizes, key=lambda each: each.rows, default=None)


def with_teacher(batch: TokenBatch, forward: Forward, *, top_k: int | None, vocabulary: int | None) -> TokenBatch:
    """Return the batch with `teacher_ids` and `teacher_logprobs`, both [N, K].

    Args:
        batch: the student's sequences.
        forward: of the teacher.
        top_k: K is this many, the teacher's likeliest tokens. None: all of them, see `vocabulary`.
        vocabulary: tokens that there are, K. None: K is 1, the token that is there.
    """
    if vocabulary is None:
        logprobs = forward(batch, "logprobs").require("logprobs")
        return batch.with_columns(teacher_ids=batch.token_ids[:, None], teacher_logprobs=logprobs[:, None])
    batch, _ = _with_distributions(batch, forward, (), top_k=top_k, vocabulary=vocabulary)
    return batch


def with_reference(batch: TokenBatch, forward: Forward, *, top_k: int | None, vocabulary: int) -> TokenBatch:
    """Return the batch with the reference's `ref_logprobs`, and its distributions as those of a teacher."""
    batch, outputs = _with_distributions(batch, forward, ("logprobs",), top_k=top_k, vocabulary=vocabulary)
    return batch.join(outputs, ref_logprobs="logprobs")


def with_reference_kl(batch: TokenBatch, outputs: TokenOutputs) -> TokenBatch:
    """Return the batch with `reference_kl`, from the policy's `student_logprobs` in `outputs`."""
    policy, reference = outputs.reorder(batch.row_ids).require("student_logprobs"), batch.require("teacher_logprobs")
    kl = torch.zeros(batch.num_tokens)
    for part in batch.action_mask.nonzero()[:, 0].split(_TOKENS_AT_ONCE):
        mask = torch.ones(1, len(part), dtype=torch.bool)
        kl[part] = kl_divergence(policy[part][None], reference[part][None], mask, kind="full")[0]
    return batch.with_columns(reference_kl=kl)


def _with_distributions(
    batch: TokenBatch, forward: Forward, more: Sequence[Output], *, top_k: int | None, vocabulary: int
) -> tuple[TokenBatch, TokenOutputs]:
    """Return the batch with another model's distributions, and outputs with `more`."""
    if top_k is not None and top_k < vocabulary:
        outputs = forward(batch, TopK(top_k), *more)
        columns = {"teacher_ids": outputs.require("top_ids"), "teacher_logprobs": outputs.require("top_logprobs")}
        return batch.with_columns(**columns), outputs
    # A model may have more rows than the tokenizer has tokens, and the student fewer of them than the teacher.
    everything = batch.with_columns(teacher_ids=torch.arange(vocabulary).expand(batch.num_tokens, -1))
    outputs = forward(everything, "student_logprobs", *more)
    return everything.with_columns(teacher_logprobs=outputs.require("student_logprobs")), outputs
