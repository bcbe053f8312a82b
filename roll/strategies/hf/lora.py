"""Low-rank adapters (LoRA, arXiv:2106.09685) of peft, put into the transformers model of a role.

peft replaces a linear layer by base(x) + scaling * B A x and keeps the class of the model. The base weights are frozen,
A and B are float32. Out come merged weights, base weights and adapters apart, a folder in peft's format, and a note on
which base model the adapters belong to, because checkpoints don't repeat its weights.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from roll.configs.checks.machine import MISSING
from roll.configs.schema.worker_config import ALL_LINEAR, ModelArgs
from roll.distributed.weights import WeightPart
from roll.strategies.base import NamedWeights, TrainSpec
from roll.strategies.hf.gather import Gather, Travelling, sent_types
from roll.strategies.hf.hf_model import named_tensors
from roll.strategies.state_files import StateFiles
from roll.utils.seeding import stable_hash

if TYPE_CHECKING:
    from peft import LoraConfig

_NAME = "default"  # peft's name for the only set of adapters of a model
_PEFT_PREFIX = "base_model.model."  # what peft puts before every name in its files
_DEFAULT_ALPHA = 16.0
IDENTITY = "adapters.json"
_SCORE = "score.weight"  # the head of a reward model: it has no adapters, it trains
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
    wanted = _chosen_layers(model, args.lora_target)
    folder = Path(args.adapter_name_or_path).expanduser() if args.adapter_name_or_path is not None else None
    config = _new_config(model, args, wanted) if folder is None else _saved_config(args, folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stable_hash(spec.seed, "lora", spec.role, bits=56))
        try:
            inject_adapter_in_model(config, model, _NAME)
        except ValueError as error:  # peft's, for layers that the model doesn't have or that can't be adapted
            raise ValueError(f"adapter_name_or_path: {folder} doesn't fit {type(model).__name__}: {error}") from None
    cast_adapter_dtype(model, _NAME)
    layers = _lora_layers(model)
    if folder is not None:
        if args.lora_target and set(layers) != set(wanted):
            own = _leaves(layers)
            raise ValueError(f"lora_target: {folder} adapts other layers, {', '.join(own)}; remove lora_target")
        _load_folder(model, layers, folder, base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(spec.trains and (_is_adapter(name) or name == _SCORE))


class Adapters:
    """The adapters of a model that has some: off for a while, merged, written."""

    def __init__(self, model: nn.Module, args: ModelArgs, base: Base | None = None) -> None:
        self._layers = _lora_layers(model)
        self._config: LoraConfig = model.peft_config[_NAME]  # type: ignore[assignment, index]
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
        if self._config.lora_dropout == 0.0:
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
        """Return a part of the weights; `merged` is W + scaling * B A for adapted layers, computed in float32.

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
            _, whole = next(stream)
            if name in adapted:
                a, b = next(stream)[1], next(stream)[1]
                whole = whole.float() + self._layers[adapted[name]].scaling[_NAME] * (b.float() @ a.float())
                whole = whole.to(sent(name, tensor) or torch.float32)
            yield name.replace(".base_layer.", "."), whole
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
        config = copy.copy(self._config)
        config.base_model_name_or_path, config.inference_mode = self._base, True
        # A set would be written in an order that changes from process to process.
        config.target_modules = sorted(config.target_modules or ())
        config.save_pretrained(str(folder))

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
        """Whether a checkpoint holds this parameter of the model: what trains, not the base model."""
        return _is_adapter(name) or name.startswith(("value_head.", "classifier.score."))


# --- which layers -----------------------------------------------------------------------------------------------------


def _linear_layers(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, module in linear if module is not head and f"{name}.weight" != _SCORE]


