"""What a teacher adds to a batch: log-probs of the student's tokens, or of the likeliest tokens of every position."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from roll.configs.checks.teacher import difference, teacher_roles
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.run_config import RunConfig
from roll.strategies.base import Output, TopK
from roll.strategies.hf.hf_model import load_tokenizer
from roll.types.batch import TokenBatch, TokenOutputs
from roll.workers.train import resolved_model_args


class Forward(Protocol):
    """The teacher's forward pass."""

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
    """Return how many tokens student and teachers both have: a tokenizer may have more than a model has rows."""
    models = [(role, config.roles[role].model_args.model_config_kwargs) for role in teacher_roles(config)]
    models.append(("actor_train", config.roles["actor_train"].model_args.model_config_kwargs))
    shapes = [read_shape(config.model_path(role), more) for role, more in models]
    return min([len(tokenizer), *(shape.vocab for shape in shapes if shape is not None and shape.vocab)])


def with_teacher(batch: TokenBatch, forward: Forward, *, top_k: int | None, vocabulary: int | None) -> TokenBatch:
    """Return the batch with `teacher_ids` and `teacher_logprobs`, both [N, K].

    Args:
        batch: the student's sequences.
        forward: of the teacher.
        top_k: K is this many, the teacher's likeliest tokens. None: all of them, see `vocabulary`.
        vocabulary: tokens that there are, K. None: K is 1, the token that is there.
    """
    if vocabulary is None:
        found = forward(batch, "logprobs").require("logprobs")
        return batch.with_columns(teacher_ids=batch.token_ids[:, None], teacher_logprobs=found[:, None])
    if top_k is not None and top_k < vocabulary:
        outputs = forward(batch, TopK(top_k))
        return batch.with_columns(
            teacher_ids=outputs.require("top_ids"), teacher_logprobs=outputs.require("top_logprobs")
        )
    # A model may have more rows than the tokenizer has tokens, and the student fewer of them than the teacher.
    everything = batch.with_columns(teacher_ids=torch.arange(vocabulary).expand(batch.num_tokens, -1))
    found = forward(everything, "student_logprobs").require("student_logprobs")
    return everything.with_columns(teacher_logprobs=found)
