"""Log-probs of a few sampled tokens, the engines' and the trainer's: `verify_weight_sync: logprob` compares them at
every update, engine_check.py at the first ones of every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from roll.configs.schema.rl_config import RLConfig
from roll.distributed.cluster import Cluster
from roll.distributed.weights import WeightSyncError
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.run.role_offload import ENGINE
from roll.pipelines.workers.infer_worker import InferWorker
from roll.pipelines.workers.train_worker import ForwardWorker
from roll.strategies.base import Completion, Request, SamplingParams
from roll.types.batch import TokenBatch, TokenOutputs
from roll.utils.seeding import stable_hash

TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}  # Nats per token, by the coarsest dtype of trainer and engine
_TEXT = "The first letters of the alphabet are a, b, c,"
_PROMPT_TOKENS = 8
_NEW_TOKENS = 4


class ProbeSample(NamedTuple):
    """Tokens that an engine has sampled after one prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: Sequence[int]
    mine: torch.Tensor
    """float32 [tokens], the engine's log-probs."""
    theirs: torch.Tensor
    """float32 [tokens], the trainer's."""


def probe_requests(
    config: RLConfig, tokenizer: Any, purpose: str, version: int, prompts: Sequence[tuple[str, int]], new_tokens: int
) -> list[Request]:
    """Return requests for `new_tokens` tokens behind the first tokens of each text, as many as it says.

    They are drawn at the temperature of the rollouts, which the trainer's log-probs are about.
    """
    temperature = config.actor_infer.generating_args.temperature
    return [
        Request(
            id=f"{purpose}-{version}-{number}",
            prompt_ids=tuple(tokenizer.encode(text))[:length] or (0,),
            params=SamplingParams(max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True),
            seed=stable_hash(config.seed, purpose, version, number),
        )
        for number, (text, length) in enumerate(prompts)
    ]


def compare_logprobs(config: RLConfig, clusters: Clusters, tokenizer: Any, version: int) -> None:
    """Raise `WeightSyncError` if an engine and the trainer disagree on a token, or an engine has another version."""
    length = min(_PROMPT_TOKENS, config.max_sequence_length - _NEW_TOKENS)
    requests = probe_requests(config, tokenizer, "probe", version, [(_TEXT, length)], _NEW_TOKENS)
    dtypes = (config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype)
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    for rank, (sample,) in enumerate(sampled_and_scored(clusters, requests, version)):
        difference = (sample.mine - sample.theirs).abs()
        if not bool((difference <= tolerance).all()):  # not a number is a difference, too
            raise WeightSyncError(
                f"{clusters.actor_infer.role} rank {rank} and the trainer disagree under weights of version {version}: "
                f"for tokens {list(sample.token_ids)} after {list(sample.prompt_ids)} the engine gives log-probs "
                f"{_rounded(sample.mine)}, the trainer {_rounded(sample.theirs)}; allowed is a difference of "
                f"{tolerance:g} with dtypes {dtypes[0]} and {dtypes[1]}"
            )


def sampled_and_scored(
    clusters: Clusters, requests: Sequence[Request], version: int, patience: float | None = None
) -> list[list[ProbeSample]]:
    """Let every engine sample these, all at once, and the trainer score them; by engine.

    Raises `WeightSyncError` for an engine that has another version.
    """
    engines, trainer = clusters.actor_infer, clusters.actor_train
    clusters.offloader.onload(ENGINE)
    by_engine: list[list[Completion]] = engines.call(InferWorker.probe, requests, patience)
    for rank, completions in enumerate(by_engine):
        versions = {number for completion in completions for number in completion.versions}
        if versions != {version}:
            raise WeightSyncError(
                f"{engines.role} rank {rank} samples with weights of version {sorted(versions)} after the sync of "
                f"version {version}"
            )
    clusters.offloader.onload(trainer.role)
    prompts = [request.prompt_ids for request in requests]
    scored = iter(_trainer_logprobs(trainer, [(p, c) for cs in by_engine for p, c in zip(prompts, cs, strict=True)]))
    return [
        [
            ProbeSample(prompt, tuple(completion.token_ids), torch.tensor(completion.logprobs).float(), next(scored))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        for completions in by_engine
    ]


def _trainer_logprobs(trainer: Cluster, sampled: Sequence[tuple[tuple[int, ...], Completion]]) -> list[torch.Tensor]:
    count, num_ranks = len(sampled), trainer.call(ForwardWorker.layout)[0].dp_size
    sampled = [*sampled, *(sampled[i % count] for i in range(-count % num_ranks))]  # each rank has as many to do
    rows = [[*prompt, *completion.token_ids] for prompt, completion in sampled]
    starts = [len(prompt) for prompt, _ in sampled]
    batch = TokenBatch(
        row_ids=tuple(f"probe-{number}" for number in range(len(rows))),
        group_ids=("probe",) * len(rows),
        offsets=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
        token_ids=torch.tensor([token for row in rows for token in row]),
        action_mask=torch.tensor(
            [i >= start for row, start in zip(rows, starts, strict=True) for i in range(len(row))]
        ),
    )
    outputs: TokenOutputs = trainer.call(ForwardWorker.forward, batch, ("logprobs",), True)
    return [outputs.row("logprobs", i)[start:].float().cpu() for i, start in enumerate(starts[:count])]


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
