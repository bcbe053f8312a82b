"""Inside vLLM's worker processes: the weight transfer engine `host`, which reads buckets of shared memory.

vLLM imports this module there because `WorkerExtension` is its `worker_extension_cls`; importing it registers the
engine, and ties the process to the one that it works for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from roll.distributed.transports.bucket_layout import Entry
from roll.strategies.buckets import BucketReader, open_device
from roll.strategies.engine_processes import end_with_owner

BACKEND = "host"


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

        before = dict(self.model.named_parameters(remove_duplicate=False))
        initialize_layerwise_reload(self.model)
        # Kernels may have renamed parameters; only those that are loaded under their own names can be followed.
        self._missing = {_plain(name) for name, _ in self.model.named_parameters() if name in before}
        self._tied = _tied_names(before)
        self._reader = BucketReader()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        # vLLM keeps what it is given until all weights of a layer are there: a copy of what won't be there so long.
        stays = update_info.in_place
        found = self._reader.read(update_info.path, update_info.entries, stays=stays)
        tensors = [(name, tensor if stays else tensor.to(self.device, copy=True)) for name, tensor in found]
        # Models give back the names of the parameters that they filled, or nothing.
        load: Any = self.model.load_weights
        loaded = load(tensors)
        self._missing -= self._missing if loaded is None else loaded
        for name, tensor in tensors:
            for other in self._tied.get(name, ()):
                self._load_tied(other, tensor)

    def _load_tied(self, name: str, tensor: torch.Tensor) -> None:
        """Load a parameter that shares its weights with another one.

        Models leave these out, because filling one fills the other. Not where kernels keep packed copies of their own,
        as the head does on a CPU: it would stay at the old weights.
        """
        parameter = self.model.get_parameter(name)
        loader: Any = getattr(parameter, "weight_loader", None)
        if loader is None:
            raise RuntimeError(f"vLLM's parameter {name!r} is tied to another one and has no weight_loader")
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
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: nothing is held between updates."""


def _tied_names(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, list[str]]:
    """First name of a parameter that has several, as it is loaded -> the other names, as they are."""
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        if id(parameter) in first:
            tied.setdefault(_plain(first[id(parameter)]), []).append(name)
        else:
            first[id(parameter)] = name
    return tied


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
