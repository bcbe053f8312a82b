"""`roll rollout`: a model plays environments, nothing is trained."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

from roll.configs.environment import check_environment
from roll.configs.loader import load_config
from roll.envs.registry import ENVS


def add_to(groups: Any) -> None:
    """Adds the command to the parser of `roll`."""
    parser = groups.add_parser("rollout", help="a model plays environments: episodes and a table of scores")
    parser.add_argument("--model", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--env", action="append", required=True, help="an id, or a class; may be given several times")
    parser.add_argument("--episodes", type=int, default=64, help="per environment (default 64)")
    parser.add_argument("--max_steps", type=int, default=10, help="responses per episode (default 10)")
    parser.add_argument("--engine", default="hf_infer", help="hf_infer (default), vllm or sglang")
    parser.add_argument("--output_dir", type=Path, default=Path("output/rollout"), help="default: output/rollout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of pipeline agentic")
    parser.set_defaults(run=rollout)


def rollout(options: argparse.Namespace) -> int:
    """Writes the configuration that the options stand for to `<output_dir>/rollout.yaml`, and runs it."""
    for name in ("episodes", "max_steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    file = options.output_dir / "rollout.yaml"
    file.write_text(yaml.safe_dump(configuration(options), sort_keys=False), encoding="utf-8")
    config = load_config(file.parent, file.stem, options.overrides)
    check_environment(config)
    from roll.pipelines import run_pipeline
    from roll.utils.logging import setup_logging

    setup_logging(file=config.logging_path / "controller.log")
    run_pipeline(config)
    return 0


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration that the options stand for."""
    tags = {_tag(env): env for env in options.env}
    return {
        "pipeline": "agentic",
        "exp_name": "rollout",
        "executor": "inline" if options.engine == "hf_infer" else "ray",
        "output_dir": str(options.output_dir),
        "rollout_dump_dir": str(options.output_dir / "episodes"),
        "track_with": ["jsonl"],
        "pretrain": options.model,
        "val_only": True,
        "custom_envs": {tag: {"env_type": env, "max_steps": options.max_steps} for tag, env in tags.items()},
        "val_env_manager": {"num_env_groups": options.episodes * len(tags)},
        "actor_infer": {"strategy_args": {"strategy_name": options.engine}},
    }


def _tag(env: str) -> str:
    """A name for metrics."""
    name = env if env in ENVS else env.rpartition(":")[2]
    return re.sub(r"\W+", "_", name)
