"""`roll serve`: a model behind the protocols of OpenAI and Anthropic, as agents meet it in training."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from roll.api.launch import load
from roll.cli.exits import Exit
from roll.configs.catalog.harness_table import HARNESSES, expand_fields, harness_meant
from roll.configs.errors import ConfigError, of_no_file
from roll.configs.schema.agents_config import NEVER_IGNORED
from roll.configs.schema.model_shape import read_shape
from roll.pipelines.run.stored_config import CONFIG_FILE
from roll.types.chat import THINK_TAGS
from roll.utils.terminal import say

_LONGEST = 32_768


def serve(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from roll.gateway.server import check_packages

    check_packages()
    for name in ("max_new_tokens", "engines"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    if not 0 <= options.port < 1 << 16:
        raise ValueError(f"--port: got {options.port}, expected 0 (a free one) to 65535")
    for field in options.ignore_fields or ():
        if field in NEVER_IGNORED:
            raise ValueError(f"--ignore_fields: without {field!r} a request says something else; leave it out")
        if (meant := harness_meant(field)) is not None:
            what = f"{field!r} is neither a field of requests nor a harness ({', '.join(HARNESSES)})"
            raise ValueError(f"--ignore_fields: {what}; did you mean {meant}?")
    key = _key(options)
    with tempfile.TemporaryDirectory(prefix="roll-serve-") as folder, _model(options, Path(folder)) as model:
        config_file = Path(folder) / "serve.yaml"
        config_file.write_text(yaml.safe_dump(_configuration(options, model, Path(folder)), sort_keys=False), "utf-8")
        try:
            config = load(config_file, options.overrides)
        except ConfigError as error:
            raise of_no_file(error, str(config_file), "what roll serve would run") from None
        from roll.pipelines.rl.serve_pipeline import Serving

        serving = Serving(
            config,
            name=options.name or _name(options.model),
            tool_parser=options.tool_parser,
            thinking_tags=THINK_TAGS if options.thinking else None,
            max_new_tokens=options.max_new_tokens,
            ignore_fields=expand_fields(options.ignore_fields or (), trains=False),
        )
        serving.run(options.host, options.port, key, tell=say)
    return Exit.DONE


def _key(options: argparse.Namespace) -> str:
    """Return the key that clients have to send; a new one if none is given."""
    from roll.gateway.registry import new_key

    if options.api_key_env is None:
        return new_key()
    key = os.environ.get(options.api_key_env, "").strip()
    if not key:
        raise ValueError(f"--api_key_env: the environment variable {options.api_key_env} isn't set")
    return key


@contextlib.contextmanager
def _model(options: argparse.Namespace, staging: Path) -> Iterator[str]:
    """Yield the model's folder or name; of a run its newest checkpoint, or else what it exported at its end."""
    folder = Path(options.model).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        if options.step is not None:
            raise ValueError(f"--step: {options.model} is no run, whose checkpoints it chooses from")
        yield options.model
        return
    from roll.api.launch import stored_config
    from roll.cli.runs import export

    exported = stored_config(folder.resolve()).export_path
    if options.step is None and (exported / "config.json").is_file():
        yield str(exported)
        return
    target = staging / "model"
    asked = {"step": options.step, "output": target, "role": "actor_train", "dtype": None, "max_shard_size": None}
    export(argparse.Namespace(run_folder=str(folder), adapters=False, base=None, **asked))
    yield str(target)


def _name(model: str) -> str:
    """Return how clients call the model: its name without the organisation, or the folder's."""
    return re.sub(r"[^\w.-]+", "-", Path(model.rstrip("/")).name) or "model"


def _configuration(options: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of a mere validation, of which only the engines are started."""
    length = options.max_length or _usual_length(model)
    if length < 2:
        raise ValueError(f"--max_length: got {length}, expected at least 2")
    response = min(options.max_new_tokens, length - 1)
    rows = folder / "rows.jsonl"
    rows.write_text('{"id": 1, "prompt": "-"}\n', "utf-8")
    data = {"file_name": str(rows), "prompt": "prompt", "id": "id"}
    inline = options.engine == "hf_infer" and options.engines == 1
    return {
        "pipeline": "rlvr",
        "exp_name": "serve",
        "executor": "inline" if inline else "ray",
        "output_dir": str(folder),
        "track_with": [],
        "print_summary": False,
        "pretrain": model,
        "val_only": True,
        "num_gpus_per_node": options.engines,
        "prompt_length": length - response,
        "response_length": response,
        "rewards": {"rows": {"name": "none"}},
        "validation": {"data_args": data},
        "actor_train": {"data_args": data, "training_args": {}},
        "actor_infer": {"world_size": options.engines, "strategy_args": {"strategy_name": options.engine}},
    }


def _usual_length(model: str) -> int:
    shape = read_shape(model, {})
    positions = None if shape is None else shape.positions
    return min(positions or _LONGEST, _LONGEST)
