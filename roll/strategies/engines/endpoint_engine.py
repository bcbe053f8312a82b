"""`endpoint`: log-probs of given tokens from a frozen model behind an OpenAI-compatible service.

The student's token ids are the prompt of a completion of one token, which is thrown away; the reply says how likely
each of them was, and which tokens were the likeliest. Ids come back along with the numbers and are compared with what
was sent: a service that adds a token, or cuts some, is an error and never a shifted row.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from roll.configs.schema.engine_config import EndpointConfig
from roll.configs.schema.model_shape import read_shape
from roll.distributed.layout import RankLayout
from roll.distributed.worker import WorkerInfo
from roll.strategies.base import ForwardStrategy, Output, TopK, TrainSpec
from roll.types.batch import TokenBatch, TokenOutputs
from roll.utils.json_service import Endpoint, EndpointFailed, endpoint_url, service_key
from roll.utils.loop_thread import LoopThread

_BYTES_PER_ENTRY = 400
"""Of a reply, for each log-prob in it, generously."""
_TOKEN_ID = "token_id:"
_ABOVE_ZERO = 1e-3
"""How far rounding in half precision takes a log-prob above 0."""
_LOWEST = float(torch.finfo(torch.float32).min)


class EndpointTeacher(ForwardStrategy):
    """Asks the service; raises `EndpointFailed` where it gives no log-probs of the tokens that it was sent."""

    def __init__(self, spec: TrainSpec, info: WorkerInfo, environ: Mapping[str, str] = os.environ) -> None:
        """Find the key and see whether the service is there; raises `ValueError`."""
        options = spec.worker.strategy_args.strategy_config
        assert isinstance(options, EndpointConfig)
        assert options.endpoint is not None, "rules refuse an endpoint without an address"
        path = f"{spec.role}.strategy_args.strategy_config"
        key = service_key(path, options.endpoint, options.api_key_env, environ)
        self.layout = RankLayout(dp_rank=info.rank, dp_size=info.world_size)
        self._options, self._who = options, f"{spec.role} at {options.endpoint}"
        self._api = _APIS[options.api]
        self._endpoint = Endpoint(
            self._api.url(options.endpoint),
            who=self._who,
            key=key,
            timeout=options.request_timeout_s,
            retries=options.request_retries,
            delay=options.retry_delay_s,
            connections=options.max_in_flight,
        )
        self._tokens = _tokens_of(spec)
        self._thread = LoopThread(spec.role)

    def forward(self, batch: TokenBatch, outputs: Sequence[Output], *, adapters: bool = True) -> TokenOutputs:
        """Return `logprobs`, or the columns of one `TopK`; of a first token, which has no context, zeros."""
        assert adapters, "a teacher has no adapters to leave out"
        (wanted,) = outputs
        assert wanted == "logprobs" or isinstance(wanted, TopK), f"a service doesn't tell {wanted}"
        top_k = wanted.k if isinstance(wanted, TopK) else 0
        rows = [ids.tolist() for ids in batch.token_ids.split(batch.lengths.tolist())]
        scores = [entry for row in self._thread.submit(self._all(rows, top_k)).result() for entry in row]
        columns = {"logprobs": torch.tensor(scores)} if not top_k else {
            "top_ids": torch.tensor([[token for token, _ in entry] for entry in scores]).long().reshape(-1, top_k),
            "top_logprobs": torch.tensor([[value for _, value in entry] for entry in scores]).reshape(-1, top_k),
        }  # fmt: skip
        return TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, **columns)

    def close(self) -> None:
        self._thread.cancel_all(timeout=10)
        self._thread.submit(self._endpoint.close()).result(timeout=10)
        self._thread.stop(timeout=10)

    async def _all(self, rows: Sequence[Sequence[int]], top_k: int) -> list[list[Any]]:
        tasks = [asyncio.create_task(self._row(row, top_k)) for row in rows]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _row(self, ids: Sequence[int], top_k: int) -> list[Any]:
        """Return for each token its log-prob, or with `top_k` the likeliest (id, log-prob); zeros for the first."""
        body = {**self._api.asks(ids, top_k, self._options.model), **self._options.request_args}
        body = {name: value for name, value in body.items() if value is not None}
        reply = await self._endpoint.ask(body, largest=(1 << 20) + len(ids) * (top_k + 2) * _BYTES_PER_ENTRY)
        try:
            entries = [*self._api.reads(reply, ids)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            message = str(error) if isinstance(error, _WrongReply) else f"{type(error).__name__}: {error}"
            raise EndpointFailed(
                self._endpoint.clean(
                    f"{self._who} doesn't tell log-probs of the prompt as api={self._options.api} wants it: {message}"
                )
            ) from None
        self._check(entries, ids, top_k)
        if not top_k:
            return [0.0, *(logprobs[token] for logprobs, token in zip(entries, ids[1:], strict=True))]
        # Of equally likely tokens the lower ids, as everywhere.
        return [
            [(0, 0.0)] * top_k,
            *(sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:top_k] for logprobs in entries),
        ]

    def _check(self, entries: Sequence[Mapping[int, float]], ids: Sequence[int], top_k: int) -> None:
        wrong = ""
        if len(entries) != len(ids) - 1:
            wrong = f"{len(entries) + 1} tokens, and it was sent {len(ids)}"
        for position, (logprobs, token) in enumerate(zip(entries, ids[1:], strict=False), 1):
            if not top_k and token not in logprobs:
                wrong = wrong or f"token {next(iter(logprobs), None)} at place {position}, where it was sent {token}"
            elif len(logprobs) < top_k:
                wrong = (
                    wrong or f"{len(logprobs)} tokens at place {position}, and was asked for {top_k}; see distill.top_k"
                )
            foreign = next((entries for entries in logprobs if not 0 <= entries < self._tokens), None)
            if foreign is not None:
                wrong = wrong or f"token {foreign} at place {position}, which the model doesn't have"
            bad = next((value for value in logprobs.values() if not _LOWEST <= value <= _ABOVE_ZERO), None)
            if bad is not None:
                wrong = wrong or f"a log-prob of {bad} at place {position}"
        if wrong:
            raise EndpointFailed(f"{self._who} tells log-probs of other tokens than it was sent: {wrong}")


def _tokens_of(spec: TrainSpec) -> int:
    """Return how many tokens the model has by its config.json; where that isn't known, how many a tensor can name."""
    args = spec.worker.model_args
    shape = read_shape(args.model_name_or_path, args.model_config_kwargs) if args.model_name_or_path else None
    return (shape.vocab if shape is not None else None) or 2**31


