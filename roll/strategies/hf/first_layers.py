"""Small models that compute as large ones do: of few layers, at least one of each kind, and few tokens.

What the start proves of a model (that padding, packing, a cache and what training changes leave its numbers alone) is
proved on one of these where that is enough: where weights come in later, and for families that the project's own tests
run with every engine and trainer. A whole model would be read from its file and computed a dozen times over.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roll.configs.catalog.family_table import family_of
from roll.strategies.training.pretrained import text_config

_LAYERS = 2
_VOCABULARY = 256


def small_config(config: Any) -> Any:
    """Return the configuration of a model with the first layers, up to one of every kind, and a small vocabulary."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = None  # an embedding needs it to be one of its rows
    try:
        layers = text.num_hidden_layers
        text.num_hidden_layers = layers
    except NotImplementedError:  # ProphetNet has two numbers
        return config
    tower = getattr(config, "vision_config", None)
    if family_of(config.model_type).pictures is not None and tower is not None:
        tower.depth = 1  # nothing is proved of it
        if getattr(tower, "deepstack_visual_indexes", None):
            tower.deepstack_visual_indexes = [0]
    by_layer = {
        name: value for name, value in vars(text).items() if isinstance(value, list | tuple) and len(value) == layers
    }
    kinds = [tuple(map(str, kind)) for kind in zip(*by_layer.values(), strict=True)] or [() for _ in range(layers)]
    text.num_hidden_layers = min(layers, max(_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))))
    for name, value in by_layer.items():
        setattr(text, name, value[: text.num_hidden_layers])
    return config


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules are built without memory for parameters; buffers are computed as ever."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def first_layers(model: Any) -> Any:
    """Return a transformers model of the first layers of `model`, with its weights, in eval mode; or `model` itself.

    So it is for families that aren't tested with every engine and trainer, for code of a folder's own, and where the
    weights of fewer layers and tokens aren't some of its weights.
    """
    config = text_config(model)
    if not type(model).__module__.startswith("transformers.models.") or not family_of(config.model_type).tested:
        return model
    if getattr(model.config, "quantization_config", None) is not None:
        return model
    with parameters_on_meta():
        small: Any = type(model)._from_config(small_config(model.config), dtype=model.dtype)
    weights = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    shared: dict[int, nn.Parameter] = {}  # of tied weights, which are tied in the small model too
    for path, module in small.named_modules():
        for name, parameter in list(module._parameters.items()):
            weight = weights.get(f"{path}.{name}".lstrip("."))
            if parameter is None:
                continue
            if weight is None or weight.shape[1:] != parameter.shape[1:] or len(weight) < len(parameter):
                return model
            if id(weight) not in shared:
                shared[id(weight)] = nn.Parameter(weight.detach()[: len(parameter)], requires_grad=False)
            module._parameters[name] = shared[id(weight)]
    for name, buffer in small.named_buffers():
        if name not in buffers or buffers[name].shape != buffer.shape:
            return model
        buffer.data = buffers[name].clone()
    return small.eval()
