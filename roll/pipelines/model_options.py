"""Options of a model that only the model itself can refuse: asked of its empty module, which has no weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.schema.run_config import RunConfig


def has_model_options(config: RunConfig) -> bool:
    """Return whether a role has such options, and its model is in a folder here."""
    return any(_asks(config, role) for role in config.roles)


def option_problems(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, sentence, fix) of what would end the run when the models of its roles are loaded."""
    from roll.strategies.hf.hf_build import freeze_parameters
    from roll.strategies.hf.hf_model import load_config
    from roll.workers.train import resolved_model_args

    for role in filter(lambda role: _asks(config, role), config.roles):
        args, here = resolved_model_args(config, role), f"{role}.model_args"
        try:
            settings = load_config(args)
        except ValueError as error:
            key = (
                str(error).partition(":")[0] if str(error).startswith("model_config_kwargs.") else "model_config_kwargs"
            )
            yield f"{here}.{key}", str(error).removeprefix(f"{key}: "), ""
            continue
        except Exception as error:  # noqa: BLE001 - transformers' own, of values that it doesn't take
            yield f"{here}.model_config_kwargs", f"the model's configuration refuses it: {_line(error)}", ""
            continue
        if config.kind_of(role) != "policy":
            continue  # a head of another kind, which is made when the run starts
        try:
            model = _empty(settings)
        except Exception as error:  # noqa: BLE001 - as above
            if args.model_config_kwargs:
                yield f"{here}.model_config_kwargs", f"no model can be built with it: {_line(error)}", "another value"
            continue
        if args.model_config_kwargs and (sentence := _other_shape(model, Path(str(args.model_name_or_path)))):
            yield f"{here}.model_config_kwargs", sentence, "leave out what changes sizes"
        trains = role in config.trained_roles and not config.roles[role].strategy_args.strategy_name.startswith(
            "megatron"
        )
        if trains and args.freeze_module_prefix:
            try:
                freeze_parameters(model, args.freeze_module_prefix)
            except ValueError as error:
                yield f"{here}.freeze_module_prefix", str(error).removeprefix("freeze_module_prefix: "), ""
            else:
                if not args.uses_lora and not any(one.requires_grad for one in model.parameters()):
                    yield f"{here}.freeze_module_prefix", "it leaves nothing to train", "name fewer modules"


def _asks(config: RunConfig, role: str) -> bool:
    args = config.roles[role].model_args
    asks = args.model_config_kwargs or args.freeze_module_prefix
    return bool(asks) and (Path(config.model_path(role)).expanduser() / "config.json").is_file()


def _empty(settings: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings)


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
