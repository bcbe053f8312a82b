"""Checks against the world outside: files, folders, models, functions, the machine. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from roll.configs.catalog.pipeline_table import pipeline_of
from roll.configs.checks.adapter_checks import adapter_checks
from roll.configs.checks.agent_checks import agent_checks
from roll.configs.checks.chat_template_checks import native_template_checks, template_checks
from roll.configs.checks.data_file_checks import data_checks
from roll.configs.checks.engine_arguments import argument_checks
from roll.configs.checks.folder_checks import export_checks, folder_checks
from roll.configs.checks.function_checks import (
    algorithm_checks,
    env_checks,
    function_checks,
    preference_checks,
    reward_checks,
)
from roll.configs.checks.machine_checks import Machine, machine_checks, this_machine
from roll.configs.checks.model_families import family_checks
from roll.configs.checks.model_file_checks import hub_problem, media_checks, picture_checks
from roll.configs.checks.sandbox_checks import sandbox_checks
from roll.configs.checks.teacher_checks import teacher_checks
from roll.configs.checks.tool_checks import tool_checks
from roll.configs.checks.tracker_checks import tracker_checks
from roll.configs.errors import ConfigError, Violation, problem
from roll.configs.rules.layout_rules import shape_rules
from roll.configs.rules.reward_model_rules import classifier_checks
from roll.configs.rules.router_replay import routed_model_rules
from roll.configs.schema.judge_config import JudgeConfig
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.reward_config import RewardModelConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.stand_in import collect
from roll.utils.importing import load_object
from roll.utils.models import SMOLLM2_FOLDER

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def check_prerequisites(config: RunConfig, machine: Machine | None = None) -> None:
    """Raise `ConfigError` with everything the configuration needs and `machine` (None: this one) doesn't have."""
    violations = prerequisite_violations(config, machine)
    if violations:
        raise ConfigError(violations, "what the configuration refers to")


def prerequisite_violations(
    config: RunConfig, machine: Machine | None = None, *, sound: bool = True
) -> list[Violation]:
    """Return everything that is needed and isn't there. Not `sound`: rules are broken, or some values are
    `STAND_IN`."""
    checks = load_object(pipeline_of(config.pipeline).checks, key="pipeline")
    if isinstance(config, RLConfig) and config.replays:
        checks = [check for check in checks if check not in _OF_PLAYING]
    checked_machine = machine or this_machine()
    of_machine = [lambda c: machine_checks(c, checked_machine), lambda c: family_checks(c, checked_machine)]
    return collect([*checks, *of_machine], config, sound=sound)


def model_checks(config: RunConfig) -> Iterator[Violation]:
    """Local model folders are there; a reward model is one."""
    for role in config.roles:
        name = config.model_path(role)
        args = config.roles[role].model_args
        scores = isinstance(config, RLConfig) and name == config.reward_pretrain
        default = "reward_pretrain" if scores else "pretrain"
        path = f"{role}.model_args.model_name_or_path" if args.model_name_or_path else default
        folder = Path(name).expanduser()
        if not folder.exists() and not config.makes_model:
            if not _HUB_ID.match(name) or ("/" in name and Path(name).parent.is_dir()):
                expected = f"a model folder that exists, seen from {Path.cwd()}, or a hub id such as org/name"
                made = "run `make quickstart`, which makes it" if folder.name == SMOLLM2_FOLDER else ""
                yield Violation(path, expected, made or "check the path", name)
            elif problem_text := hub_problem(name):
                yield problem(path, problem_text, "check the name, or give a local folder", name)
            elif args.use_shm:
                yield _not_staged(role, name)
        elif args.use_shm and folder.is_file():
            yield _not_staged(role, name)
        elif folder.exists() and not (folder / "config.json").is_file():
            yield Violation(path, "a Hugging Face model folder with a config.json", "check the path", name)
        elif isinstance(worker := config.roles[role], RewardModelConfig):
            shape = read_shape(name, args.model_config_kwargs)
            limit = shape.positions if shape is not None else None
            yield from classifier_checks(role, worker, folder / "config.json", limit)
        if not args.trust_remote_code and not isinstance(config.roles[role], (RewardModelConfig, JudgeConfig)):
            yield from media_checks(path, name)
            yield from picture_checks(config, role)


