"""`hf_infer`: generation with a transformers model, made for correctness and for small machines.

Lockstep and deterministic: work happens only inside `poll`, rows enter in the order of the plan and draw from their own
keys, so what shares a batch with what is a function of plan and tokens, never of timing. Rows that finish leave the
batch at once; responses of one prompt share its prefill, and prompts that begin alike that of their beginning where
responses are greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll.configs.checks.model_families import CACHED_LAYERS
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
)
from roll.strategies.engines.hf.compute_threads import ForwardThreads
from roll.strategies.engines.hf.decode_step import DecodeStep
from roll.strategies.engines.hf.shared_heads import share_heads
from roll.strategies.engines.hf.token_sampler import sample
from roll.strategies.engines.responses import Response, ResponseRules
from roll.strategies.hf.cache import RowCache, forward
from roll.strategies.hf.rotations import fix_rotations
from roll.strategies.hf.start_check import OTHER_ENGINES, RowsAlone, check_sampled_rows
from roll.strategies.training.pretrained import (
    DTYPES,
    context_length,
    eos_token_ids,
    leave_file,
    load_causal_lm,
    load_named_tensors,
    load_tokenizer,
    named_tensors,
    text_config,
)
from roll.types.trajectory import FinishReason
from roll.utils.seeding import stable_hash

_PREFILL_TOKENS = 8192  # padded tokens in one prefill forward; bounds its memory
_WORTH_SHARING = 256
"""Tokens that rows which begin alike needn't compute, from which on their beginning gets a pass of its own: that reads
all weights once more, which takes as long as computing about a hundred tokens."""


class _Sequence(Response):
    """With the generator of its draws, and the decode steps that it was running."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.steps = 0
        self.rng = np.random.Generator(np.random.Philox(key=request.seed))

    def restart(self) -> int:
        lost = super().restart()
        key = stable_hash(self.request.seed, "restart", lost, bits=128)
        self.rng = np.random.Generator(np.random.Philox(key=key))
        return lost

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.tokens)

    def completion(self, reason: FinishReason) -> Completion:
        return super().completion(reason).replace(steps=self.steps)


