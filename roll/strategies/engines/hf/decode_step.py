"""One decode step of a model of Llama's shape, without its modules.

Between two operators of a decode step transformers runs a lot of Python. With a small model, or with the few rows that
are left at the end of long responses, that takes longer than the operators. Here they are called directly. A check at
the start compares the logits; a model that isn't known, or that fails the check, decodes through transformers.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll.configs.catalog.family_table import FAMILIES, family_of
from roll.strategies.engines.hf.shared_heads import attends_by_sdpa
from roll.strategies.hf.cache import RowCache, forward
from roll.strategies.hf.cache_layers import LayerStates
from roll.utils.importing import load_object

logger = logging.getLogger(__name__)

_FIXED_FREQUENCIES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies don't depend on how long the rows are."""


class _OtherModel(Exception):
    """The model has something that these steps don't know."""


class _Norm:
    """RMSNorm of [..., E]."""

    def __init__(self, module: Any) -> None:
        self._weight: Tensor = module.weight
        # As tensors of their type: a Python number is made into one at every call.
        self._inverse_size, self._epsilon = torch.tensor([1 / len(self._weight), module.variance_epsilon])

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = (wide * wide).sum(-1, keepdim=True).mul_(self._inverse_size).add_(self._epsilon).rsqrt_()
        return (wide * scale).to(hidden.dtype).mul_(self._weight)


class _Linear:
    """A linear layer of [B, E]."""

    def __init__(self, module: Any) -> None:
        if type(module) is not nn.Linear:
            raise _OtherModel(f"{type(module).__name__} in place of a linear layer")
        self._transposed, self._bias = module.weight.detach().t(), module.bias
        self.size: int = module.out_features

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._bias is None:
            return torch.mm(hidden, self._transposed)
        return torch.addmm(self._bias, hidden, self._transposed)

    def added(self, to: Tensor, hidden: Tensor) -> Tensor:
        """Return `to` + this layer of `hidden`."""
        return torch.addmm(to if self._bias is None else to + self._bias, hidden, self._transposed)


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share."""

    cos: Tensor
    """[B, 1, 1, D]"""
    sin: Tensor
    """[B, 1, 1, D], the first half with its sign turned."""
    mask: Tensor | None
    large: AbstractContextManager[object]


class _Layer:
    """A decoder layer, of hidden states [B, E]."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._input_norm, self._mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._q, self._k, self._v, self._o = (_Linear(getattr(attention, f"{name}_proj")) for name in "qkvo")
        self._gate, self._up, self._down = (_Linear(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down"))
        normed = hasattr(attention, "q_norm")
        self._q_norm = _Norm(attention.q_norm) if normed else None
        self._k_norm = _Norm(attention.k_norm) if normed else None
        self._heads = [self._q.size // self._head_dim, self._k.size // self._head_dim]

    def __call__(self, hidden: Tensor, step: _Step, cache: Any) -> Tensor:
        rows, size = len(hidden), self._head_dim
        normed = self._input_norm(hidden)
        query, key = self._q(normed), self._k(normed)
        if self._q_norm is not None and self._k_norm is not None:
            query = self._q_norm(query.view(rows, -1, size)).view(rows, -1)
            key = self._k_norm(key.view(rows, -1, size)).view(rows, -1)
        both = torch.cat([query, key], dim=1).view(rows, -1, 1, size)
        query, key = _rotated(both, step.cos, step.sin).split(self._heads, dim=1)
        keys, values = cache.update(key, self._v(normed).view(rows, -1, 1, size))
        with step.large:
            attended = _attended(query, keys, values, step.mask, self._scaling)
            hidden = self._o.added(hidden, attended.reshape(rows, -1))
        normed = self._mlp_norm(hidden)
        with step.large:
            return self._down.added(hidden, F.silu(self._gate(normed), inplace=True).mul_(self._up(normed)))


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [B, H, 1, D] rotated."""
    return (states * cos).add_(states.roll(states.shape[-1] // 2, -1).mul_(sin))


def _attended(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return attention of one query per row [B, H, 1, D] over `keys` and `values` [B, K, S, D], K a divisor of H."""
    rows, shared, length, size = keys.shape
    if query.dtype != torch.float32:  # products of half precision would round the scores
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != shared
        )
    # With one query, torch's kernel multiplies each head by itself; batched products take two thirds of its time.
    queries = query.reshape(rows * shared, -1, size)
    scores = torch.baddbmm(queries[:, :, :1], queries, keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale)
    if mask is not None:
        scores.view(rows, -1, length).masked_fill_(~mask[:, 0], -torch.inf)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1))


