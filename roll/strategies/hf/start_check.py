"""Checks at the start that a model computes for padded rows what transformers computes for each row by itself.

What a row alone gives is asked of the model as it was loaded, before anything is changed for training or sampling. A
model that numbers positions by itself, a factor that a change touches, a layer that mixes rows: each shows here, in a
few tokens and once, and in every later step it would only be a ratio that isn't 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from roll.strategies.hf.cache import RowCache, forward
from roll.strategies.hf.cache_layers import layer_states
from roll.strategies.hf.hf_model import PolicyModel, picked_hidden
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out
from roll.strategies.training.pretrained import UNUSABLE, text_config
from roll.types.batch import TokenBatch

T = TypeVar("T")

_LENGTHS = (23, 5, 14)
"""Tokens of the rows, as far as the model can hold them."""
_STEPS = 3
"""Tokens of each row that come one by one, as samples do."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
"""Of the spread: above rounding; in half precision of the middle token, where one near a tie may take other experts."""


class RowsAlone:
    """A few rows, and what a model gives for each of them alone, in eval mode and without padding.

    `model` is a transformers model. The rows have at most `longest` tokens, those of the run's longest row.
    """

    @torch.no_grad()
    def __init__(self, model: Any, *, longest: int | None, temperature: float = 1.0) -> None:
        self.model, self.batch = model, _rows(model, longest)
        device = next(model.parameters()).device
        rows = [self.batch.row("token_ids", i)[None].to(device) for i in range(len(self.batch))]
        own = [usable(model, model, input_ids=ids, use_cache=False) for ids in rows]
        self.logits = [one.logits[0].float() / temperature if hasattr(one, "logits") else None for one in own]
        """Of each row [T, V]; None of a model without a head."""
        self.hidden = [None if hasattr(one, "logits") else one.last_hidden_state[0].float() for one in own]
        """Of each row [T, D]; None of a model with a head."""

    @property
    def next_logprobs(self) -> Tensor:
        """Return the log-probs of the tokens of all rows but their first ones, [N]."""
        logprobs = []
        for i, logits in enumerate(self.logits):
            assert logits is not None
            ids = self.batch.row("token_ids", i)[1:].to(logits.device)
            logprobs.append(logits[:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0])
        return torch.cat(logprobs)


@torch.no_grad()
def check_scored_rows(module: nn.Module, alone: RowsAlone, *, padded: bool, half: bool, role: str) -> None:
    """Raise `ValueError` unless a role's module scores rows as the model that it was made of does each of them alone.

    `padded`: the role pads rows at the right; else each is in a call of its own. `half`: it computes in half precision.
    """
    device = next(module.parameters()).device
    model, batch = alone.model, alone.batch
    parts = [batch] if padded else [batch.select([i]) for i in range(len(batch))]
    scores = []
    for part in parts:
        layout = lay_out(part, device)
        if isinstance(module, PolicyModel):
            scores.append(usable(model, module, layout, HeadRequest()).logprobs)
        else:
            scores.append(usable(model, picked_hidden, model, layout).float())
    if isinstance(module, PolicyModel):
        expected = alone.next_logprobs
        spread = torch.cat([_spread(logits[:-1]) for logits in alone.logits if logits is not None])
        errors = (torch.cat(scores) - expected).abs()
        what = "log-probs"
    else:
        expected = torch.cat([hidden[:-1] for hidden in alone.hidden if hidden is not None])
        errors, spread = (torch.cat(scores) - expected).norm(dim=-1), expected.norm(dim=-1)
        what = "hidden states"
    how = "rows padded at the right" if padded else "a row"
    _require_equal(
        errors, spread, half,
        f"{role}: {type(model).__name__} computes other {what} for {how} than transformers does for each row alone",
        "a change that is made for training touches what it computes, or it numbers positions by itself",
    )  # fmt: skip


