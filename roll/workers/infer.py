"""The worker around an inference engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roll.configs.rlvr import RLVRConfig
from roll.distributed.cluster import Cluster
from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.handles import Handle
from roll.distributed.weights import receive_weights
from roll.distributed.worker import Worker, WorkerInfo
from roll.strategies.base import Completion, Request
from roll.strategies.hf.model import DTYPES, context_length, eos_token_ids, load_causal_lm, load_tokenizer
from roll.strategies.hf_infer import HfInfer
from roll.workers.train import resolved_model_args


class InferWorker(Worker):
    """One engine."""

    def __init__(self, info: WorkerInfo, config: RLVRConfig) -> None:
        super().__init__(info)
        args = resolved_model_args(config, "actor_infer")
        tokenizer = load_tokenizer(args)
        model: torch.nn.Module = load_causal_lm(args, DTYPES[args.dtype])
        if torch.cuda.is_available():
            model = model.cuda()
        self.engine = HfInfer(
            model,
            eos_token_ids=eos_token_ids(model, tokenizer),
            pad_token_id=0,  # masked; the tokenizer's may be missing, or beyond the model's vocabulary
            max_running_requests=config.max_running_requests,
            max_context=context_length(model),
            decode=tokenizer.decode,
        )

    @dispatch(Dispatch.ONE_TO_ALL)
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self.engine.submit(requests)

    @dispatch(Dispatch.ONE_TO_ALL)
    def poll(self, budget: float) -> list[Completion]:
        """Work for a while; what has finished."""
        return self.engine.poll(budget)

    @dispatch(Dispatch.ONE_TO_ALL)
    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Stop requests."""
        return self.engine.abort(request_ids)

    @dispatch(Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int, handles: list[Handle]) -> None:
        """Load new weights."""
        self.engine.update_weights(version, receive_weights(handles, version))


class ClusterEngines:
    """The inference cluster as the scheduler sees it (`EngineRanks`)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def world_size(self) -> int:
        """Number of engines."""
        return self._cluster.world_size

    async def submit(self, rank: int, requests: Sequence[Request]) -> None:
        """Queue requests on one engine."""
        await self._cluster.call_rank_async(rank, InferWorker.submit, requests)

    async def poll(self, rank: int, budget: float) -> list[Completion]:
        """Let one engine work."""
        return await self._cluster.call_rank_async(rank, InferWorker.poll, budget)

    async def abort(self, rank: int, request_ids: Sequence[str]) -> list[Completion]:
        """Stop requests on one engine."""
        return await self._cluster.call_rank_async(rank, InferWorker.abort, request_ids)
