"""Checkpoints that other programs wrote with DeepSpeed or Megatron-core, to a Hugging Face folder.

Their pickles are read as plain values: a class that isn't on a short list stops it, and nothing of it is called.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.strategies.hf.hf_model import named_tensors
from roll.strategies.merging.write_model import Merge, empty_model, write_tensors, write_tokenizer
from roll.utils.pickles import UnsafeCheckpoint, plain_values_only

_ITERATION = "latest_checkpointed_iteration.txt"


def find_foreign(folder: Path) -> tuple[str, Path] | None:
    """Return (`deepspeed` or `megatron`, the folder of the states) of a checkpoint; None: it is neither's.

    A folder of several is read at the one that its own pointer (`latest`, `latest_checkpointed_iteration.txt`) names.
    """
    for pointer, form in (("latest", "{}"), (_ITERATION, "iter_{:0>7}")):
        file = folder / pointer
        if file.is_file():
            named = folder / form.format(file.read_text(encoding="utf-8", errors="replace").strip()[:200])
            if named.is_dir() and named.parent == folder:
                return find_foreign(named)
    if any(folder.glob("*mp_rank_00_model_states.pt")):
        return "deepspeed", folder
    return ("megatron", folder) if (folder / ".metadata").is_file() else None


def merge_foreign(folder: Path, target: Path, merge: Merge) -> None:
    """Write the causal language model in such a checkpoint to `target`, with the tokenizer of `merge.base`.

    Raises:
        ValueError: it is no such checkpoint, or doesn't fit the base model's configuration.
        UnsafeCheckpoint: its pickles would call something.
    """
    from transformers import AutoConfig

    found = find_foreign(folder)
    if found is None:
        raise ValueError(f"{folder} is neither a checkpoint of DeepSpeed nor one of Megatron-core (torch_dist)")
    if merge.base is None:
        raise ValueError(
            f"{folder} doesn't say what model it is: name one with the same configuration and tokenizer with --base"
        )
    if merge.adapters_only:
        raise ValueError("--adapters: only checkpoints of this program say which adapters they hold")
    config = AutoConfig.from_pretrained(merge.base)
    kind, states = found
    if kind == "megatron":
        from roll.strategies.merging.megatron_states import megatron_weights

        weights = {
            name.removeprefix("lm."): value for name, value in megatron_weights(states, config, "policy").items()
        }
    else:
        weights = _own_names(_zero_weights(states), config, states)
    write_tensors(weights, config, "policy", merge, target)
    write_tokenizer(merge.base, target)


def _zero_weights(states: Path) -> dict[str, Tensor]:
    """Return the float32 weights of a folder of DeepSpeed's, by DeepSpeed's own reader."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import zero_to_fp32
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    with plain_values_only(states), torch.serialization.safe_globals(known), quiet[0], quiet[1]:
        try:
            if not any(states.glob("*_optim_states.pt")):  # without ZeRO
                file = states / "mp_rank_00_model_states.pt"
                module: dict[str, Tensor] = torch.load(file, map_location="cpu")["module"]
                return {
                    name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in module.items()
                }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return dict(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(states.parent), tag=states.name))
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


def _own_names(weights: Mapping[str, Tensor], config: Any, states: Path) -> dict[str, Tensor]:
    """Return the weights under the model's names: programs wrap the model, which puts something before each."""
    names = [name for name, _ in named_tensors(empty_model(config, "policy", torch.float32))]
    prefixes = [name.removesuffix(names[0]) for name in weights if name.endswith(names[0])]
    for prefix in sorted(prefixes, key=len):
        if all(prefix + name in weights for name in names):
            return {name: weights[prefix + name] for name in names}
    raise ValueError(
        f"{states} holds another model than {config.model_type} of --base: it has no ...{names[0]}, or not all"
    )
