"""A first token with a temperature of its own (`fire_temperature`): two requests, one response."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from roll.rollout.fire import sampled
from roll.strategies.base import Completion, FireSampling, Request, SamplingParams

PARAMS = SamplingParams(max_new_tokens=4, top_p=0.9, fire=FireSampling(temperature=30.0, top_k=16))
REQUEST = Request(id="e/0", prompt_ids=(1, 2), params=PARAMS, seed=7)


def answered(*answers: tuple[list[int], str], request: Request = REQUEST, first: bool = True) -> Any:
    """What comes of a request to an engine with these answers, and what the engine was asked."""
    asked: list[Request] = []

    async def generate(_: str, request: Request) -> Completion:
        asked.append(request)
        tokens, reason = answers[len(asked) - 1]
        logprobs, versions = tuple(-0.5 * t for t in tokens), (len(asked),) * len(tokens)
        return Completion(
            id=request.id,
            token_ids=tuple(tokens),
            logprobs=logprobs,
            versions=versions,
            finish_reason=reason,  # type: ignore[arg-type]
            steps=len(tokens),
        )

    engines: Any = SimpleNamespace(generate=generate)
    completion, fire_tokens = asyncio.run(sampled(engines, "e", request, first=first))
    return completion, fire_tokens, asked


def test_the_first_token_is_asked_for_by_itself_and_the_rest_goes_on_from_it() -> None:
    whole, fire_tokens, (hot, rest) = answered(([5], "length"), ([6, 7], "stop"))
    assert (whole.id, whole.token_ids, whole.finish_reason, whole.steps) == ("e/0", (5, 6, 7), "stop", 3)
    assert (whole.logprobs, whole.versions, fire_tokens) == ((-2.5, -3.0, -3.5), (1, 2, 2), 1)
    assert (hot.params.max_new_tokens, hot.params.temperature, hot.params.top_k, hot.params.top_p) == (1, 30.0, 16, 1.0)
    assert (rest.prompt_ids, rest.params.max_new_tokens, rest.params.temperature) == ((1, 2, 5), 3, 1.0)
    assert hot.params.fire is rest.params.fire is None, "engines never see it"
    assert hot.seed != rest.seed and hot.id != rest.id


@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_a_first_token_may_be_the_last(reason: str) -> None:
    whole, fire_tokens, asked = answered(([5], reason))
    assert (whole.id, whole.token_ids, whole.finish_reason, fire_tokens, len(asked)) == ("e/0", (5,), reason, 1, 1)


def test_later_turns_and_other_requests_are_as_ever() -> None:
    _, fire_tokens, (asked,) = answered(([5, 6], "stop"), first=False)
    assert (fire_tokens, asked.params.max_new_tokens, asked.params.temperature) == (0, 4, 1.0)
