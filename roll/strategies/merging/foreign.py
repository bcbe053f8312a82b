"""Checkpoints that other programs wrote with DeepSpeed or Megatron-core, to a Hugging Face folder.

Their pickles are read as plain values: a class that isn't on a short list stops it, and nothing of it is called.
"""

from __future__ import annotations

from pathlib import Path

from roll.strategies.merging.deepspeed_states import deepspeed_weights
from roll.strategies.merging.write_model import Merge, write_tensors, write_tokenizer

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

    match = find_foreign(folder)
    if match is None:
        raise ValueError(f"{folder} is neither a checkpoint of DeepSpeed nor one of Megatron-core (torch_dist)")
    if merge.base is None:
        raise ValueError(
            f"{folder} doesn't say what model it is: name one with the same configuration and tokenizer with --base"
        )
    if merge.adapters_only:
        raise ValueError("--adapters: only checkpoints of this program say which adapters they hold")
    config = AutoConfig.from_pretrained(merge.base)
    kind, states = match
    if kind == "megatron":
        from roll.strategies.merging.megatron_states import megatron_weights

        weights = {
            name.removeprefix("lm."): value for name, value in megatron_weights(states, config, "policy").items()
        }
    else:
        weights = deepspeed_weights(states, config, merge.base)
    write_tensors(weights, config, "policy", merge, target)
    write_tokenizer(merge.base, target)
