"""Responses of which the first token is drawn otherwise than the others (FIRE, arXiv:2410.21236)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roll.rollout.engine_driver import EngineDriver
from roll.strategies.base import Completion, Request
from roll.tracking import spans
from roll.utils.seeding import stable_hash


async def sampled(engines: EngineDriver, episode: str, request: Request, *, first: bool) -> tuple[Completion, int]:
    """Return a response, and how many of its tokens were drawn by the rule of the first token: of an episode's first
    response at most one, of others none. Says of the open span what came, without its text."""
    completion, count = await _sampled(engines, episode, request, first=first)
    versions = set(completion.array("versions").tolist()) or {-1}
    spans.annotate(
        request=completion.id,
        tokens=completion.num_tokens,
        finish_reason=completion.finish_reason,
        weight_version_first=min(versions),
        weight_version_last=max(versions),
    )
    return completion, count


async def _sampled(engines: EngineDriver, episode: str, request: Request, *, first: bool) -> tuple[Completion, int]:
    rule = request.params.fire
    if rule is None:
        return await engines.generate(episode, request), 0
    params = replace(request.params, fire=None)
    if not first:
        return await engines.generate(episode, replace(request, params=params)), 0
    hot = replace(params, max_new_tokens=1, temperature=rule.temperature, top_k=rule.top_k, top_p=1.0)
    seed = stable_hash(request.seed, "fire", bits=128)
    first_token = await engines.generate(episode, replace(request, id=f"{request.id}/first", params=hot, seed=seed))
    if first_token.finish_reason != "length" or params.max_new_tokens == 1:
        return first_token.replace(id=request.id), first_token.num_tokens
    context = (*request.prompt_ids, *first_token.token_ids)
    params = replace(params, max_new_tokens=params.max_new_tokens - 1)
    rest = await engines.generate(episode, replace(request, prompt_ids=context, params=params))
    names = ("token_ids", "logprobs", "versions")
    columns = {name: np.concatenate([first_token.array(name), rest.array(name)]) for name in names}
    completion = rest.replace(**columns, steps=first_token.steps + rest.steps)
    return completion, first_token.num_tokens