class HfInfer(InferEngine):
    """See the module docstring. `model` is in eval mode; `pad_token_id` any valid id: padding is masked.

    `eos_token_ids`, `max_context` and `decode` are those of `ResponseRules`, `partial_rollout` is that of
    `EngineSettings`.
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
    ) -> None:
        self._model = model
        self._pad = pad_token_id
        self._max_running = max_running_requests
        self._restarts = partial_rollout == "restart"
        config = text_config(model)
        self._rules = ResponseRules(frozenset(eos_token_ids), max_context, decode, config.vocab_size)
        self._device = next(model.parameters()).device
        other = set(getattr(config, "layer_types", None) or ()) - CACHED_LAYERS
        if other:
            raise ValueError(
                f"hf_infer can't run {type(model).__name__}, which has layers of type {', '.join(sorted(other))}; it "
                f"can run {', '.join(sorted(CACHED_LAYERS))}. {OTHER_ENGINES}"
            )
        self._num_layers: int = config.num_hidden_layers
        self._threads = ForwardThreads(model)
        self._decode_step = DecodeStep.of(model)
        if self._decode_step is None:
            leave_file(model)
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._cache: RowCache | None = None
        self._version = 0
        self._asleep = False
        self._counters = EngineCounters()

    @property
    def version(self) -> int:
        return self._version

    def loaded_weights(self) -> NamedWeights | None:
        return named_tensors(self._model)

    def submit(self, requests: Sequence[Request]) -> None:
        if self._asleep:
            raise RuntimeError("hf_infer sleeps without its weights: wake it, and update them, first")
        known = {s.request.id for s in (*self._waiting, *self._running)}
        for request in requests:
            self._rules.check(request, known)
            known.add(request.id)
        self._waiting.extend(_Sequence(request) for request in requests)
        self._waiting.sort(key=lambda s: (s.request.order, s.request.id))

    @torch.inference_mode()
    def poll(self, budget: float) -> list[Completion]:
        finished: list[Completion] = []
        for _ in range(int(budget)):
            if not self._waiting and not self._running:
                break
            finished.extend(self._step())
        return finished

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = set(request_ids)
        stopped = [s for s in (*self._running, *self._waiting) if s.request.id in ids]
        self._waiting = [s for s in self._waiting if s.request.id not in ids]
        self._keep([i for i, s in enumerate(self._running) if s.request.id not in ids])
        return [s.completion("abort") for s in stopped]

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights; running requests go on, their cache recomputed from their tokens, or start over."""
        for sequence in self._running:
            self._counters.count(sequence.restart() if self._restarts else None)
        self._waiting = self._running + self._waiting
        self._running, self._cache = [], None
        load_named_tensors(self._model, weights)
        self._version = version

    def take_counters(self) -> EngineCounters:
        counters, self._counters = self._counters, EngineCounters()
        return counters

    def sleep(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> int:
        if self._running or self._waiting:
            under_way = len(self._running) + len(self._waiting)
            raise RuntimeError(f"hf_infer can't sleep: {under_way} requests are on their way")
        if "weights" not in parts:
            return 0
        self._asleep = True
        if self._device.type != "cpu":
            self._model.to("cpu")
            return sum(tensor.nbytes for tensor in self._model.state_dict().values())
        freed = 0
        for parameter in self._model.parameters():
            memory = parameter.untyped_storage()
            if memory.nbytes() == parameter.nbytes and memory.resizable():
                memory.resize_(0)  # emptied, not replaced: decode steps hold views of it
                freed += parameter.nbytes
        return freed

    def wake(self, parts: Sequence[EnginePart] = ENGINE_PARTS) -> None:
        if "weights" not in parts:
            return
        self._asleep = False
        self._model.to(self._device)
        for parameter in self._model.parameters():
            memory = parameter.untyped_storage()
            if not memory.nbytes():
                memory.resize_(parameter.nbytes)

    def _step(self) -> list[Completion]:
        """Feed each running row its last token, take in waiting rows, draw one token for every row."""
        newcomers = self._waiting[: self._max_running - len(self._running)]
        with self._threads.of(len(self._running) + sum(len(s.context) for s in newcomers)) as large:
            logits: list[Tensor] = []
            if self._running:
                logits.append(self._forward_running(large))
            if newcomers:
                del self._waiting[: len(newcomers)]
                logits.append(self._prefill(newcomers))
                self._running.extend(newcomers)
            reasons = self._draw(torch.cat(logits))
        done = [s.completion(r) for s, r in zip(self._running, reasons, strict=True) if r is not None]
        self._keep([i for i, reason in enumerate(reasons) if reason is None])
        return done

    def _forward_running(self, large: AbstractContextManager[object]) -> Tensor:
        """Return logits [B, V]; `large` goes around operators that may have more threads than the rest."""
        cache = self._cache
        assert cache is not None
        last = torch.tensor([s.tokens[-1] for s in self._running], device=self._device)
        if self._decode_step is not None:
            return self._decode_step(last, cache, large)
        return forward(self._model, last[:, None], cache)

    def _prefill(self, newcomers: Sequence[_Sequence]) -> Tensor:
        """Run the contexts of new rows, each distinct one once, and add them to the running cache.

        Where all are greedy, a shared beginning is computed once, too. It changes the last digits of logits, which
        decide what is drawn: a seed must go on giving the same samples, however many prompts begin alike.
        """
        distinct: dict[tuple[int, ...], None] = {}
        greedy, ahead = True, 0
        for sequence in newcomers:
            distinct[sequence.context] = None
            greedy &= sequence.request.params.temperature == 0
            ahead = max(ahead, sequence.request.params.max_new_tokens - len(sequence.tokens))
        contexts = list(distinct)
        row_of: dict[tuple[int, ...], int] = {}
        logits: list[Tensor] = []
        cache: RowCache | None = None
        for shared, group in _by_beginning(contexts) if greedy else [(0, contexts)]:
            beginning = self._prefill_part([group[0][:shared]], ahead)[1] if shared else None
            for part in _prefill_parts(group, shared):
                for context in part:
                    row_of[context] = len(row_of)
                part_logits, part_cache = self._prefill_part(part, ahead, beginning)
                logits.append(part_logits)
                if cache is None:
                    cache = part_cache
                else:
                    cache.adopt(part_cache)
        assert cache is not None
        rows = torch.tensor([row_of[s.context] for s in newcomers], device=self._device)
        cache.select(rows)
        if self._cache is None:
            self._cache = cache
        else:
            self._cache.adopt(cache)
        return torch.cat(logits)[rows]

    def _prefill_part(
        self, contexts: Sequence[tuple[int, ...]], ahead: int, beginning: RowCache | None = None
    ) -> tuple[Tensor, RowCache]:
        """Return logits [B, V] after these contexts, and their cache, with room for `ahead` more tokens; `beginning`
        has what all of them begin with."""
        width = max(len(c) for c in contexts)
        padding = torch.tensor([width - len(c) for c in contexts], device=self._device)
        ids = torch.tensor([[self._pad] * (width - len(c)) + list(c) for c in contexts], device=self._device)
        if beginning is None:
            cache = RowCache(self._num_layers, padding, ahead)
        else:
            cache, ids = beginning.continued(padding, width - beginning.length + ahead), ids[:, beginning.length :]
        return forward(self._model, ids, cache), cache

    def _draw(self, logits: Tensor) -> list[FinishReason | None]:
        """Give every row a token; why its response ends there, or None."""
        params = [s.request.params for s in self._running]
        uniforms = [s.rng.random() if s.request.params.temperature > 0 else 0.0 for s in self._running]
        previous = [
            None if p.repetition_penalty == 1.0 else torch.tensor(sorted(set(s.context)), device=self._device)
            for p, s in zip(params, self._running, strict=True)
        ]
        tokens, logprobs = sample(logits, params, uniforms, previous)
        reasons = []
        for sequence, token, logprob in zip(self._running, tokens.tolist(), logprobs.tolist(), strict=True):
            reasons.append(sequence.record([token], [logprob], self._version, self._rules))
            sequence.steps += 1
        return reasons

    def _keep(self, rows: Sequence[int]) -> None:
        """Drop every running row that isn't in `rows`."""
        if len(rows) == len(self._running):
            return
        if not rows:
            self._running, self._cache = [], None
            return
        assert self._cache is not None
        self._running = [self._running[i] for i in self._cache.keep(rows)]


def _by_beginning(contexts: Sequence[tuple[int, ...]]) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Return (tokens that they begin with alike, contexts) of different contexts, first those that are computed whole.

    Contexts whose common beginning is less than half of them, or isn't worth a pass of its own, are computed whole, in
    the order in which they came.
    """
    groups: list[tuple[int, list[tuple[int, ...]]]] = []
    for context in sorted(contexts):
        shared, group = groups[-1] if groups else (0, [])
        shared = next((i for i in range(shared) if context[i] != group[0][i]), shared)
        if group and 2 * shared >= len(context):
            groups[-1] = (shared, group)
            group.append(context)
        else:
            groups.append((len(context) - 1, [context]))
    alike = [(shared, group) for shared, group in groups if shared * (len(group) - 1) >= _WORTH_SHARING]
    among = {context for _, group in alike for context in group}
    whole = [context for context in contexts if context not in among]
    return [(0, whole), *alike] if whole else alike


def _prefill_parts(contexts: Sequence[tuple[int, ...]], shared: int) -> list[Sequence[tuple[int, ...]]]:
    """Return consecutive contexts whose padded size, but for what they share, stays within the prefill budget."""
    parts: list[Sequence[tuple[int, ...]]] = []
    start, width = 0, 0
    for i, context in enumerate(contexts):
        wider = max(width, len(context) - shared)
        if i > start and wider * (i - start + 1) > _PREFILL_TOKENS:
            parts.append(contexts[start:i])
            start, wider = i, len(context) - shared
        width = wider
    parts.append(contexts[start:])
    return parts


def build(args: ModelArgs, options: StrategyConfig, settings: EngineSettings) -> HfInfer:
    """Return an engine with the model of `args`, on the accelerator if there is one.

    Requests bring their own seeds, and memory grows with what runs, so that most settings say nothing here.
    """
    del options
    tokenizer = load_tokenizer(args)
    model: torch.nn.Module = load_causal_lm(args, DTYPES[args.dtype])
    if torch.cuda.is_available():
        model = model.cuda()
    fix_rotations(model, settings.max_sequence_length)
    alone = RowsAlone(model, longest=settings.max_sequence_length)
    share_heads(model)
    engine = HfInfer(
        model,
        eos_token_ids=eos_token_ids(model, tokenizer),
        pad_token_id=0,  # masked; the tokenizer's may be missing, or beyond the model's vocabulary
        max_running_requests=settings.max_running_requests,
        max_context=min(settings.max_sequence_length, context_length(model)),
        decode=tokenizer.decode,
        partial_rollout=settings.partial_rollout,
    )
    check_sampled_rows(alone, text_config(model).num_hidden_layers)
    return engine
