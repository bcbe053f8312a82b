"""Rotary embeddings whose frequencies depend on the longest row of a call: one set of them for a whole run.

transformers computes `longrope` with one set of factors up to the length that a model was first trained on and with
another one beyond, `dynamic` with another base for each length beyond it, and looks at the longest row of each call. A
row would be scored by what it shares a micro-batch with, and a response that passes that length sampled from keys of
the old factors, which no pass over the whole row gives.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from roll.strategies.training.pretrained import context_length, text_config

logger = logging.getLogger(__name__)

_TRIED = 8
"""Positions at which the frequencies of short and long rows are compared."""


@torch.no_grad()
def fix_rotations(model: nn.Module, longest: int | None) -> None:
    """Let a transformers model compute every row as it does rows of `longest` tokens; None: the longest it can hold.

    Its configuration stays as it is. Raises `ValueError` for a model that goes on looking at the rows of each call.
    """
    for module, kinds in _rotary_modules(model):
        moving = [kind for kind in kinds.values() if "longrope" in kind or "dynamic" in kind]
        if not moving:
            continue
        longest = context_length(model) if longest is None else longest
        short = min(_TRIED, longest) - 1
        expected = {layer: _angles(module, layer, short, longest - 1) for layer in kinds}  # which sets the frequencies
        module.rope_type = "default" if None in kinds else dict.fromkeys(kinds, "default")
        for layer, before in expected.items():
            if any(not torch.equal(_angles(module, layer, short, last), before) for last in (short, longest - 1)):
                why = "computes a row otherwise when a longer one is in the same call"
                raise ValueError(_cannot(model, module, moving[0], longest, why))
            if kinds[layer] == "longrope" and not _has_factors(module, layer, before, longest):
                why = "doesn't use the factors of its configuration for rows of this length, as other engines do"
                raise ValueError(_cannot(model, module, moving[0], longest, why))
        limit = original_length(text_config(model))
        if limit is not None and longest > limit:
            logger.info(
                "%s computes every row with its factors for rows of more than %d tokens, because rows of this run may "
                "have %d",
                type(model).__name__,
                limit,
                longest,
            )


def original_length(config: Any) -> int | None:
    """Return the tokens up to which a model has its other factors; None: it has one set."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    lengths = [one.get("original_max_position_embeddings") for one in each if one.get("rope_type") == "longrope"]
    return min((length for length in lengths if length is not None), default=None)


def _rotary_modules(model: nn.Module) -> Iterator[tuple[Any, dict[str | None, str]]]:
    """Yield each rotary embedding that says of what type it is, one per kind of layer or one for all (None)."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind is None or "position_ids" not in inspect.signature(module.forward).parameters:
            continue
        yield module, dict(kind) if isinstance(kind, dict) else {None: kind}


def _angles(module: Any, layer: str | None, first: int, last: int) -> Tensor:
    """Return the embedding of the `first` positions in a call that has `last`, too."""
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    positions = torch.tensor([[*range(first), last]], device=device)
    options = {} if layer is None else {"layer_type": layer}
    rotation = module(torch.zeros(1, device=device), positions, **options)
    cos, sin = (rotation.real, rotation.imag) if isinstance(rotation, Tensor) else rotation
    return torch.cat([cos, sin])[:, :first].clone()


def _has_factors(module: Any, layer: str | None, angles: Tensor, longest: int) -> bool:
    """Return whether [cos, sin] of the first positions have the frequencies of the configuration at a row's length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if angles.shape[1] < 2:
        return True
    options = {} if layer is None else {"layer_type": layer}
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, angles.device, seq_len=longest, **options)
    cos, sin = angles[:, 1]  # of position 1, whose angles are the frequencies, each once or twice in whatever order
    computed = torch.atan2(sin, cos).sort().values[:: max(1, len(cos) // len(frequencies))]
    return torch.allclose(computed, frequencies.float().sort().values, rtol=1e-4, atol=1e-6)


def _cannot(model: nn.Module, module: nn.Module, kind: str, longest: int, why: str) -> str:
    limit = original_length(text_config(model))
    fix = f"; rows of at most {limit} tokens can be trained: write sequence_length: {limit}" if limit else ""
    return (
        f"{type(model).__name__} can't be used with rows of {longest} tokens: its {type(module).__name__} (rope type "
        f"{kind}) {why}, so that what is sampled isn't what is trained{fix}"
    )
