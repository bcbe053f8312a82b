"""Whether a model has the layers that LoRA's keys name, where its folder is on this machine.

For `roll check` (check_process.py); a run asks the same at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import ModelArgs

_KINDS = {"critic": "value"}


def has_adapters(config: RunConfig) -> bool:
    """Return whether a role trains adapters, and its model is in a folder here."""
    return any(True for _ in _asked(config))


def adapter_problems(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, sentence, fix) of adapters that don't fit their model; builds the models without memory."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from roll.strategies.hf.adapter_config import adapter_config
    from roll.strategies.hf.hf_model import load_config

    makers = {"policy": AutoModelForCausalLM, "value": AutoModel}
    for role, kind, args in _asked(config):
        try:
            with torch.device("meta"):
                model = makers[kind].from_config(load_config(args), trust_remote_code=args.trust_remote_code)
        except Exception:  # noqa: BLE001 - what can't be loaded here is said by those who load it
            continue
        try:
            adapter_config(model, args)
        except ValueError as error:
            key, _, sentence = str(error).partition(": ")
            yield f"{role}.model_args.{key}", sentence, ""


def _asked(config: RunConfig) -> Iterator[tuple[str, str, ModelArgs]]:
    for role, worker in config.roles.items():
        args = worker.model_args
        if args.uses_lora and Path(str(config.model_path(role))).expanduser().is_dir():
            yield role, _KINDS.get(role, "policy"), replace(args, model_name_or_path=config.model_path(role))
