"""Low-rank adapters (LoRA, arXiv:2106.09685) of peft, put into the transformers model of a role.

peft replaces a linear layer by base(x) + scaling * B A x and keeps the class of the model. The base weights are frozen,
A and B are float32. Out come merged weights, base weights and adapters apart, a folder in peft's format, and a note on
which base model the adapters belong to, because checkpoints don't repeat its weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from roll.configs.checks.adapter_checks import CONFIG_FILE, read_adapter_config
from roll.configs.checks.machine_checks import MISSING
from roll.configs.schema.worker_config import ModelArgs
from roll.distributed.weights import WeightPart
from roll.strategies.base import NamedWeights, TrainSpec
from roll.strategies.hf.adapter_config import SCORE, AdapterConfig, adapter_config, leaves
from roll.strategies.hf.gather import Gather, Travelling, sent_types
from roll.strategies.state_files import StateFiles
from roll.strategies.training.pretrained import named_tensors
from roll.utils.seeding import stable_hash

if TYPE_CHECKING:
    from peft import LoraConfig

_NAME = "default"  # peft's name for the only set of adapters of a model
_PEFT_PREFIX = "base_model.model."  # what peft puts before every name in its files
_PEFT_RANK = 8  # of a folder that doesn't say
IDENTITY = "adapters.json"
SAMPLED = 1024  # values of each adapted layer that tell base models apart

Full = Callable[[Tensor], Tensor]
"""Perhaps sharded tensor -> the whole tensor."""


Base = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Names of adapted layers -> the base model's weights of them, or their first values (`SAMPLED` at least)."""


