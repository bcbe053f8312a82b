"""Checkpoints of DeepSpeed's `save_checkpoint`, of any ZeRO stage, to weights under the model's names.

Frozen weights are where the stage puts them, or nowhere (`exclude_frozen_parameters`): then they are those of the base
model. Adapters of peft are merged, with the `adapter_config.json` that trainers write beside such a checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.configs.checks.adapter_checks import CONFIG_FILE
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.hf.adapter_config import adapter_config
from roll.strategies.merging.write_model import empty_model
from roll.strategies.training.pretrained import load_causal_lm, named_tensors
from roll.utils.pickles import UnsafeCheckpoint, plain_values_only

_logger = logging.getLogger(__name__)


def deepspeed_weights(states: Path, config: Any, base: str) -> dict[str, Tensor]:
    """Return the weights of a causal language model, adapters merged in.

    Args:
        states: the folder with DeepSpeed's files.
        config: the model's, as transformers has it.
        base: model that has what the checkpoint lacks because it was frozen.

    Raises:
        ValueError: it is of another model, or holds adapters that nothing describes.
        UnsafeCheckpoint: its pickles would call something.
    """
    saved = _saved_weights(states)
    base_weights = {name.replace(".base_layer.", "."): tensor for name, tensor in saved.items() if ".lora_" not in name}
    adapters = {name: tensor for name, tensor in saved.items() if ".lora_" in name}
    empty = empty_model(config, "policy", torch.float32)
    names = [name for name, _ in named_tensors(empty)]
    prefix = _prefix([*base_weights, *(f"{_layer(name)}.weight" for name in adapters)], names)
    missing = [name for name in names if prefix is None or prefix + name not in base_weights]
    unknown = [
        name for name in base_weights if missing and name.startswith(prefix or "") and _is_foreign(name, prefix, names)
    ]
    if prefix is None or unknown:
        raise ValueError(
            f"{states} holds another model than {config.model_type} of --base: "
            + (f"that has no {unknown[0]}" if unknown else f"it has no ...{names[0]}, or not all")
        )
    weights = {name: base_weights[prefix + name] for name in names if prefix + name in base_weights}
    if missing:
        weights |= _frozen(states, base, missing)
    if adapters:
        weights |= _merged(states, adapters, prefix, weights, empty)
    return weights


def _prefix(saved: list[str], names: list[str]) -> str | None:
    """Return what programs that wrap the model have put before its names; None: these aren't its names."""
    known, counts = set(names), Counter[str]()
    for name in saved:
        parts = name.split(".")
        matches = (i for i in range(len(parts)) if ".".join(parts[i:]) in known)
        if (i := next(matches, None)) is not None:
            counts["".join(f"{part}." for part in parts[:i])] += 1
    return counts.most_common(1)[0][0] if counts else None


def _is_foreign(name: str, prefix: str | None, names: list[str]) -> bool:
    """Return whether a weight is none of the model's; tied heads and computed tables are no part of the names."""
    own = name.removeprefix(prefix or "")
    return own not in names and own != "lm_head.weight" and not own.endswith("rotary_emb.inv_freq")


def _frozen(states: Path, base: str, missing: list[str]) -> dict[str, Tensor]:
    """Return weights of the base model that the checkpoint was saved without."""
    _logger.warning(
        "%s lacks %d of the model's weights, such as %s (exclude_frozen_parameters): they are taken from --base %s, "
        "which has to be the model that training started from",
        states,
        len(missing),
        missing[0],
        base,
    )
    tensors = dict(named_tensors(load_causal_lm(ModelArgs(model_name_or_path=base), torch.float32)))
    return {name: tensors[name].detach() for name in missing}


# --- adapters ---------------------------------------------------------------------------------------------------------


def _layer(name: str) -> str:
    """Name of the layer that a factor `layer.lora_A.<adapter>.weight` belongs to."""
    return name.partition(".lora_")[0]


def _merged(
    states: Path, adapters: Mapping[str, Tensor], prefix: str, weights: Mapping[str, Tensor], empty: Any
) -> dict[str, Tensor]:
    """Return W + scaling * B A of every layer with adapters; peft's configuration has rank and alpha of each."""
    folder = next(
        (folder_tried for folder_tried in (states, states.parent) if (folder_tried / CONFIG_FILE).is_file()), None
    )
    if folder is None:
        raise ValueError(
            f"{states} holds adapters of peft, and DeepSpeed's files don't say their scaling: put the {CONFIG_FILE} of "
            f"the run into {states.parent}"
        )
    described = adapter_config(empty, ModelArgs(adapter_name_or_path=str(folder)))
    layers = {_layer(name).removeprefix(prefix) for name in adapters}
    if odd := sorted(layers ^ described.sizes.keys()):
        raise ValueError(
            f"{folder / CONFIG_FILE} describes other adapters than {states} holds: {odd[0]} is in one alone"
        )
    merged = {}
    for layer, (rank, alpha) in described.sizes.items():
        a, b = (_factor(states, adapters, prefix + layer, matrix) for matrix in "AB")
        full = weights[f"{layer}.weight"].float()
        if full.shape != (b.shape[0], a.shape[1]):
            raise ValueError(
                f"{states} holds adapters of another model: {layer} has shape {tuple(full.shape)} in --base"
            )
        scaling = alpha / (math.sqrt(rank) if described.rank_stabilized else rank)
        merged[f"{layer}.weight"] = full + scaling * (b.float() @ a.float())
    return merged


def _factor(states: Path, adapters: Mapping[str, Tensor], layer: str, matrix: str) -> Tensor:
    own = [tensor for name, tensor in adapters.items() if name.startswith(f"{layer}.lora_{matrix}.")]
    if len(own) != 1:
        raise ValueError(f"{states} holds {len(own)} matrices {matrix} of {layer}; expected one set of adapters")
    return own[0]


# --- reading ----------------------------------------------------------------------------------------------------------


def _saved_weights(states: Path) -> dict[str, Tensor]:
    """Return the float32 weights of a folder of DeepSpeed's, by its own reader; frozen ones as the module had them."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import zero_to_fp32
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    with plain_values_only(states), torch.serialization.safe_globals(known), quiet[0], quiet[1]:
        try:
            file, trained = states / "mp_rank_00_model_states.pt", dict[str, Tensor]()
            if any(states.glob("*_optim_states.pt")):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    trained.update(
                        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(states.parent), tag=states.name)
                    )
            if not file.is_file():  # stage 3, whose module is in shares
                return trained
            # Below stage 3 every file has the whole module; at stage 1 the reader leaves its frozen weights out.
            module: dict[str, Tensor] = torch.load(file, map_location="cpu")["module"]
            stored = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in module.items()}
            return {**stored, **trained}
        except Exception as error:
            if "Weights only load failed" in str(error):
                raise UnsafeCheckpoint(
                    f"{states} can't be read as plain values: {_unsafe(str(error))}. What else is in its pickles could "
                    "run code; ask where it came from"
                ) from None
            raise ValueError(f"{states} can't be read: {error}") from error


def _unsafe(text: str) -> str:
    """Return torch's line that names what was refused."""
    lines = [line.strip() for line in text.splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return lines[0] if lines else text.splitlines()[0]
