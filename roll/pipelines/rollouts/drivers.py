"""The driver of a run's inference engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from roll.configs.catalog.strategy_table import is_lockstep
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.worker_config import GeneratingArgs
from roll.data.templates import chat_templates_of
from roll.distributed.cluster import Cluster
from roll.pipelines.workers.infer_worker import ClusterEngines, InferWorker, engine_died, uses_lockstep_driver
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.lockstep_driver import LockstepDriver
from roll.strategies.base import FireSampling, SamplingParams
from roll.utils.response_ends import template_ends

_DECODE_STEPS = 16  # What one poll of a lockstep engine may do
_POLL_SECONDS = 1.0  # How long one poll of another engine waits if nothing finishes


def make_engine_driver(config: RLConfig, cluster: Cluster, resend: Callable[[int], None]) -> EngineDriver:
    """Return the driver for the cluster's engines; `resend` brings a new engine's weights up to date."""
    ranks = ClusterEngines(cluster)
    if uses_lockstep_driver(config):
        return LockstepDriver(ranks, round_steps=_DECODE_STEPS, timeout=config.rpc_timeout)
    lockstep = is_lockstep(config.actor_infer.strategy_args.strategy_name)

    async def restart(rank: int) -> None:
        await cluster.call_rank_async(rank, InferWorker.restart)
        await asyncio.get_running_loop().run_in_executor(None, resend, rank)

    return ContinuousDriver(
        ranks,
        max_running_requests=config.max_running_requests,
        poll_budget=_DECODE_STEPS if lockstep else _POLL_SECONDS,
        timeout=config.rpc_timeout,
        is_death=engine_died,
        restart=restart,
        max_restarts=config.engine_restarts,
        take_counters=lambda: cluster.call(InferWorker.take_counters),
    )


def template_stops(config: RLConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response under templates of the configuration; engines know the tokenizer's own."""
    own = [(text, variables) for text, variables in chat_templates_of(config.prompt_templates) if text]
    ends = [template_ends(tokenizer, text, variables).all for text, variables in own]
    return tuple(sorted(frozenset[int]().union(*ends)))


def sampling_params(args: GeneratingArgs, response_length: int, stops: Sequence[int] = ()) -> SamplingParams:
    """Return the engine's form of `generating_args`; `stops` are tokens that end a response unless `ignore_eos`."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens or response_length,
        temperature=args.temperature if args.do_sample else 0.0,
        top_p=args.top_p,
        top_k=args.top_k or -1,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=() if args.ignore_eos else tuple(stops),
        stop_strings=args.stop_strings,
        ignore_eos=args.ignore_eos,
        fire=FireSampling(temperature=args.fire_temperature, top_k=args.fire_top_k)
        if args.fire_temperature is not None and args.do_sample
        else None,
    )
