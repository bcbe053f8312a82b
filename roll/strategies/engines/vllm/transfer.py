"""Inside vLLM's worker processes: the weight transfer engine `host`, which reads buckets of shared memory.

vLLM imports this module there because `WorkerExtension` is its `worker_extension_cls`; importing it registers the
engine, and ties the process to the one that it works for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from roll.configs.catalog.family_table import FAMILIES
from roll.distributed.transports.bucket_layout import Entry
from roll.strategies.engines.buckets import BucketReader, open_device
from roll.strategies.engines.engine_processes import end_with_owner

BACKEND = "host"

_COPYING_LOADERS = {family.vllm_copying_loader for family in FAMILIES.values()}


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    path: str = ""
    """Where to open it."""
    entries: list[Entry] = field(default_factory=list)
    """What is in it."""
    in_place: bool = False
    """Whether it stays as it is until the update is over, and is loaded from without a copy."""


class HostWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, HostUpdateInfo]):
    """Loads buckets of tensors under checkpoint names, layer by layer as vLLM's own engines do."""

    init_info_cls = WeightTransferInitInfo  # nothing has to be agreed on before
    update_info_cls = HostUpdateInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        del init_info

    def start_weight_update(self) -> None:
        """Put the layers back into the form that weights are loaded into; kernels may have packed them."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        before = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self._tied = _tied_names(self.model)
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        if type(self.model).__name__ in _COPYING_LOADERS:
            _make_room(self.model)
        # Kernels may have renamed parameters; only those that are loaded under their own names can be followed.
        self._expected = [name for name, _ in self.model.named_parameters() if name in before]
        self._missing = {_plain(name) for name in self._expected}
        self._reader = BucketReader()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        # vLLM keeps what it is given until all weights of a layer are there: a copy of what won't be there so long.
        stays = update_info.in_place
        weights = self._reader.read(update_info.path, update_info.entries, stays=stays)
        tensors = [(name, tensor if stays else tensor.to(self.device, copy=True)) for name, tensor in weights]
        # Models give back the names of the parameters that they filled, or nothing.
        load: Any = self.model.load_weights
        loaded = load(tensors)
        self._missing -= self._missing if loaded is None else loaded
        for name, tensor in tensors:
            for other in self._tied.get(_in_memory(self.model, name), ()):
                self._load_tied(other, tensor)

    def _load_tied(self, name: str, tensor: torch.Tensor) -> None:
        """Load a parameter that shares its weights with another one.

        Models leave these out, because filling one fills the other. Not where kernels keep packed copies of their own,
        as the head does on a CPU: it would stay at the old weights.
        """
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameter = self.model.get_parameter(name)
        loader: Any = getattr(parameter, "weight_loader", default_weight_loader)
        loader(parameter, tensor)
        self._missing.discard(_plain(name))

    def finish_weight_update(self) -> None:
        """Pack the last layers; raise `ValueError` if a parameter of the model got nothing."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        del self._reader
        if self._missing:
            raise ValueError(
                f"weight update left {len(self._missing)} of vLLM's parameters untouched, e.g. "
                f"{sorted(self._missing)[:3]}"
            )
        lost = _count_written(self.model, self._expected)
        if lost:
            raise ValueError(
                f"vLLM's loader of {type(self.model).__name__} lost {len(lost)} parameters of the weight update, e.g. "
                f"{lost[:3]}: it writes past the layers, which would stay at the old weights. Use sglang or hf_infer "
                "for this model"
            )
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: nothing is held between updates."""


def _in_memory(model: Any, name: str) -> str:
    """Return the name of the parameter that a model loads a tensor into; picture models have others than files."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return next(iter(mapper.apply_list([name])), name) if mapper is not None else name


def _tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the first name of a parameter that several layers have, as it is loaded -> the other names, as they are.

    A layer that itself has several names, as the router of an expert layer does, is loaded once and isn't meant.
    """
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for path, layer in model.named_modules():
        for last, parameter in layer.named_parameters(recurse=False):
            name = f"{path}.{last}" if path else last
            if id(parameter) in first:
                tied.setdefault(_plain(first[id(parameter)]), []).append(name)
            else:
                first[id(parameter)] = name
    return tied


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Let every expert layer make its kernel anew from the weights that come, as it does when the model is loaded.

    vLLM 0.32 takes a layer that has one to need no more than a copy of its weights. On a CPU the kernel's weights are
    padded and packed by a step that is then left out: it would compute with unpacked ones.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _make_room(model: torch.nn.Module) -> None:
    """Give every parameter memory now, and not when its layer is complete."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    for layer in model.modules():
        materialize_layer(layer, get_layerwise_info(layer))


def _count_written(model: torch.nn.Module, expected: Iterable[str]) -> list[str]:
    """Return the parameters that were written to while they had no memory; have layers processed that a model's loader
    has written to by itself, which vLLM counts as not loaded and would put back as they were."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    lost = []
    for name in expected:
        path, _, last = name.rpartition(".")
        layer = model.get_submodule(path)
        info = get_layerwise_info(layer)
        if not info.can_load() or any(last == loaded for loaded, _ in info.loaded_weights):
            continue
        if getattr(layer, last).is_meta:
            lost.append(name)
        elif info.load_numel <= 0 < (info.load_numel_total or 0) - 1:
            info.load_numel = 1
    return lost


def _plain(name: str) -> str:
    """Return the name by which a model loads a parameter: layers that hold adapters keep it one level further down."""
    return name.replace(".base_layer.", ".")


class WorkerExtension:
    """Methods that vLLM's workers get; callable with `collective_rpc`."""

    def free_device_memory(self) -> int:
        """Return bytes free on this worker's device; 0 on the CPU, where nothing is ever given back."""
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0

    def opens(self, path: str) -> bool:
        """Return whether this worker can read the owner's memory on an accelerator."""
        return open_device(path)


WeightTransferEngineFactory.register_engine(BACKEND, HostWeightTransferEngine)
end_with_owner()