def _chosen_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the layers that `lora_target` means: a target is a name, or what a name ends with after a dot."""
    layers = _linear_layers(model)
    if not targets or tuple(targets) == (ALL_LINEAR,):
        targets = _leaves(layers)
    chosen = set()
    for target in targets:
        matches = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matches:
            fused = any(parameter.dim() == 3 for parameter in model.parameters())
            note = "; fused experts are one 3-D parameter, not linear layers" if fused else ""
            raise ValueError(
                f"lora_target: {type(model).__name__} has no linear layer {target!r} that can be adapted; expected "
                f"{ALL_LINEAR} or some of {', '.join(_leaves(layers))}{note}"
            )
        chosen.update(matches)
    return [name for name in layers if name in chosen]


def _leaves(names: Sequence[str] | dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters by name. Raises `ValueError` for any kind that can't be merged as W + scaling * B A."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, Any] = {}
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if not isinstance(module, Linear) or module is head or not _is_plain(module):
            raise ValueError(
                f"adapters of {name} ({type(module).__name__}) aren't plain LoRA of a linear layer below the head: "
                "they can't be merged for the engines. Choose other layers with lora_target (where a model has fused "
                "experts, peft takes gate_proj, up_proj, down_proj for those), or train saved adapters as plain LoRA"
            )
        layers[name] = module
    return layers


def _is_plain(module: Any) -> bool:
    linear = type(module.base_layer) is nn.Linear
    return linear and not module.lora_variant and not module.lora_bias[_NAME]


def peft_name(layer: str, matrix: str) -> str:
    """Name in peft's files of matrix `A` or `B` of a layer."""
    return f"{_PEFT_PREFIX}{layer}.lora_{matrix}.weight"


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


# --- configuration and folders ---------------------------------------------------------------------------------------


def largest_rank(args: ModelArgs) -> int:
    """Largest rank of the adapters that `args` ask for; reads the folder of saved ones. 0: there are none."""
    if args.adapter_name_or_path is None:
        return args.lora_rank
    config = json.loads((Path(args.adapter_name_or_path).expanduser() / "adapter_config.json").read_text())
    return max([config["r"], *(config.get("rank_pattern") or {}).values()])


def _new_config(model: nn.Module, args: ModelArgs, chosen: list[str]) -> LoraConfig:
    from peft import LoraConfig

    # peft finds layers by what their names end with: short names where those mean the same, they are portable.
    leaves = _leaves(chosen)
    meant = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in leaves}
    return LoraConfig(
        r=args.lora_rank,
        # peft has whole numbers in mind and computes with any.
        lora_alpha=_DEFAULT_ALPHA if args.lora_alpha is None else args.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=args.lora_dropout,
        target_modules=leaves if meant == set(chosen) else chosen,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _saved_config(args: ModelArgs, folder: Path) -> LoraConfig:
    """Return what the folder says of its adapters, with this run's dropout."""
    from peft import LoraConfig, PeftConfig

    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"adapter_name_or_path: {folder} has no adapter_config.json; expected a folder of peft's")
    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"adapter_name_or_path: {folder} holds {config.peft_type} adapters, expected LORA")
    other = {
        "bias": config.bias != "none",
        "modules_to_save": bool(config.modules_to_save),
        "target_parameters": bool(config.target_parameters),
        "trainable_token_indices": bool(config.trainable_token_indices),
        # These start from a base model with parts taken out.
        "init_lora_weights": config.init_lora_weights not in (True, False, "gaussian"),
    }
    if any(other.values()):
        names = ", ".join(name for name, used in other.items() if used)
        raise ValueError(f"adapter_name_or_path: {folder} uses {names}; only plain LoRA of linear layers can be used")
    sizes = {"lora_rank": (args.lora_rank, config.r), "lora_alpha": (args.lora_alpha, config.lora_alpha)}
    for key, (given, own) in sizes.items():
        if given and given != own:
            raise ValueError(f"{key}: {given:g}, but the adapters in {folder} have {own:g}; remove {key}")
    config.lora_dropout, config.inference_mode = args.lora_dropout, False
    return config


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
    """Of a few values of every adapted layer, in bfloat16 so that the type they are kept in doesn't matter."""
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
    return f"{sizes} on {len(layers)} layers ({', '.join(_leaves(layers))})"
