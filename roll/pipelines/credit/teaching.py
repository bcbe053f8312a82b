"""What a teacher, or the reference of a full KL, adds to a batch.

Log-probs of the tokens that are there, or of the likeliest ones of every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from roll.algorithms.kl import kl_divergence
from roll.configs.checks.teacher_checks import difference, teacher_roles
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.run_config import RunConfig
from roll.data.templates import EmbeddingRows
from roll.pipelines.workers.train_worker import resolved_model_args
from roll.strategies.base import Output, TopK
from roll.strategies.training.pretrained import load_tokenizer
from roll.types.batch import TokenBatch, TokenOutputs

_TOKENS_AT_ONCE = 256
"""Whose distributions are compared at once: what that takes on the way is small beside the distributions."""


class Forward(Protocol):
    """The other model's forward pass."""

    def __call__(self, batch: TokenBatch, *outputs: Output) -> TokenOutputs: ...


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


def smallest_embedding(config: RunConfig) -> EmbeddingRows | None:
    """Return the smallest embedding that the rows' tokens meet; None where no model's config.json is at hand."""
    readers = ["actor_train", "actor_infer", "reference", "critic", *teacher_roles(config)]
    sizes = []
    for role in (role for role in readers if role in config.roles):
        model = config.model_path(role)
        shape = read_shape(model, config.roles[role].model_args.model_config_kwargs)
        if shape is not None and shape.vocab:
            sizes.append(EmbeddingRows(shape.vocab, str(model)))
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
