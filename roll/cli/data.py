"""`roll data check`: what a run would make of data files, or of those of a configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll.cli.command_parser import key_values
from roll.cli.exits import Exit
from roll.configs.errors import ConfigError
from roll.configs.parsing.build_config import build
from roll.configs.parsing.find import find_config
from roll.configs.parsing.loader import load_config
from roll.configs.schema.offline_config import OfflineConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import DataArgs
from roll.data.data_check import Findings, Progress
from roll.pipelines.run_data import RunData, clipped, reward_names
from roll.rewards.reward_pool import RewardPool
from roll.utils.console import Console
from roll.utils.readers import resolve_sources
from roll.utils.terminal import say

_WIDTH = 100
_SERVICE = "http"
"""The reward that asks a server, which a check doesn't; models it doesn't ask either."""


def check_data(options: argparse.Namespace) -> int:
    """Print tables of what was found; status 1 if a run would stop or lose rows."""
    console = Console(highlight=False, width=min(Console().width, _WIDTH))
    file = Path(options.file).expanduser()
    config_like = file.suffix in (".yaml", ".yml") or (
        not file.exists() and file.with_name(f"{file.name}.yaml").is_file()
    )
    notes: list[str] = []
    if config_like:
        path = find_config(options.file)
        config = load_config(path.parent, path.stem, options.overrides)
        check = RunData(Progress(say), _tokenizer(options.model, config, notes))
        if isinstance(config, RLVRConfig):
            _rlvr(check, config, notes, with_rewards=not options.no_rewards)
        elif isinstance(config, OfflineConfig):
            check.offline(config)
        else:
            raise ValueError(f"{path} is of pipeline {config.pipeline}, whose tasks are environments: roll envs test")
    else:
        for source in filter(None, (options.file, options.validation)):
            resolve_sources(source)  # raises for a file that isn't there
        check = RunData(Progress(say), _tokenizer(options.model, None, notes))
        data = _data_args(options.file, options.overrides)
        check.files(data, replace(data, file_name=(options.validation,)) if options.validation else None)
    for findings in check.findings:
        _print(console, findings, check.limit)
    messages = [*(("note", note) for note in notes), *((remark.level, remark.text) for remark in check.remarks)]
    for level, text in messages:
        console.print(Text("note: ", "cyan") if level == "note" else Text("PROBLEM: ", "bold red"), Text(text), sep="")
    problems = sum(level != "note" for level, _ in messages)
    console.print(f"{problems} problem(s): a run would stop or lose rows" if problems else "no problems")
    return Exit.FAILED if problems else Exit.DONE


def _rlvr(check: RunData, config: RLVRConfig, notes: list[str], *, with_rewards: bool) -> None:
    """Check rows with their rewards, each in a process of its own."""
    from roll.pipelines.rollouts.reward_router import in_run, reward_spec

    pools: dict[str, RewardPool] = {}
    for domain, reward in config.rewards.items():
        if not with_rewards or reward.models or _SERVICE in reward_names(reward):
            notes.append(f"the reward of {domain!r} ({reward.name}) wasn't tried")
            continue
        spec = in_run(reward_spec(config, domain), config.max_steps)
        pools[domain] = RewardPool({domain: spec}, num_processes=1, timeout_s=reward.timeout_s, retries=0)
    try:
        for pool in pools.values():
            pool.wait_ready()
        check.rlvr(config, pools)
    finally:
        for pool in pools.values():
            pool.shutdown()


def _tokenizer(model: str | None, config: RLVRConfig | OfflineConfig | Any, notes: list[str]) -> Any:
    from roll.configs.schema.worker_config import ModelArgs
    from roll.pipelines.workers.train_worker import resolved_model_args
    from roll.strategies.training.pretrained import load_tokenizer

    if model:
        return load_tokenizer(ModelArgs(model_name_or_path=model))
    if not isinstance(config, (RLVRConfig, OfflineConfig)):
        if config is None:
            notes.append("lengths aren't measured; --model says with which tokenizer")
        return None
    args = resolved_model_args(config, "actor_train")
    if not os.path.isdir(Path(str(args.tokenizer_name_or_path or args.model_name_or_path)).expanduser()):
        name = args.tokenizer_name_or_path or args.model_name_or_path
        notes.append(f"lengths aren't measured: {name} isn't a folder here; --model names a tokenizer")
        return None
    return load_tokenizer(args)


def _data_args(name: str, settings: Sequence[str]) -> DataArgs:
    values = {"file_name": name, **key_values(settings, "with a key of data_args, e.g. prompt=question")}
    data, violations = build(DataArgs, values, "data_args")
    if data is None or violations:
        raise ConfigError(violations, "the arguments")
    return data


def _print(console: Console, findings: Findings, limit: int | None) -> None:
    table = Table("column", "types", "rows", "empty", "example", title=f"{findings.name}: {findings.rows:,} rows")
    table.title_justify = "left"
    for name, column in findings.columns.items():
        types = ", ".join(column.types)
        example = Text(clipped(column.example, 40))
        table.add_row(Text(name), types, f"{column.rows:,}", f"{column.empty:,}" if column.empty else "", example)
    if findings.columns:
        console.print(table)
    if findings.tags:
        console.print(Text("tags: " + ", ".join(f"{tag} {count:,}" for tag, count in findings.tags.most_common(20))))
    if findings.pictures is not None:
        for line in findings.pictures.lines():
            console.print(Text(line))
    bins = findings.histogram()
    if bins:
        half, most, nearly = (findings.quantile(share) for share in (0.5, 0.9, 0.99))
        against = "" if limit is None else f", the limit is {limit}"
        console.print(
            f"tokens: half of the rows up to {half}, 90 % {most}, 99 % {nearly}, all {findings.longest[0]}{against}"
        )
        highest = max(count for _, _, count in bins)
        for low, high, count in bins:
            console.print(f"  {low:>7,} to {high:>7,} {count:>9,} {'#' * round(50 * count / highest)}")