def _not_staged(role: str, name: str) -> Violation:
    fix = "download it and name its folder, or remove use_shm"
    return Violation(f"{role}.model_args.use_shm", f"false with {name}, which isn't a folder here", fix, True)


def tokenizer_checks(config: RunConfig) -> Iterator[Violation]:
    """Tokenizers of their own are there."""
    for role, worker in config.roles.items():
        name, key = worker.model_args.tokenizer_name_or_path, f"{role}.model_args.tokenizer_name_or_path"
        if name is None:
            continue
        folder = Path(name).expanduser()
        if folder.exists():
            if not any((folder / file).is_file() for file in ("tokenizer_config.json", "tokenizer.json")):
                expected = "a folder with a tokenizer_config.json or tokenizer.json"
                yield Violation(key, expected, "check the path", name)
        elif not _HUB_ID.match(name) or ("/" in name and Path(name).parent.is_dir()):
            expected = f"a folder that exists, seen from {Path.cwd()}, or a hub id such as org/name"
            yield Violation(key, expected, "check the path", name)
        elif problem_text := hub_problem(name):
            yield problem(key, problem_text, "check the name, or give a local folder", name)


def shape_checks(config: RunConfig) -> Iterator[Violation]:
    """Models whose config.json is at hand hold sequences this long, and their role's layout can divide them."""
    for role, worker in config.roles.items():
        name = config.model_path(role)
        shape = read_shape(name, worker.model_args.model_config_kwargs)
        if shape is None:
            continue
        length = config.max_sequence_length
        plays = not isinstance(worker, (RewardModelConfig, JudgeConfig))
        if plays and shape.positions is not None and length > shape.positions:
            default = "if null: prompt_length + response_length"
            if isinstance(config, RLConfig) and config.sequence_length is None:
                default = f"prompt_length {config.prompt_length} + response_length {config.response_length}"
            expected = f"at most {shape.positions} tokens ({default}), all that {name} can hold"
            fix = f"sequence_length={shape.positions}"
            if isinstance(config, RLConfig):
                # What is there keeps its share, and neither becomes longer than it is.
                response = min(config.response_length, max(1, shape.positions // 2))
                prompt = min(config.prompt_length, max(1, shape.positions - response))
                response = min(config.response_length, max(1, shape.positions - prompt))
                fix = f"prompt_length={prompt} response_length={response}"
                fix += "" if config.sequence_length is None else f" sequence_length={shape.positions}"
            yield Violation("sequence_length", expected, fix, length)
        yield from shape_rules(role, worker, name, shape)
        if isinstance(config, RLConfig) and role == "actor_train":
            yield from routed_model_rules(config, name, shape)


_MODELS = (
    model_checks, tokenizer_checks, template_checks, native_template_checks, teacher_checks, shape_checks,
    adapter_checks,
)  # fmt: skip
_RUN = (*_MODELS, folder_checks, export_checks, function_checks, tracker_checks)
RLVR_CHECKS = (data_checks, argument_checks, algorithm_checks, reward_checks, tool_checks, sandbox_checks, *_RUN)
DISTILL_CHECKS = RLVR_CHECKS
AGENTIC_CHECKS = (argument_checks, algorithm_checks, env_checks, tool_checks, agent_checks, sandbox_checks, *_RUN)
_OF_PLAYING = (data_checks, argument_checks, reward_checks, env_checks, tool_checks, agent_checks, sandbox_checks)
"""Of what a run that replays recorded episodes doesn't use."""
SFT_CHECKS = (data_checks, *_RUN)
DPO_CHECKS = (data_checks, preference_checks, *_RUN)
REWARD_MODEL_CHECKS = (data_checks, *_RUN)
"""All but those of `machine_checks`, in the order of their messages."""
