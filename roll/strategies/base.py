"""The interfaces every backend implements. Read this file to write a backend.

A strategy owns the model, its optimizer and its process groups. It knows nothing of rewards, Ray, or the worker that
holds it. Every rank calls every method in the same order.

What only some can do are abilities, such as `Sleeps`: protocols of abilities.py, which a backend has by having their
methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor

from roll.configs.schema.worker_config import ForwardConfig, TrainConfig
from roll.distributed.layout import RankLayout
from roll.distributed.weights import WeightPart
from roll.types.batch import Denominators, TokenBatch, TokenOutputs
from roll.types.columns import Column, PackedColumns
from roll.types.metrics import Metrics
from roll.types.trajectory import FinishReason

if TYPE_CHECKING:
    from roll.types.picture import Picture

OutputName = Literal["logprobs", "student_logprobs", "entropy", "correct", "logit_gradients", "values"]
"""Columns of `TokenOutputs`. A loss can't need `correct` and `logit_gradients`, which have no gradient."""


@dataclass(frozen=True)
class TopK:
    """Ask `forward` for `top_logprobs` and `top_ids`: the `k` likeliest tokens of each position."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"TopK asks for {self.k} tokens; expected at least 1")


Output: TypeAlias = OutputName | TopK

StatePart = Literal["parameters", "gradients", "optimizer"]
STATE_PARTS: tuple[StatePart, ...] = get_args(StatePart)


@dataclass
class LossTerms:
    """A differentiable scalar and what to log about it."""

    loss: Tensor
    """Already divided by the global denominators: summing over micro-batches and ranks gives the batch loss."""
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True)
class LossFn:
    """A pure loss over per-token model outputs; it never sees logits or the parallel layout."""

    compute: Callable[[TokenOutputs, TokenBatch, Denominators], LossTerms]
    """(outputs of one micro-batch with gradients, its rows, sizes of the whole mini-batch) -> terms.

    The rows of a unit (`TokenBatch.unit_ids`) come in one call, so a loss may compare them: `batch.units()`.
    """
    needs: tuple[OutputName, ...]
    """Outputs that the strategy must produce for it."""
    has_gradient: Callable[[TokenBatch], Tensor] | None = None
    """bool [B]: rows that can move the weights; the others count in the denominators but aren't computed. None: all."""


NamedWeights: TypeAlias = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """All that a training backend is told."""

    role: str
    kind: Literal["policy", "value", "reward"]
    """What comes out: log-probs per token, a value per token, or a score per row at its one action token. One that
    trains scores just there; one that doesn't goes back over padding, as classifiers do."""
    worker: ForwardConfig
    """The role's section of the configuration."""
    seed: int
    temperature: float = 1.0
    """Of the rollouts: log-probs are those of logits / temperature."""
    trains: bool = True
    """False builds the `*_infer` form: no optimizer, no gradients."""
    total_optimizer_steps: int = 1
    """Planned length of the run, for the learning-rate schedule."""
    max_grad_norm: float = 1.0
    """0 or less: no clipping; the norm is still reported."""
    templates: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Chat templates that the policy's prompts are rendered with, "" for the tokenizer's own, each with its variables:
    they say what ends a response."""
    max_sequence_length: int | None = None
    """Tokens of the longest row that the run may have; None: as many as the model can hold."""
    l2: float = 0.0
    """Adds l2 / 2 * |weights - initial weights|^2 to the loss."""

    @property
    def training(self) -> TrainConfig:
        """Return the section of a role that trains."""
        assert isinstance(self.worker, TrainConfig), f"{self.role} has no training_args"
        return self.worker

    @property
    def metric_prefix(self) -> str:
        """Return what the names of its training metrics begin with."""
        return "critic" if self.kind == "value" else "actor"


class ForwardStrategy(ABC):
    """What computes columns of rows: the least that a frozen reference or teacher must do.

    A rank whose batch has no rows still takes part in every pass: there may be fewer units than ranks.
    """

    layout: RankLayout

    @abstractmethod
    def forward(self, batch: TokenBatch, outputs: Sequence[Output], *, adapters: bool = True) -> TokenOutputs:
        """Return columns of this rank's rows under the current weights; no gradients.

        `adapters=False`: those of the base model, without its LoRA adapters.
        """

    def close(self) -> None:
        """Let go of what wouldn't end with the process. Default: there is nothing."""


