"""`verify_weight_sync: logprob`: the engines say a few tokens, and the trainer's model has to give them the same
log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.distributed.weights import WeightSyncError
from roll.pipelines.clusters import Clusters
from roll.pipelines.offload import ENGINE
from roll.strategies.base import Completion, Request, SamplingParams
from roll.types.batch import TokenBatch, TokenOutputs
from roll.utils.seeding import stable_hash
from roll.workers.infer import InferWorker
from roll.workers.train import ForwardWorker

TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}  # Nats per token, by the coarsest dtype of trainer and engine
_TEXT = "The first letters of the alphabet are a, b, c,"
_PROMPT_TOKENS = 8
_NEW_TOKENS = 4


def compare_logprobs(config: RLConfig, clusters: Clusters, tokenizer: Any, version: int) -> None:
    """Raise `WeightSyncError` if an engine and the trainer disagree on a token, or an engine has another version.

    Tokens are drawn at the temperature of the rollouts, which the trainer's log-probs are about.
    """
    prompt = tuple(tokenizer.encode(_TEXT))[: min(_PROMPT_TOKENS, config.max_sequence_length - _NEW_TOKENS)] or (0,)
    temperature = config.actor_infer.generating_args.temperature
    request = Request(
        id=f"probe-{version}",
        prompt_ids=prompt,
        params=SamplingParams(max_new_tokens=_NEW_TOKENS, temperature=temperature, ignore_eos=True),
        seed=stable_hash(config.seed, "probe", version),
    )
    engines, trainer = clusters.actor_infer, clusters.actor_train
    clusters.offloader.onload(ENGINE)
    completions: list[Completion] = engines.call(InferWorker.probe, request)
    clusters.offloader.onload(trainer.role)
    expected = _trainer_logprobs(trainer, prompt, completions)
    dtypes = (config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype)
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    for rank, (completion, theirs) in enumerate(zip(completions, expected, strict=True)):
        if set(completion.versions) != {version}:
            raise WeightSyncError(
                f"{engines.role} rank {rank} samples with weights of version {sorted(set(completion.versions))} after "
                f"the sync of version {version}"
            )
        mine = torch.tensor(completion.logprobs)
        difference = (mine - theirs).abs()
        if not bool((difference <= tolerance).all()):  # not a number is a difference, too
            raise WeightSyncError(
                f"{engines.role} rank {rank} and the trainer disagree under weights of version {version}: for tokens "
                f"{list(completion.token_ids)} after {list(prompt)} the engine gives log-probs "
                f"{_rounded(mine)}, the trainer {_rounded(theirs)}; allowed is a difference of {tolerance:g} with "
                f"dtypes {dtypes[0]} and {dtypes[1]}"
            )


def _trainer_logprobs(trainer: Cluster, prompt: Sequence[int], completions: Sequence[Completion]) -> list[torch.Tensor]:
    rows = [[*prompt, *completion.token_ids] for completion in completions]
    given = len(prompt)
    batch = TokenBatch(
        row_ids=tuple(f"probe-{rank}" for rank in range(len(rows))),
        group_ids=("probe",) * len(rows),
        offsets=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
        token_ids=torch.tensor([token for row in rows for token in row]),
        action_mask=torch.tensor([i >= given for row in rows for i in range(len(row))]),
    )
    outputs: TokenOutputs = trainer.call(ForwardWorker.forward, batch, ("logprobs",), True)
    return [outputs.row("logprobs", i)[given:].float().cpu() for i in range(len(rows))]


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