def add_adapters(model: nn.Module, spec: TrainSpec, base: Base | None = None) -> None:
    """Put adapters into `model`, on the CPU, and freeze everything else.

    New adapters draw A from the run's seed and the role alone and start with B = 0. `base`: where the weights are of a
    model that has none of its own. Raises `ValueError` if peft isn't there, a target is no linear layer, or the
    adapters of `adapter_name_or_path` don't fit the model or the keys.
    """
    try:
        from peft.functional import cast_adapter_dtype, inject_adapter_in_model
    except ImportError:
        raise ValueError(f"{spec.role}: {MISSING['peft']}") from None
    args = spec.worker.model_args
    config = adapter_config(model, args)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stable_hash(spec.seed, "lora", spec.role, bits=56))
        inject_adapter_in_model(_plain_config(config, args), _Layers(model), _NAME)
    model.adapter_config = config  # type: ignore[assignment]
    cast_adapter_dtype(model, _NAME)
    layers = _lora_layers(model)
    assert layers.keys() == config.sizes.keys(), set(layers) ^ set(config.sizes)
    if args.adapter_name_or_path is not None:
        _load_folder(model, layers, Path(args.adapter_name_or_path).expanduser(), base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(spec.trains and (_is_adapter(name) or name == SCORE))


class Adapters:
    """The adapters of a model that has some: off for a while, merged, written."""

    def __init__(self, model: nn.Module, args: ModelArgs, base: Base | None = None) -> None:
        self._layers = _lora_layers(model)
        self._config: AdapterConfig = model.adapter_config  # type: ignore[assignment]
        self._dropout = args.lora_dropout
        self._base = args.model_name_or_path
        self._identity: dict[str, Any] = {
            "base_model": args.model_name_or_path,
            "checksum": _checksum(self._layers, base),
            # Rank and scaling of every layer: a matrix of the same shape can stand for another product.
            "layers": {name: [layer.r[_NAME], layer.scaling[_NAME]] for name, layer in self._layers.items()},
        }
        self._dropouts = [d for layer in self._layers.values() for d in layer.lora_dropout.children()]
        for dropout in self._dropouts:
            dropout.eval()

    @property
    def layers(self) -> dict[str, Any]:
        """Name -> peft's layer, of every layer with adapters."""
        return self._layers

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its base model; for passes without gradients."""
        flags = [(p, p.requires_grad) for layer in self._layers.values() for p in layer.parameters()]

        def switch(enabled: bool) -> None:
            for layer in self._layers.values():
                layer.enable_adapters(enabled)
            # peft also freezes and thaws them, which is not what is asked, and backends look at the flags in a pass.
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

        switch(False)
        try:
            yield
        finally:
            switch(True)

    @contextlib.contextmanager
    def dropout(self, device: torch.device, *key: int | str) -> Iterator[None]:
        """Inside, inputs of the adapters are dropped with `lora_dropout`, drawn from `key` alone."""
        if self._dropout == 0.0:
            yield
            return
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(stable_hash(*key, bits=56))
            for dropout in self._dropouts:
                dropout.train()
            try:
                yield
            finally:
                for dropout in self._dropouts:
                    dropout.eval()

    def weights(self, model: nn.Module, gathered: Gather, part: WeightPart, dtype: torch.dtype | None) -> NamedWeights:
        """Yield a part of the weights; `merged` is W + scaling * B A for adapted layers, computed in float32.

        `merged` and `base` have the tensors and names of the plain model, and are cast as `sent_types` says.
        `adapters` have peft's names; B is scaled.
        """
        if part == "adapters":
            stream = gathered(each for name in self._layers for each in self._matrices(name))
            for layer in self._layers.values():
                (a_name, a), (b_name, b) = next(stream), next(stream)
                yield a_name, a.float()
                yield b_name, layer.scaling[_NAME] * b.float()
            assert next(stream, None) is None
            return
        sent = sent_types(model, dtype)
        adapted = {f"{name}.base_layer.weight": name for name in self._layers} if part == "merged" else {}
        plain = [(name, tensor) for name, tensor in named_tensors(model) if not _is_adapter(name)]

        def travelling() -> Iterator[Travelling]:
            for name, tensor in plain:
                # What adapters are added to isn't rounded before.
                yield name, tensor, None if name in adapted else sent(name, tensor)
                if name in adapted:
                    yield from self._matrices(adapted[name])

        stream = gathered(travelling())
        for name, tensor in plain:
            _, full = next(stream)
            if name in adapted:
                a, b = next(stream)[1], next(stream)[1]
                full = full.float() + self._layers[adapted[name]].scaling[_NAME] * (b.float() @ a.float())
                full = full.to(sent(name, tensor) or torch.float32)
            yield name.replace(".base_layer.", "."), full
        assert next(stream, None) is None

    def _matrices(self, name: str) -> Iterator[Travelling]:
        layer = self._layers[name]
        for matrix, weight in (("A", layer.lora_A[_NAME].weight), ("B", layer.lora_B[_NAME].weight)):
            yield peft_name(name, matrix), weight, None

    def _product_of(self, name: str, full: Full) -> tuple[Tensor, Tensor]:
        layer = self._layers[name]
        return full(layer.lora_A[_NAME].weight), full(layer.lora_B[_NAME].weight)

    def export(self, folder: Path, full: Full, *, writes: bool, files: StateFiles) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` loads onto the base model; every rank calls."""
        tensors = {}
        for name in self._layers:
            for part, tensor in zip("AB", self._product_of(name, full), strict=True):
                if writes:
                    tensors[peft_name(name, part)] = tensor.detach().to("cpu", copy=files.holds).contiguous()
        if writes:
            files.folder(folder, partial(self.write_folder, tensors))

    def write_folder(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Write a folder of peft's with these tensors under its names, B not scaled."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.write_config(folder)
        self.write_identity(folder, StateFiles())

    def write_config(self, folder: Path) -> None:
        """Write peft's description of the adapters, without their weights."""
        text = json.dumps(self._config.document(self._base), indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")

    def write_identity(self, folder: Path, files: StateFiles) -> None:
        """Say beside a checkpoint which base model and which adapters it is about."""
        files.text(folder / IDENTITY, json.dumps(self._identity, indent=1))

    def check_identity(self, folder: Path) -> None:
        """Raise `ValueError` unless the checkpoint in `folder` is about this base model and adapters like these."""
        file = folder / IDENTITY
        if not file.is_file():
            raise ValueError(f"{folder} was saved without LoRA; go on without lora_rank, or start from scratch")
        saved = json.loads(file.read_text())
        if saved["layers"] != self._identity["layers"]:
            mine, theirs = (_described(identity["layers"]) for identity in (self._identity, saved))
            raise ValueError(f"{folder} holds adapters with {theirs}; the configuration asks for {mine}")
        check_same_base(folder, saved, self._identity)

    @staticmethod
    def keeps(name: str) -> bool:
        """Return whether a checkpoint holds this parameter of the model: what trains, not the base model."""
        return _is_adapter(name) or name.startswith(("value_head.", "classifier.score."))


# --- which layers -----------------------------------------------------------------------------------------------------


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return layers with adapters by name."""
    from peft.tuners.lora import Linear

    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


class _Layers(nn.Module):
    """The modules of a model under its names, without its configuration.

    peft turns names of layers into those of fused experts by the family that a model's configuration names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, module in model.named_children():
            self.add_module(name, module)


def peft_name(layer: str, matrix: str) -> str:
    """Name in peft's files of matrix `A` or `B` of a layer."""
    return f"{_PEFT_PREFIX}{layer}.lora_{matrix}.weight"


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


# --- configuration and folders ---------------------------------------------------------------------------------------


def largest_rank(args: ModelArgs) -> int:
    """Return the largest rank of the adapters that `args` ask for; reads saved ones from their folder. 0: none."""
    if args.adapter_name_or_path is None:
        return args.lora_rank
    config = read_adapter_config(Path(args.adapter_name_or_path).expanduser())
    return max([config.get("r", _PEFT_RANK), *(config.get("rank_pattern") or {}).values()])


def _plain_config(config: AdapterConfig, args: ModelArgs) -> LoraConfig:
    """Return what peft builds them from: whole names, each with its rank and alpha."""
    from peft import LoraConfig

    # peft tries every pattern on every layer: one entry for each layer of another size than most.
    (rank, alpha), _ = Counter(config.sizes.values()).most_common(1)[0]
    other = {f"^{re.escape(name)}": size for name, size in config.sizes.items() if size != (rank, alpha)}
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=args.lora_dropout,
        target_modules=list(config.sizes),
        rank_pattern={name: size[0] for name, size in other.items()},
        alpha_pattern={name: size[1] for name, size in other.items()},
        use_rslora=config.rank_stabilized,
    )


@torch.no_grad()
def _load_folder(model: nn.Module, layers: dict[str, Any], folder: Path, base: Base | None) -> None:
    from peft import load_peft_weights

    identity = folder / IDENTITY
    if identity.is_file():
        check_same_base(
            folder, json.loads(identity.read_text()), {"checksum": _checksum(layers, base), "base_model": None}
        )
    own = {name.replace(f".{_NAME}.", "."): p for name, p in model.named_parameters() if _is_adapter(name)}
    saved = {name.removeprefix(_PEFT_PREFIX): t for name, t in load_peft_weights(str(folder), device="cpu").items()}
    odd = sorted(own.keys() ^ saved.keys())
    odd += [name for name in own if name in saved and own[name].shape != saved[name].shape]
    if odd:
        raise ValueError(
            f"adapter_name_or_path: the adapters in {folder} belong to another base model than {type(model).__name__}: "
            f"{len(odd)} tensors are missing, unknown or of another shape, e.g. {odd[0]}"
        )
    for name, parameter in own.items():
        parameter.copy_(saved[name])


def _checksum(layers: dict[str, Any], base: Base | None) -> str:
    if base is not None:
        return layer_checksum(base(list(layers)))
    return layer_checksum({name: layer.base_layer.weight for name, layer in layers.items()})


def layer_checksum(weights: Mapping[str, Tensor]) -> str:
    """Return a sum of a few values of every adapted layer, in bfloat16 so that their own type doesn't matter."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in weights.items():
        values = weight.detach().flatten()[:SAMPLED].to(torch.bfloat16).cpu()
        digest.update(name.encode() + values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def check_same_base(folder: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise `ValueError` unless the adapters in `folder` were trained on this base model."""
    if saved["checksum"] != mine["checksum"]:
        raise ValueError(
            f"{folder} holds adapters of another base model: they were trained on {saved['base_model']}"
            + (f", and this is {mine['base_model']}" if mine["base_model"] else "")
            + ". Name that model, or one with the same weights and adapted layers"
        )


def _described(layers: dict[str, list[float]]) -> str:
    kinds = sorted({(rank, scaling) for rank, scaling in layers.values()})
    sizes = ", ".join(f"rank {rank:g} and alpha {rank * scaling:g}" for rank, scaling in kinds)
    return f"{sizes} on {len(layers)} layers ({', '.join(leaves(layers))})"
