"""Router replay in Hugging Face models: a router's `topk` gives the engine's choice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.strategies.training.expert_replay import replayed

_ROUTER = "topkrouter"
"""End of the names of transformers' routers, in small letters."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class HfExpertReplay:
    """What the routers of a model are told."""

    def __init__(self, decoder: nn.Module) -> None:
        routers = {n: m for n, m in decoder.named_modules() if type(m).__name__.lower().endswith(_ROUTER)}
        self._any = bool(routers)
        self._experts: Tensor | None = None  # [tokens, L, K]
        for name, router in routers.items():
            match = _LAYER.search(name)
            assert match is not None, f"a router outside of layers: {name}"
            router.forward = self._told(router.forward, int(match[1]))

    def tell(self, experts: Tensor | None) -> None:
        """Set int16 [B, T, L, K] of the micro-batch that the model runs next, see `MicroLayout.experts`.

        Raises `ValueError` for a model that has no routers which could follow.
        """
        if experts is not None and not self._any:
            raise ValueError(
                "router_replay: the model has no routers of transformers' kind; remove it, or train with Megatron"
            )
        self._experts = None if experts is None else experts.flatten(0, 1)

    def _told(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def replaying(*args: Any, **kwargs: Any) -> Any:
            if self._experts is None:
                return forward(*args, **kwargs)
            with _Choice(self._experts[:, index]) as choice:
                result = forward(*args, **kwargs)
            if choice.calls != 1:
                raise ValueError(
                    f"router_replay: a router of this model calls topk {choice.calls} times, and only one that does so "
                    "once can take the engine's experts. Set router_replay: false, or train with Megatron"
                )
            return result

        return replaying


class _Choice(TorchFunctionMode):
    """Calls of `topk` give the experts told."""

    def __init__(self, recorded: Tensor) -> None:
        super().__init__()
        self.told, self.calls = recorded, 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        self.calls += 1
        return replayed(args[0], result[1], self.told)
