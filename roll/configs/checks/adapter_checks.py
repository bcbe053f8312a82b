"""Checks of LoRA keys against the folder that they name: what peft wrote there, and whether it is plain LoRA."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.configs.checks.folder_checks import nearby
from roll.configs.checks.machine_checks import MISSING
from roll.configs.errors import Violation, problem
from roll.configs.schema.run_config import RunConfig

CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_MATRICES = (".lora_A.weight", ".lora_B.weight")
_MERGE = (
    "merge it into its base model with peft (merge_and_unload, then save_pretrained), name the merged folder with "
    "model_name_or_path, and train new adapters with lora_rank"
)
_MERGE_WITH_BIAS = f"where its layers have biases of their own, {_MERGE}; else peft can't merge it either"
_NO_MERGE = "peft can't merge it either, so train new adapters with lora_rank"
_EXTRAS = {
    "use_dora": ("DoRA, whose magnitudes aren't part of a product B A", _MERGE),
    "lora_bias": ("biases beside matrix B", _MERGE_WITH_BIAS),
    "modules_to_save": ("whole modules that were trained beside the adapters", _MERGE),
    "trainable_token_indices": ("trained embeddings of tokens", _MERGE),
    "alora_invocation_tokens": ("adapters that act after certain tokens only", _NO_MERGE),
    "layer_replication": ("copies of layers that the base model doesn't have", _NO_MERGE),
    "use_bdlora": ("block-diagonal factors", _MERGE),
    "kasa_config": ("KaSA, which changes the base weights", _MERGE),
    "velora_config": ("VeLoRA", _MERGE),
    "monteclora_config": ("MonteCLoRA, which draws numbers in its pass", _NO_MERGE),
    "arrow_config": ("a router over several adapters", _NO_MERGE),
}
"""Field of peft's LoraConfig -> what it adds to W + scaling * B A, and what to do with such a folder."""
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they were, with both factors trained."""


def adapter_checks(config: RunConfig) -> Iterator[Violation]:
    """Check that peft is there for roles with LoRA, and the adapters that they start from."""
    for role, worker in config.roles.items():
        args = worker.model_args
        if not args.uses_lora:
            continue
        name = args.adapter_name_or_path
        key = f"{role}.model_args.{'lora_rank' if name is None else 'adapter_name_or_path'}"
        if importlib.util.find_spec("peft") is None:
            expected = f"its package; {MISSING['peft']}"
            yield Violation(key, expected, "install it, or remove the key", name or args.lora_rank)
        if name is None:
            continue
        folder = Path(name).expanduser()
        if not (folder / CONFIG_FILE).is_file():
            expected = f"a folder with an {CONFIG_FILE}, as peft writes it{nearby(Path(name))}"
            yield Violation(key, expected, "check the path", name)
            continue
        try:
            check_folder(folder)
        except ValueError as error:
            yield problem(key, str(error), "", name)


def check_folder(folder: Path) -> dict[str, Any]:
    """Return peft's configuration in `folder` as it was written; `ValueError` unless it is plain LoRA of layers."""
    config = read_adapter_config(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder} holds {kind} adapters, expected LORA")
    for field, advice in _extras(config):
        what = f"{field} ({_EXTRAS[field][0]})" if field in _EXTRAS else f"{field}: {config[field]}"
        raise ValueError(f"{folder} uses {what}; only plain LoRA of linear layers can be trained: {advice}")
    if names := _foreign_tensors(folder):
        raise ValueError(
            f"{folder} holds {len(names)} tensors besides the factors A and B of linear layers, such as {names[0]} "
            f"(peft's save_embedding_layers adds embeddings and heads of a resized vocabulary): {_MERGE}"
        )
    return config


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return what `adapter_config.json` in `folder` says; `ValueError` where it is no JSON object."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}; expected an object, as peft writes it")
    return config


def _extras(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, advice) of what goes beyond plain LoRA."""
    for field, (_, advice) in _EXTRAS.items():
        if config.get(field) not in (None, False, []):  # an empty section has peft's defaults
            yield field, advice
    if config.get("bias", "none") != "none":
        yield "bias", _MERGE
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        # Most of these begin by taking a part out of the base weights, which the folder doesn't hold.
        yield "init_lora_weights", "convert it with peft (path_initial_model_for_weight_conversion), or " + _MERGE


def _foreign_tensors(folder: Path) -> list[str]:
    """Names in the folder's safetensors file that are no factor of a linear layer; reads the header alone."""
    file = folder / _WEIGHTS_FILE
    if not file.is_file():
        return []  # another form, which is read at the start
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError("it is cut off")
            header = json.loads(opened.read(size))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read: {error}") from None
    return sorted(name for name in header if name != "__metadata__" and not name.endswith(_MATRICES))