@torch.no_grad()
def check_sampled_rows(alone: RowsAlone) -> None:
    """Raise `ValueError` unless rows padded at the left, in a cache that rows leave, have the logits of rows alone."""
    model, batch, steps = alone.model, alone.batch, _STEPS
    name = type(model).__name__
    lengths = batch.lengths.tolist()
    width = max(lengths)
    device = next(model.parameters()).device
    rows = [batch.row("token_ids", i) for i in range(len(lengths))]
    ids = torch.stack([torch.cat([row.new_zeros(width - len(row)), row]) for row in rows]).to(device)
    layers = layer_states(text_config(model))
    cache = RowCache(layers, torch.tensor([width - length for length in lengths], device=device))
    half = 0
    if not cache.recurrent:  # as where prompts begin alike: what follows is computed with what is in the cache
        half = (width - steps) // 2
        usable(model, forward, model, ids[:, :half], cache)
    logits_of_steps = [usable(model, forward, model, ids[:, half : width - steps], cache)]
    bare = [number for number, layer in enumerate(cache.layers) if layers[number].keys and layer.keys is None]
    if bare:
        have, their = ("has", "its") if len(bare) == 1 else ("have", "their")
        raise ValueError(
            f"hf_infer can't run {name}: {_layers(bare)} of {len(layers)} {have} no keys and values of {their} own in "
            f"the cache. {OTHER_ENGINES}"
        )
    order = list(range(len(lengths)))
    rows_of = [order]
    for step in range(1, steps):
        if step == steps - 1:  # the first row leaves, and the last one takes its place
            order = cache.keep([1, 2])
            ids = ids[order]
        rows_of.append(order)
        column = width - steps + step - 1
        logits_of_steps.append(usable(model, forward, model, ids[:, column : column + 1], cache))
    errors, spread = [], []
    for step, (logits, numbers) in enumerate(zip(logits_of_steps, rows_of, strict=True)):
        for mine, i in zip(logits.float(), numbers, strict=True):
            own = alone.logits[i]
            assert own is not None
            own = own[lengths[i] - 1 - steps + step]
            possible = ~own.isneginf()
            errors.append((mine.log_softmax(-1) - own.log_softmax(-1))[possible].abs().max())
            spread.append(own[possible].std())
    _require_equal(
        torch.stack(errors), torch.stack(spread), next(model.parameters()).dtype != torch.float32,
        f"hf_infer can't run {name}, which gives other log-probs for rows padded at the left than for each row alone",
        f"it doesn't take position ids as they are given, or its layers look at padding. {OTHER_ENGINES}",
    )  # fmt: skip


OTHER_ENGINES = (
    "Sample with vllm or sglang (actor_infer.strategy_args.strategy_name), which pad nothing, if they know this model"
)
"""The way out where `hf_infer` can't run a model."""


def usable(model: nn.Module, run: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what `run` returns; raise `ValueError`, with the class of `model`, where that can't compute it."""
    try:
        return run(*args, **options)
    except torch.OutOfMemoryError:
        raise
    except UNUSABLE as error:
        message = f"{type(error).__name__}: {error}".rstrip(": .")
        raise ValueError(f"{type(model).__name__} can't compute a few rows of tokens here ({message})") from error


def _require_equal(errors: Tensor, spread: Tensor, half: bool, what: str, why: str) -> None:
    if not bool(spread.isfinite().all()):
        return  # weights that are no numbers: whoever computes with them says so
    ratios = errors / spread.clamp(min=1e-6)
    worst = float(ratios.median() if half else ratios.max())
    if not worst <= (_HALF_TOLERANCE if half else _TOLERANCE):
        raise ValueError(f"{what} (by up to {float(errors.max()):.2g}): {why}")


def _spread(logits: Tensor) -> Tensor:
    """Return the standard deviation [T] of logits [T, V] but for tokens that the model never says."""
    return logits[:, ~logits.isneginf().any(0)].std(-1)


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _rows(model: Any, longest: int | None) -> TokenBatch:
    """Return rows of tokens that the model has and may say, none of them its padding token."""
    config = text_config(model)
    vocabulary, pad = model.get_input_embeddings().num_embeddings, getattr(config, "pad_token_id", None)
    places = [getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video")]
    avoided = {token for token in (pad, *places) if token is not None}
    limits = [limit for limit in (longest, getattr(config, "max_position_embeddings", None)) if limit]
    lengths = [max(_STEPS + 1, min(length, *limits)) if limits else length for length in _LENGTHS]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    ids = (torch.arange(total) * 7 + 3) % vocabulary
    for token in avoided:
        other = token
        while other in avoided:
            other = (other + 1) % vocabulary
        ids[ids == token] = other
    acting = torch.ones(total, dtype=torch.bool)
    acting[offsets[:-1]] = False
    names = tuple(map(str, range(len(lengths))))
    return TokenBatch(row_ids=names, group_ids=names, offsets=offsets, token_ids=ids, action_mask=acting)