class DecodeStep:
    """Computes the logits after one more token per row. The weights are the model's own, so updates reach it."""

    def __init__(self, model: Any) -> None:
        config, decoder = model.config, model.model
        if config.hidden_act != "silu":
            raise _OtherModel(f"activation {config.hidden_act}")
        if set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or _window(config):
            raise _OtherModel("a sliding window")
        rotary = decoder.rotary_emb
        if rotary.rope_type not in _FIXED_FREQUENCIES:
            raise _OtherModel(f"rotary embeddings of type {rotary.rope_type}")
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._frequencies: Tensor = rotary.inv_freq.float()
        self._scaling: float = rotary.attention_scaling
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self._norm, self._head = _Norm(decoder.norm), _Linear(model.lm_head)

    @staticmethod
    def of(model: nn.Module, tried: nn.Module | None = None) -> DecodeStep | None:
        """Return the steps of this model, or None if it must take them itself, as is seen on `tried` if that is given:
        a smaller model that computes alike."""
        try:
            steps = _steps_of(model)
            step = steps(model)
            _check(steps(tried) if tried is not None else step, tried or model)
        except (_OtherModel, AttributeError, RuntimeError) as error:  # the latter for other shapes
            logger.info("hf_infer decodes %s through transformers: %s", type(model).__name__, error)
            return None
        return step

    def __call__(self, tokens: Tensor, cache: RowCache, large: AbstractContextManager[object]) -> Tensor:
        """Return logits [B, V] after `tokens` int64 [B], which the cache keeps; `large` goes around large operators."""
        hidden = F.embedding(tokens, self._embedding)
        cos, sin = self._rotation(cache.length - cache.padding, hidden.dtype)
        step = _Step(cos, sin, cache.seen(extra=1), large)
        for layer, layer_cache in zip(self._layers, cache.layers, strict=True):
            hidden = layer(hidden, step, layer_cache)
        hidden = self._norm(hidden)
        with large:
            return self._head(hidden)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None, None].float() * self._frequencies
        cos, sin = angles.cos().mul_(self._scaling), angles.sin().mul_(self._scaling)
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def _window(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _steps_of(model: Any) -> type[DecodeStep]:
    """Return the class that computes this model's steps; raise `_OtherModel` if there is none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind = model.config.model_type
    path = family_of(kind).decode_step
    # A class of the same name from elsewhere may compute anything.
    if path is None or type(model) is not getattr(transformers, CLASSES.get(kind, ""), None):
        known = sorted(name for name, family in FAMILIES.items() if family.decode_step)
        raise _OtherModel(f"not one of {', '.join(known)}")
    if not attends_by_sdpa(model):
        raise _OtherModel(f"attention by {model.config._attn_implementation}")
    if next(model.parameters()).device.type != "cpu":
        raise _OtherModel("it isn't on a CPU")
    steps: type[DecodeStep] = load_object(path)
    return steps


@torch.inference_mode()
def _check(step: DecodeStep, model: Any) -> None:
    """Raise `_OtherModel` unless two steps give transformers' own logits, of whole rows and of padded ones."""
    vocabulary, half = model.config.vocab_size, next(model.parameters()).dtype != torch.float32
    for lengths in ((4, 4), (2, 7, 3)):
        width = max(lengths)
        padding = torch.tensor([width - length for length in lengths])
        ids = (torch.arange(len(lengths) * width).view(-1, width) * 7 + 3) % vocabulary
        tokens = torch.stack([(ids[:, -1] * 5 + shift) % vocabulary for shift in (1, 2)], dim=1)
        cache = RowCache([LayerStates()] * len(model.model.layers), padding)
        # One pass over the rows with both tokens: what it leaves behind them is written anew by the steps.
        whole = forward(model, torch.cat([ids, tokens], dim=1), cache, keep=2).float()
        cache.shorten(2)
        for number in range(2):
            expected = whole[:, number]
            logits = step(tokens[:, number], cache, contextlib.nullcontext()).float()
            difference, spread = float((logits - expected).abs().max()), float(expected.max() - expected.min())
            if not difference <= (0.02 if half else 1e-4) * spread:
                raise _OtherModel(f"its logits differ by {difference:.2g}, where they spread over {spread:.2g}")
