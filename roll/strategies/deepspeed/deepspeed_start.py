"""From the module of a role to weights where ZeRO wants them: whole, or this rank's share.

Weights that come from safetensors files are read after an empty module was sharded, each rank its share. Stages 0 to 2
hold the whole model anyway, and read it once, in the type that computes. What is in no file (adapters, a value head),
and models that transformers has to load, are cut as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from roll.strategies.deepspeed.state import set_share, share_of
from roll.strategies.hf.hf_build import RoleModule, hf_module
from roll.strategies.hf.streamed import StreamedWeights


def exact_weights(parameters: Iterable[nn.Parameter], computed: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Return copies of trained weights that lose something in the type that computes.

    ZeRO makes its float32 weights from the rounded ones. Weights that were published in bf16 cost nothing here.
    """
    trained = [p for p in parameters if p.requires_grad]
    return {p: p.detach().cpu().clone() for p in trained if not torch.equal(p.detach().to(computed).to(p.dtype), p)}


def make_room(model: RoleModule, weights: StreamedWeights, dtype: torch.dtype, device: torch.device) -> None:
    """Let the weights that are still to be read have this type and place, and nothing in them; move the others there.

    Memory of the host that wasn't written to costs nothing.
    """
    for _, tensor in weights.waiting(hf_module(model)):
        if isinstance(tensor, nn.Parameter):
            tensor.data = torch.empty(tensor.shape, dtype=dtype, device=device)
    model.to(device)


def shard_weights(
    module: nn.Module, made: dict[str, Any], computed: torch.dtype, device: torch.device, empty: Iterable[Tensor]
) -> None:
    """Cut the weights of a module on the CPU for ZeRO 3, one at a time: no device ever holds them all.

    Of the `empty` ones, which nobody has written to, nothing is sent.
    """
    import deepspeed

    waiting = {id(tensor) for tensor in empty}

    class Init(deepspeed.zero.Init):  # type: ignore[misc]
        def _zero_init_param(self, param: Any) -> None:
            if id(param) not in waiting:
                super()._zero_init_param(param)  # cuts what rank 0 has
                return
            self._convert_to_deepspeed_param(param)
            param.partition()

    for parameter in module.parameters():
        if id(parameter) not in waiting:
            parameter.data = parameter.data.to(computed)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    Init(module=module, config_dict_or_path=made, dtype=computed)


def fill_shares(model: RoleModule, weights: StreamedWeights) -> None:
    """Read this rank's share of what `shard_weights` has cut."""

    def parts(tensor: Any) -> Iterable[tuple[Tensor, int]]:
        if not hasattr(tensor, "ds_id"):
            return [(tensor, 0)]  # a buffer, whole on every rank
        start, size = share_of(tensor)
        tensor.ds_tensor[size:].zero_()
        return [(tensor.ds_tensor[:size], start)]

    weights.fill(hf_module(model), parts)


@torch.no_grad()
def fill_exact(model: RoleModule, weights: StreamedWeights, computed: torch.dtype) -> None:
    """Read again, as this rank's share of the float32 weights, what the type that computes has rounded."""
    for name, tensor in weights.waiting(hf_module(model)):
        if not tensor.requires_grad or not weights.rounded(name, computed):
            continue
        parameter: Any = tensor
        if hasattr(parameter, "ds_id"):
            start, size = share_of(parameter)
            share = torch.zeros(parameter.ds_tensor.numel())
            weights.read(name, share[:size], start)
            set_share(parameter, share)
        elif parameter._hp_mapping is not None:
            mapping = parameter._hp_mapping
            weights.read(name, mapping.hp_fragment, mapping.lp_fragment_address.start)