class TrainStrategy(ForwardStrategy):
    """One training backend. `*_infer` variants are built without an optimizer and only `forward`."""

    def __init_subclass__(cls, **keys: Any) -> None:
        super().__init_subclass__(**keys)
        if "named_weights" in cls.__dict__ and "sends_from_every_rank" not in cls.__dict__:
            cls.sends_from_every_rank = False  # type: ignore[attr-defined]  # that was said of what it replaces

    @abstractmethod
    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Take an optimizer step over this rank's rows of a mini-batch; return its metrics, to be merged over ranks."""

    @abstractmethod
    def named_weights(self, part: WeightPart = "merged") -> NamedWeights:
        """Yield full (unsharded) tensors under Hugging Face names, one at a time.

        `base` and `adapters` are for models with LoRA: the weights without the adapters, and those alone under peft's
        names, with matrices B that are scaled already (`lora_alpha` is the rank then).
        """

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write under `path`, each rank its own part: weights, optimizer, position in the learning-rate schedule."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Restore what `save` wrote. Called before the first step."""

    @abstractmethod
    def export(self, path: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, tokenizer included; of a reward model
        `AutoModelForSequenceClassification`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FireSampling:
    """How the first token of a response is drawn where it isn't drawn as the others are (FIRE, arXiv:2410.21236)."""

    temperature: float
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then reported at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    fire: FireSampling | None = None
    """Of an episode's first response, which then takes two requests; engines never see it. None: as the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to sample."""

    id: str
    """Unique among running requests."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """128-bit key of this response's randomness: derived from (seed, purpose, step, task, member, turn)."""
    order: tuple[int, ...] = ()
    """Position in the plan; deterministic engines batch by it, never by arrival."""
    affinity: str = ""
    """Requests with the same text share a prefix, and a router keeps them on one engine while it has room."""
    pictures: tuple[Picture, ...] = ()
    """What the prompt shows, in the order of its places; its ids are expanded, one for each feature."""
    patient: bool = False
    """No agent or environment waits for this response, only the batch does: an engine may hand it out a moment later,
    along with others."""


class RequestRefused(ValueError):
    """An engine can't run this request, and goes on with all others."""


@dataclass(frozen=True, kw_only=True)
class Completion(PackedColumns):
    """A finished (or aborted) response; an abort keeps what was sampled so far."""

    id: str
    token_ids: Column[int] = Column("q")
    logprobs: Column[float] = Column("d")
    """Log-prob of each token under the distribution it was drawn from (temperature, penalty, top-k, top-p applied)."""
    versions: Column[int] = Column("q")
    finish_reason: FinishReason
    steps: int = 0
    """Decode steps this request was running: the deterministic clock of `lockstep` engines."""
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    """int16 [prompt + response tokens, L, K], as in `TokenBatch.routed_experts`; None: the engine wasn't asked."""
    refused: str = ""
    """Why the engine doesn't run this request (`RequestRefused`); empty: it did."""

    @property
    def num_tokens(self) -> int:
        """Return tokens of the response."""
        return self.size("token_ids")

    @property
    def refusal(self) -> RequestRefused | None:
        """Return what to raise for whoever waits for this response; None: it is one."""
        return RequestRefused(self.refused) if self.refused else None


EnginePart = Literal["weights", "kv_cache"]
ENGINE_PARTS: tuple[EnginePart, ...] = get_args(EnginePart)


@dataclass
class EngineCounters:
    """What weight updates did to responses on their way."""

    resumed: int = 0
    """Responses that went on under new weights."""
    restarted: int = 0
    """Responses that started over (`partial_rollout: restart`)."""
    discarded_tokens: int = 0
    """Tokens thrown away by that."""

    def count(self, discarded: int | None) -> None:
        """Count a response that started over without so many tokens, or went on (None)."""
        if discarded is None:
            self.resumed += 1
        else:
            self.restarted += 1
            self.discarded_tokens += discarded


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What the run tells an engine besides its model and its own options."""

    max_running_requests: int
    """Responses decoded at once."""
    max_sequence_length: int
    """Prompt plus response tokens."""
    seed: int
    """Of the engine; each response has a key of its own, which SGLang ignores."""
    partial_rollout: Literal["resume", "restart"] = "resume"
    """What a weight update does to responses on their way: go on from their tokens, or start over without them."""
    slots: tuple[int, ...] = ()
    """Device slots of the rank that holds the engine, for its name in messages."""
    return_routed_experts: bool = False
    """Say of each token to which experts it was sent (`router_replay`)."""
    update_buffer_bytes: int = 256 << 20
    """Host memory through which weights go to an engine's own processes."""


class EngineDied(RuntimeError):
    """The engine can't go on; whoever owns it builds a new one and submits its requests again."""


class InferEngine(ABC):
    """One inference engine: requests go in with `submit`, come out of `poll`, in any order.

    Batched calls keep the number of remote calls per response far below one. `lockstep` engines compute only inside
    `poll`, so what they batch together is decided by the caller and never by timing. The others compute on their own;
    the methods of `vllm` and `sglang` are called from several threads at once, those of one's own from one at a time.
    """

    lockstep: bool = False

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; a malformed one raises `ValueError` before any is queued."""

    @abstractmethod
    def poll(self, budget: float) -> list[Completion]:
        """Return what has finished since the last call.

        Lockstep: works for at most `budget` decode steps. Others: returns as soon as there is something, at the latest
        after `budget` seconds; raises `EngineDied` when the engine is gone.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Stop these; returns them with finish reason `abort`. Unknown or finished ids are ignored."""

    @abstractmethod
    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights (Hugging Face names) and name them `version`; a missing or unknown name raises.

        Requests on their way go on from the tokens they have, which are read again under the new weights; each token
        keeps the log-prob and the version it was sampled with.
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """Return the version of the weights in use."""

    def close(self) -> None:
        """End the engine and its processes. A second call does nothing."""