class _WrongReply(ValueError):
    """What a reply lacks."""


@dataclass(frozen=True)
class _Api:
    """How a service is asked: the address, the body of a request, and what a reply says, {id: log-prob} per token."""

    url: Callable[[str], str]
    asks: Callable[[Sequence[int], int, str | None], dict[str, Any]]
    reads: Callable[[Any, Sequence[int]], Iterator[dict[int, float]]]


def _prompt_logprobs(reply: Mapping[str, Any], ids: Sequence[int]) -> Iterator[dict[int, float]]:
    """Yield vLLM's `prompt_logprobs`: a dictionary per token, by ids as text; the first has none."""
    del ids
    reported = reply["choices"][0].get("prompt_logprobs")
    if not reported:
        raise _WrongReply("the reply has no prompt_logprobs")
    for entry in reported[1:]:
        yield {int(token): float(value["logprob"]) for token, value in entry.items()}


def _echo(reply: Mapping[str, Any], ids: Sequence[int]) -> Iterator[dict[int, float]]:
    """Yield those of completions with `echo`: lists over prompt and answer, with some services' ids as `token_id:7`."""
    reported = reply["choices"][0].get("logprobs")
    if not reported:
        raise _WrongReply("the reply has no logprobs")
    values, names = reported["token_logprobs"][: len(ids)], reported["tokens"]
    top = reported.get("top_logprobs") or [None] * len(values)
    if not all(str(name).startswith(_TOKEN_ID) for name in names):
        # Texts don't say which tokens these are, so at least there must be as many.
        count = (reply.get("usage") or {}).get("prompt_tokens")
        if count != len(ids):
            raise _WrongReply(f"usage.prompt_tokens is {count}, and it was sent {len(ids)} tokens")
        names, top = [f"{_TOKEN_ID}{token}" for token in ids], [None] * len(values)
    for position, value in enumerate(values[1:], 1):
        others = {_id_of(name): float(logprob) for name, logprob in (top[position] or {}).items()}
        yield {_id_of(names[position]): float(value), **others}


def _id_of(name: str) -> int:
    return int(name.removeprefix(_TOKEN_ID))


def _sglang(reply: Mapping[str, Any], ids: Sequence[int]) -> Iterator[dict[int, float]]:
    """Yield SGLang's own: lists of [log-prob, id, text] over the prompt, and of lists of them."""
    del ids
    reported = reply["meta_info"]
    values = reported.get("input_token_logprobs")
    if not values:
        raise _WrongReply("the reply has no input_token_logprobs")
    top = reported.get("input_top_logprobs") or [None] * len(values)
    for value, others in zip(values[1:], top[1:], strict=True):
        yield {int(token): float(logprob) for logprob, token, *_ in (value, *(others or ()))}


def _completion(ids: Sequence[int], model: str | None, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, **more}


_COMPLETIONS = partial(endpoint_url, path="/completions")
_APIS = {
    "prompt_logprobs": _Api(
        _COMPLETIONS, lambda ids, top_k, model: _completion(ids, model, prompt_logprobs=top_k), _prompt_logprobs
    ),
    "echo": _Api(
        _COMPLETIONS,
        lambda ids, top_k, model: _completion(
            ids, model, echo=True, logprobs=max(1, top_k), return_tokens_as_token_ids=True
        ),
        _echo,
    ),
    "sglang": _Api(
        lambda address: endpoint_url(address.rstrip("/").removesuffix("/v1"), "/generate"),
        lambda ids, top_k, _: {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
        },
        _sglang,
    ),
}
