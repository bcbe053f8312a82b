"""`roll rollout`: a model plays environments, nothing is trained."""

from __future__ import annotations

import argparse
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from roll.configs.agentic import AgenticConfig
from roll.configs.environment import check_environment
from roll.configs.loader import load_config, to_yaml
from roll.envs.registry import ENVS, check_envs

PICTURES = 4
"""Episodes per environment that `render_save_dir` draws and `samples.jsonl` shows."""


def add_to(groups: Any) -> None:
    """Adds the command to the parser of `roll`."""
    parser = groups.add_parser("rollout", help="a model plays environments: episodes and a table of scores")
    parser.add_argument("--model", required=True, help="Hugging Face folder or hub id")
    parser.add_argument(
        "--env", action="append", required=True, help="an id, or a class; may be given several times (roll envs list)"
    )
    parser.add_argument("--episodes", type=int, default=64, help="per environment (default 64)")
    parser.add_argument("--max_steps", type=int, default=10, help="responses per episode (default 10)")
    parser.add_argument("--engine", default="hf_infer", help="hf_infer (default), vllm or sglang")
    parser.add_argument("--output_dir", type=Path, default=Path("output/rollout"), help="default: output/rollout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of pipeline agentic")
    parser.set_defaults(run=rollout)


def rollout(options: argparse.Namespace) -> int:
    """Writes the configuration that the options stand for to `<output_dir>/rollout.yaml`, and runs it.

    The exit status is 0 when it has ended, 1 for whatever went wrong, which is said in a few lines.
    """
    for name in ("episodes", "max_steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise ValueError(f"--output_dir: {options.output_dir} is a file, expected a folder")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    file = options.output_dir / "rollout.yaml"
    file.write_text(yaml.safe_dump(configuration(options), sort_keys=False), encoding="utf-8")
    config = load_config(file.parent, file.stem, options.overrides)
    if not isinstance(config, AgenticConfig):
        raise ValueError(f"pipeline: got {config.pipeline}, expected agentic, which alone plays environments")
    check_environment(config)
    check_envs(config)
    file.write_text(to_yaml(config), encoding="utf-8")  # all that was played, overrides included
    return _run(config)


def _run(config: AgenticConfig) -> int:
    from roll.pipelines import run_pipeline
    from roll.utils.logging import setup_logging

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for warning in config.warnings():
        console.print(f"warning: {warning}")
    setup_logging(file=config.logging_path / "controller.log")
    try:
        run_pipeline(config)
    except Exception as error:  # noqa: BLE001 - the last boundary: everything is reported, nothing is hidden
        details = config.logging_path / "error.txt"
        details.write_text(traceback.format_exc(), encoding="utf-8")
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        console.print(f"error: {kind}{error}\n(traceback: {details})")
        return 1
    return 0


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration that the options stand for."""
    tags = _tags(options.env)
    return {
        "pipeline": "agentic",
        "exp_name": "rollout",
        "executor": "inline" if options.engine == "hf_infer" else "ray",
        "output_dir": str(options.output_dir),
        "rollout_dump_dir": str(options.output_dir / "episodes"),
        "track_with": ["jsonl"],
        "pretrain": options.model,
        "val_only": True,
        "log_val_generations": PICTURES * len(tags),
        "custom_envs": {tag: {"env_type": env, "max_steps": options.max_steps} for tag, env in tags.items()},
        "val_env_manager": {"num_env_groups": options.episodes * len(tags)},
        "actor_infer": {"strategy_args": {"strategy_name": options.engine}},
    }


def _tags(envs: Sequence[str]) -> dict[str, str]:
    """Environments by names for metrics: the id, or the class; a further one of that name is numbered."""
    tags: dict[str, str] = {}
    for env in envs:
        name = re.sub(r"\W+", "_", env if env in ENVS else env.rpartition(":")[2]) or "env"
        tag, number = name, 1
        while tag in tags:
            number += 1
            tag = f"{name}_{number}"
        tags[tag] = env
    return tags
