"""Keys of a model that only the model itself can refuse: asked of its empty module, which has no weights.

For `roll check` (check_process.py), where the model is in a folder of this machine; a run asks the same at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import ModelArgs

Problem = tuple[str, str, str]
"""(key below the role's `model_args`, sentence, fix)."""


def has_model_options(config: RunConfig) -> bool:
    """Return whether a role has such keys, and its model is in a folder here."""
    return any(_has_options(config, role) for role in config.roles)


def option_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield (key, sentence, fix) of what would end the run when the models of its roles are loaded."""
    for role in filter(lambda role: _has_options(config, role), config.roles):
        for key, sentence, fix in _of_role(config, role):
            yield f"{role}.model_args.{key}", sentence, fix


def _has_options(config: RunConfig, role: str) -> bool:
    args = config.roles[role].model_args
    options = args.model_config_kwargs or args.freeze_module_prefix or args.uses_lora
    return bool(options) and (Path(config.model_path(role)).expanduser() / "config.json").is_file()


def _of_role(config: RunConfig, role: str) -> Iterator[Problem]:
    from roll.pipelines.workers.train_worker import resolved_model_args
    from roll.strategies.training.pretrained import load_config

    args, kind = resolved_model_args(config, role), config.kind_of(role)
    try:
        settings = load_config(args)
    except ValueError as error:
        yield _split(error, "model_config_kwargs")
        return
    except Exception as error:  # noqa: BLE001 - transformers' own, of values that it doesn't take
        yield "model_config_kwargs", f"the model's configuration refuses it: {_line(error)}", ""
        return
    if kind == "reward":
        return  # its head is made when the run starts
    try:
        model = _empty(settings, args, kind)
    except Exception as error:  # noqa: BLE001 - as above
        if args.model_config_kwargs:
            yield "model_config_kwargs", f"no model can be built with it: {_line(error)}", "another value"
        return
    if args.uses_lora:
        yield from _adapter_problems(model, args)
    if kind != "policy":
        return
    if args.model_config_kwargs and (sentence := _other_shape(model, Path(str(args.model_name_or_path)))):
        yield "model_config_kwargs", sentence, "leave out what changes sizes"
    megatron = config.roles[role].strategy_args.strategy_name.startswith("megatron")
    if role in config.trained_roles and not megatron and args.freeze_module_prefix:
        yield from _freezing_problems(model, args)


def _adapter_problems(model: Any, args: ModelArgs) -> Iterator[Problem]:
    from roll.strategies.hf.adapter_config import adapter_config

    try:
        adapter_config(model, args)
    except ValueError as error:
        yield _split(error, "lora_target")


def _freezing_problems(model: Any, args: ModelArgs) -> Iterator[Problem]:
    from roll.strategies.hf.hf_build import freeze_parameters

    key = "freeze_module_prefix"
    try:
        freeze_parameters(model, args.freeze_module_prefix)
    except ValueError as error:
        yield _split(error, key)
        return
    if not args.uses_lora and not any(one.requires_grad for one in model.parameters()):
        yield key, "it leaves nothing to train", "name fewer modules"


def _split(error: ValueError, default: str) -> Problem:
    """Return the key that an error's sentence begins with, and the rest of it."""
    key, colon, sentence = str(error).partition(": ")
    if colon and key.partition(".")[0] in ModelArgs.__dataclass_fields__:
        return key, sentence, ""
    return default, str(error), ""


def _empty(settings: Any, args: ModelArgs, kind: str) -> Any:
    import torch
    from transformers import AutoModel

    from roll.strategies.training.pretrained import language_model_class

    maker = AutoModel if kind == "value" else language_model_class(settings)
    with torch.device("meta"):
        return maker.from_config(settings, trust_remote_code=args.trust_remote_code)


def _other_shape(model: Any, folder: Path) -> str:
    """Say which weight of the folder has another shape than the model has; empty: none."""
    from safetensors import safe_open

    shapes = {name: list(parameter.shape) for name, parameter in model.state_dict().items()}
    for file in sorted(folder.expanduser().glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dictionary
                shape = weights.get_slice(name).get_shape()
                if name in shapes and shapes[name] != shape:
                    return f"with it {name} has the shape {shapes[name]}, and {shape} in {file}"
    return ""


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
