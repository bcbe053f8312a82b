"""`hf_infer`: generation with a transformers model, made for correctness and for small machines.

Lockstep and deterministic: work happens only inside `poll`, responses enter in the order of the plan and draw from
their own keys, so what shares a batch with what is a function of plan and tokens, never of timing. Responses that
finish leave the batch at once. Those of one prompt are one row until they draw different tokens, and prompts that begin
alike share the prefill of their beginning, unless layers are recurrent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.configs.catalog.family_table import family_of
from roll.configs.checks.model_families import CACHED_LAYERS, clamped_steps
from roll.configs.schema.strategy_options import StrategyConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import (
    ENGINE_PARTS,
    Completion,
    EngineCounters,
    EnginePart,
    EngineSettings,
    InferEngine,
    NamedWeights,
    Request,
    SamplingParams,
)
from roll.strategies.engines.hf.compute_threads import ForwardThreads
from roll.strategies.engines.hf.decode_step import DecodeStep
from roll.strategies.engines.hf.shared_heads import share_heads
from roll.strategies.engines.hf.token_sampler import sample
from roll.strategies.engines.responses import Response, ResponseRules
from roll.strategies.hf.cache import RowCache, forward
from roll.strategies.hf.cache_layers import layer_states
from roll.strategies.hf.first_layers import first_layers
from roll.strategies.hf.rotations import fix_rotations
from roll.strategies.hf.start_check import OTHER_ENGINES, RowsAlone, check_sampled_rows
from roll.strategies.training.pretrained import (
    DTYPES,
    context_length,
    eos_token_ids,
    lay_by_input,
    load_causal_lm,
    load_named_tensors,
    load_tokenizer,
    named_tensors,
    text_config,
)
from roll.types.trajectory import FinishReason
from roll.utils.seeding import stable_hash

if TYPE_CHECKING:
    from roll.strategies.engines.hf.picture_prompts import PicturePrompts

_Item = TypeVar("_Item")
_Tokens = tuple[int, ...]
_Prefilled = tuple[Sequence[_Tokens], Tensor, RowCache]
"""Contexts, the logits [B, V] after them, and their cache."""

_PREFILL_TOKENS = 8192  # padded tokens in one prefill forward; bounds its memory
_WORTH_SHARING = 256
"""Tokens that prompts which begin alike needn't compute, from which on their beginnings get a pass of their own: that
reads all weights once more, which takes as long as computing about a hundred tokens."""


class _Sequence(Response):
    """With the generator of its draws, the decode steps that it was running, and its row of the cache."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.steps = 0
        self.row = -1
        self.prompt: _Tokens = request.prompt_ids
        self.moved = 0
        """By how much its positions are others than those that count its tokens."""
        self.rng = np.random.Generator(np.random.Philox(key=request.seed))

    def restart(self) -> int:
        lost = super().restart()
        key = stable_hash(self.request.seed, "restart", lost, bits=128)
        self.rng = np.random.Generator(np.random.Philox(key=key))
        return lost

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    def completion(self, reason: FinishReason) -> Completion:
        return super().completion(reason).replace(steps=self.steps)


