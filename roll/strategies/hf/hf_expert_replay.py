"""Router replay (arXiv:2510.11370): tokens go to the experts that the engine sent them to.

A router's scores are the model's own, and have their gradients; only the choice is the engine's. In Hugging Face models
a router's `topk` gives it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_ROUTER = "topkrouter"
"""End of the names of transformers' routers, in small letters."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

NO_ROUTERS = "router_replay: the model has no routers of transformers' kind; remove it, or train with Megatron"


def replayed(scores: Tensor, own: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scores [N, K] of the experts that count, int64 [N, K] these) for scores [N, E].

    `own` int64 [N, K] are the router's choice, `recorded` [N, K] the engine's, -1 where it isn't known.
    """
    chosen = torch.where(recorded >= 0, recorded, own)
    return scores.gather(-1, chosen), chosen


class HfExpertReplay:
    """What the routers of a model are told."""

    @classmethod
    def of(cls, decoder: nn.Module) -> HfExpertReplay | None:
        """Return that of a model; None: it has no routers which could follow."""
        routers = {n: m for n, m in decoder.named_modules() if type(m).__name__.lower().endswith(_ROUTER)}
        return cls(routers) if routers else None

    def __init__(self, routers: Mapping[str, nn.Module]) -> None:
        self._experts: Tensor | None = None  # [tokens, L, K]
        for name, router in routers.items():
            match = _LAYER.search(name)
            assert match is not None, f"a router outside of layers: {name}"
            router.forward = self._told(router.forward, int(match[1]))

    def tell(self, experts: Tensor | None) -> None:
        """Set int16 [B, T, L, K] of the micro-batch that the model runs next, see `MicroLayout.experts`."""
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