class HfInfer(InferEngine):
    """See the module docstring. `model` is in eval mode; `pad_token_id` any valid id: padding is masked.

    `eos_token_ids`, `max_context` and `decode` are those of `ResponseRules`, `partial_rollout` is that of
    `EngineSettings`. `tried`: a smaller model that computes alike, to check things on.
    """

    lockstep = True

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        eos_token_ids: Iterable[int],
        pad_token_id: int,
        max_running_requests: int = 64,
        max_context: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        partial_rollout: Literal["resume", "restart"] = "resume",
        tried: torch.nn.Module | None = None,
        pictures: PicturePrompts | None = None,
    ) -> None:
        self._model = model
        self._pictures = pictures
        self._pad = pad_token_id
        self._max_running = max_running_requests
        self._restarts = partial_rollout == "restart"
        config = text_config(model)
        ends, reads = frozenset(eos_token_ids), pictures is not None
        self._rules = ResponseRules(ends, max_context, decode, config.vocab_size, reads)
        self._device = next(model.parameters()).device
        require_cached_layers(model)
        self._layers = layer_states(config)
        self._recurrent = any(layer.states for layer in self._layers)
        self._threads = ForwardThreads(model)
        if self._device.type == "cpu":
            lay_by_input(model)
        self._decode_step = DecodeStep.of(model, tried)
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._cache: RowCache | None = None
        self._version = 0
        self._counters = EngineCounters()

    @property
    def version(self) -> int:
        return self._version

    def loaded_weights(self) -> NamedWeights | None:
        return named_tensors(self._model)

    def submit(self, requests: Sequence[Request]) -> None:
        known = {s.request.id for s in (*self._waiting, *self._running)}
        for request in requests:
            self._rules.check(request, known)
            known.add(request.id)
        sequences = [_Sequence(request) for request in requests]
        if self._pictures is not None:
            for sequence in sequences:
                sequence.prompt, sequence.moved = self._pictures.marked(sequence.request)
        self._waiting.extend(sequences)
        self._waiting.sort(key=lambda s: (s.request.order, s.request.id))

    @torch.inference_mode()
    def poll(self, budget: float) -> list[Completion]:
        finished: list[Completion] = []
        for _ in range(int(budget)):
            if not self._waiting and not self._running:
                break
            finished.extend(self._step())
        if self._pictures is not None and not self._waiting and not self._running:
            self._pictures.forget()
        return finished

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = set(request_ids)
        stopped = [s for s in (*self._running, *self._waiting) if s.request.id in ids]
        self._waiting = [s for s in self._waiting if s.request.id not in ids]
        self._go_on([s for s in self._running if s.request.id not in ids])
        return [s.completion("abort") for s in stopped]

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights; running requests go on, their cache recomputed from their tokens, or start over."""
        for sequence in self._running:
            self._counters.count(sequence.restart() if self._restarts else None)
        self._waiting = self._running + self._waiting
        self._running, self._cache = [], None
        load_named_tensors(self._model, weights)
        self._version = version

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these tensors of the trainer, by their names, in place of those of its own that lie alike."""
        for name, parameter in self._model.named_parameters():
            lent = weights.get(name)
            if lent is not None and _alike(lent, parameter):
                parameter.data = lent
        if self._decode_step is not None:
            self._decode_step = type(self._decode_step)(self._model)  # it holds the tensors themselves

    def take_counters(self) -> EngineCounters:
        counters, self._counters = self._counters, EngineCounters()
        return counters

    def sleep(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> int:
        if self._running or self._waiting:
            under_way = len(self._running) + len(self._waiting)
            raise RuntimeError(f"hf_infer can't sleep: {under_way} requests are on their way")
        if "weights" not in parts or self._device.type == "cpu":
            return 0
        self._model.to("cpu")
        return sum(tensor.nbytes for tensor in self._model.state_dict().values())

    def wake(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> None:
        if "weights" in parts:
            self._model.to(self._device)

    def _step(self) -> list[Completion]:
        """Feed each row its last token, take in waiting responses, draw one token for every response."""
        newcomers = self._waiting[: self._max_running - len(self._running)]
        contexts = list(dict.fromkeys(s.context for s in newcomers))
        rows = 0 if self._cache is None else len(self._cache)
        with self._threads.of(rows + sum(map(len, contexts))) as large:
            logits: list[Tensor] = []
            if rows:
                logits.append(self._forward_rows(large))
            if newcomers:
                del self._waiting[: len(newcomers)]
                row_of: dict[_Tokens, int] = {}
                ahead = max(s.request.params.max_new_tokens - len(s.tokens) for s in newcomers)
                for part, part_logits, cache in self._prefill(contexts, ahead):
                    row_of.update({context: rows + len(row_of) + i for i, context in enumerate(part)})
                    logits.append(part_logits)
                    self._cache = _joined(self._cache, cache)
                for sequence in newcomers:
                    sequence.row = row_of[sequence.context]
                self._running.extend(newcomers)
            reasons = self._draw(torch.cat(logits))
        done = [s.completion(reason) for s in self._running if (reason := reasons[s.request.id]) is not None]
        self._go_on([s for s in self._running if reasons[s.request.id] is None])
        return done

    def _forward_rows(self, large: AbstractContextManager[object]) -> Tensor:
        """Return logits [B, V]; `large` goes around operators that may have more threads than the rest."""
        cache = self._cache
        assert cache is not None
        token_of = {s.row: s.tokens[-1] for s in self._running}
        last = torch.tensor([token_of[row] for row in range(len(cache))], device=self._device)
        if self._decode_step is not None:
            return self._decode_step(last, cache, large)
        if self._pictures is None:
            return forward(self._model, last[:, None], cache)
        moved_of = {s.row: s.moved for s in self._running}
        moved = torch.tensor([moved_of[row] for row in range(len(cache))], device=self._device)
        return forward(self._model, last[:, None], cache, moved=moved)

    def _prefill(self, contexts: Sequence[_Tokens], ahead: int) -> Iterator[_Prefilled]:
        """Run different contexts; what some begin with is computed once, where that is worth a pass of its own.

        Not with recurrent layers: they have states after the last token alone, and rests of several lengths would need
        padding behind it. `ahead`: at most so many tokens come after one of them.
        """
        whole, alike = (contexts, []) if self._recurrent else _by_beginning(contexts)
        yield from self._prefill_whole(whole, ahead)
        beginnings: RowCache | None = None
        for _, _, cache in self._prefill_whole([group[0][:shared] for shared, group in alike], 0):
            beginnings = _joined(beginnings, cache)
        if beginnings is None:
            return
        begun = [(context, row) for row, (_, group) in enumerate(alike) for context in group]
        rests = [len(context) - shared for shared, group in alike for context in group]
        for part in _parts(list(zip(begun, rests, strict=True)), rests):
            # All compute as many tokens as the longest rest has: rows end together.
            width = max(rest for _, rest in part)
            known = torch.tensor([len(context) - width for (context, _), _ in part], device=self._device)
            rows = torch.tensor([row for (_, row), _ in part], device=self._device)
            contexts = [context for (context, _), _ in part]
            yield self._prefilled(contexts, width, beginnings.beginnings(rows, known, width + ahead))

    def _prefill_whole(self, contexts: Sequence[_Tokens], ahead: int) -> Iterator[_Prefilled]:
        for part in _parts(contexts, [len(context) for context in contexts]):
            width = max(map(len, part))
            padding = torch.tensor([width - len(context) for context in part], device=self._device)
            yield self._prefilled(part, width, RowCache(self._layers, padding, ahead))

    def _prefilled(self, contexts: Sequence[_Tokens], width: int, cache: RowCache) -> _Prefilled:
        """Run the last `width` tokens of contexts whose other tokens the cache has."""
        if self._pictures is not None:
            return contexts, self._pictures.forward(self._model, contexts, width, cache), cache
        ids = [[self._pad] * (width - len(context)) + list(context[-width:]) for context in contexts]
        return contexts, forward(self._model, torch.tensor(ids, device=self._device), cache), cache

    def _draw(self, logits: Tensor) -> dict[str, FinishReason | None]:
        """Give every response a token; by its request, why it ends there, or None. `logits` are [B, V], by row."""
        groups: dict[tuple[int, SamplingParams], list[_Sequence]] = {}
        for sequence in sorted(self._running, key=lambda s: s.row):
            groups.setdefault((sequence.row, sequence.request.params), []).append(sequence)
        rows, params = zip(*groups, strict=True)
        if rows != tuple(range(len(logits))):
            logits = logits[torch.tensor(rows, device=self._device)]
        uniforms = [[s.rng.random() if p.temperature > 0 else 0.0 for s in groups[row, p]] for row, p in groups]
        previous = [
            None if p.repetition_penalty == 1.0 else torch.tensor(_tokens_in(group[0].context), device=self._device)
            for (_, p), group in groups.items()
        ]
        tokens, logprobs = sample(logits, params, uniforms, previous)
        reasons = {}
        for group, drawn, drawn_logprobs in zip(groups.values(), tokens.tolist(), logprobs.tolist(), strict=True):
            for sequence, token, logprob in zip(group, drawn, drawn_logprobs, strict=False):  # the longest has as many
                reason = sequence.record([token], [logprob], self._version, self._rules)
                reasons[sequence.request.id] = reason
                sequence.steps += 1
        return reasons

    def _go_on(self, running: list[_Sequence]) -> None:
        """Keep these responses: rows of others go, and a row whose responses drew different tokens becomes several."""
        self._running, cache = running, self._cache
        if not running or cache is None:
            self._cache = None
            return
        used = sorted({s.row for s in running})
        place = {row: row for row in used}
        if len(used) < len(cache):
            place = {row: i for i, row in enumerate(cache.keep(used))}
        row_of: dict[tuple[int, int], int] = {}
        taken: set[int] = set()
        copied: list[int] = []
        for sequence in running:
            row, token = place[sequence.row], sequence.tokens[-1]
            if (row, token) not in row_of and row in taken:
                row_of[row, token] = len(cache) + len(copied)
                copied.append(row)
            taken.add(row)
            sequence.row = row_of.setdefault((row, token), row)
        cache.repeat(copied, room=len(running))


def _tokens_in(context: _Tokens) -> list[int]:
    """Return the different tokens of a context, ascending; marks of pictures are none."""
    return sorted(token for token in set(context) if token >= 0)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride())


def _joined(cache: RowCache | None, other: RowCache) -> RowCache:
    if cache is None:
        return other
    cache.adopt(other)
    return cache


def _by_beginning(contexts: Sequence[_Tokens]) -> tuple[list[_Tokens], list[tuple[int, list[_Tokens]]]]:
    """Return which of these different contexts are computed whole, and groups of (tokens in common, contexts).

    Contexts have at least half of their tokens in common with their group. If all groups together don't save enough
    tokens, all are computed whole, in the order in which they came.
    """
    groups: list[tuple[int, list[_Tokens]]] = []
    for context in sorted(contexts):
        shared, group = groups[-1] if groups else (0, [])
        shared = next((i for i in range(shared) if context[i] != group[0][i]), shared)
        if group and 2 * shared >= len(context):
            groups[-1] = (shared, group)
            group.append(context)
        else:
            groups.append((len(context) - 1, [context]))
    alike = [(shared, group) for shared, group in groups if len(group) > 1]
    if sum(shared * (len(group) - 1) for shared, group in alike) < _WORTH_SHARING:
        return list(contexts), []
    among = {context for _, group in alike for context in group}
    return [context for context in contexts if context not in among], alike


def _parts(items: Sequence[_Item], lengths: Sequence[int]) -> Iterator[Sequence[_Item]]:
    """Yield consecutive items whose padded size stays within the prefill budget."""
    start, width = 0, 0
    for i, length in enumerate(lengths):
        width = max(width, length)
        if i > start and width * (i - start + 1) > _PREFILL_TOKENS:
            yield items[start:i]
            start, width = i, length
    if items:
        yield items[start:]


def require_cached_layers(model: torch.nn.Module) -> None:
    """Raise `ValueError` for a model with layers whose states the cache can't carry."""
    other = set(getattr(text_config(model), "layer_types", None) or ()) - CACHED_LAYERS
    if other:
        raise ValueError(
            f"hf_infer can't run {type(model).__name__}, which has layers of type {', '.join(sorted(other))}; it "
            f"can run {', '.join(sorted(CACHED_LAYERS))}. {OTHER_ENGINES}"
        )
    if why := clamped_steps(model):
        raise ValueError(f"{why}. {OTHER_ENGINES}")


def build(args: ModelArgs, options: StrategyConfig, settings: EngineSettings) -> HfInfer:
    """Return an engine with the model of `args`, on the accelerator if there is one.

    Requests bring their own seeds, and memory grows with what runs, so that most settings say nothing here.
    """
    del options
    tokenizer = load_tokenizer(args)
    model: torch.nn.Module = load_causal_lm(args, DTYPES[args.dtype])
    if torch.cuda.is_available():
        model = model.cuda()
    tried = first_layers(model)
    alone = ready_alone(model, tried, settings.max_sequence_length)
    engine = HfInfer(
        model,
        eos_token_ids=eos_token_ids(model, tokenizer),
        pad_token_id=0,  # masked; the tokenizer's may be missing, or beyond the model's vocabulary
        max_running_requests=settings.max_running_requests,
        max_context=min(settings.max_sequence_length, context_length(model)),
        decode=tokenizer.decode,
        partial_rollout=settings.partial_rollout,
        tried=tried,
        pictures=_picture_prompts(model, args),
    )
    check_sampled_rows(alone)
    return engine


def _picture_prompts(model: Any, args: ModelArgs) -> PicturePrompts | None:
    """Return what reads the pictures of prompts; None for a model that is given none."""
    if family_of(model.config.model_type).pictures is None:
        return None
    from roll.strategies.engines.hf.picture_prompts import PicturePrompts
    from roll.utils.picture_tokens import PictureTokens

    tokens = PictureTokens.load(str(args.model_name_or_path), trust_remote_code=args.trust_remote_code)
    return PicturePrompts(tokens, next(model.parameters()).device)


def ready_alone(model: torch.nn.Module, tried: torch.nn.Module, longest: int) -> RowsAlone:
    """Change a model for sampling rows of up to `longest` tokens, and one that computes alike; return what the latter
    gave for single rows before attention was changed."""
    models = list(dict.fromkeys((model, tried)))
    for each in models:
        fix_rotations(each, longest)
    alone = RowsAlone(tried, longest=longest)
    for each in models:
        share_heads(each)
    return alone
