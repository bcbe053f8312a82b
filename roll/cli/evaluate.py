"""`roll eval generate` and `roll eval score`: a model's answers to a data file, and what they are worth."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from roll.cli.exits import Exit, say
from roll.cli.key_values import key_values
from roll.cli.train import load, run_logged
from roll.configs.errors import ConfigError, of_no_file
from roll.configs.parsing.find import find_config
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.rewards.base import RewardRequest, RewardResult, RewardSpec
from roll.types.episode import Task
from roll.utils.readers import Row, read_rows, resolve_sources

TRUTHS = ("ground_truth", "answer")
"""Columns in which the expected answer is looked for."""


def unscored(response: str, task: Task) -> float:  # noqa: ARG001 - the signature of every reward
    """Say nothing about a response: it is only wanted as text."""
    return 0.0


# --- responses --------------------------------------------------------------------------------------------------------


def generate(options: argparse.Namespace) -> int:
    """Write the rows of a file with a model's responses: a row for each."""
    for name in ("samples", "max_new_tokens", "prompt_length"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    _parquet(options.output, "-o")
    rows = _rows(options.data)
    with tempfile.TemporaryDirectory(prefix="roll-") as name:
        folder = Path(name)
        asked = [_question(row) for row in rows]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked), encoding="utf-8")
        file = folder / "generate.yaml"
        file.write_text(yaml.safe_dump(_generation(options, folder, asked[0]), sort_keys=False), encoding="utf-8")
        try:
            config = load(file, options.overrides)
        except ConfigError as error:
            raise of_no_file(error, str(file), "what roll eval generate would run") from None
        run_logged(config)
        episodes = [json.loads(line) for line in (folder / "episodes.jsonl").read_text("utf-8").splitlines()]
    answers = []
    for episode in sorted(episodes, key=lambda episode: (int(episode["task"].rpartition(":")[2]), episode["member"])):
        row = rows[int(episode["task"].rpartition(":")[2]) - 1]
        turn = episode["turns"][-1] if episode["turns"] else {}
        about = {"row": row.number, "sample": episode["member"], "response": turn.get("response")}
        answers.append({**row.values, **about, "finish_reason": turn.get("finish_reason"), "error": episode["error"]})
    _write(answers, options.output)
    say(f"{len(answers)} responses to {len(rows)} rows in {options.output}; roll eval score scores them")
    return Exit.DONE


def _question(row: Row) -> dict[str, Any]:
    for name in ("messages", "prompt", "question"):
        if row.values.get(name) is not None:
            return {"messages" if name == "messages" else "prompt": row.values[name]}
    raise ValueError(f"{row.where}: no prompt, question or messages; columns: {', '.join(row.values)}")


def _generation(options: argparse.Namespace, folder: Path, first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a validation that keeps what is said, and scores nothing."""
    temperature = options.temperature if options.temperature is not None else (1.0 if options.samples > 1 else 0.0)
    data = {"file_name": str(folder / "rows.jsonl"), "template": options.template, next(iter(first)): next(iter(first))}
    return {
        "pipeline": "rlvr",
        "exp_name": "generate",
        "executor": "inline" if options.engine == "hf_infer" else "ray",
        "output_dir": str(folder),
        "track_with": ["jsonl"],
        "pretrain": options.model,
        "val_only": True,
        "prompt_length": options.prompt_length,
        "response_length": options.max_new_tokens,
        "rewards": {"rows": {"name": "roll.cli.evaluate:unscored"}},
        "validation": {
            "data_args": data,
            "generating_args": {"temperature": temperature, "num_return_sequences": options.samples},
        },
        "actor_train": {"data_args": data, "training_args": {}},
        "actor_infer": {"strategy_args": {"strategy_name": options.engine}},
    }


# --- scores -----------------------------------------------------------------------------------------------------------


def score(options: argparse.Namespace) -> int:
    """Print a table by tag, and write the scores if asked for."""
    if (options.reward is None) == (options.config is None):
        raise ValueError("give either --reward, a function for all rows, or --config, whose rewards go by tags")
    if options.output is not None:
        _parquet(options.output, "-o")
    rows = _rows(options.file)
    missing = next((row for row in rows if not isinstance(row.values.get(options.response), str)), None)
    if missing is not None:
        raise ValueError(
            f"{missing.where}: no text in column {options.response!r}; columns: {', '.join(missing.values)}; name "
            "another with --response"
        )
    specs, domains = _specs(options)
    requests = [_request(row, options.response, domains) for row in rows]
    results = _scored(specs, requests)
    table = by_tag(requests, results, options.threshold, options.pass_at_k or ())
    _print(table)
    if options.output is not None:
        scores = [
            {**row.values, "score": result.reward.value if result.reward else None, "score_error": result.error}
            for row, result in zip(rows, results, strict=True)
        ]
        _write(scores, options.output)
        say(f"scores in {options.output}")
    failed = [result for result in results if result.reward is None]
    if failed:
        say(f"{len(failed)} responses have no score, e.g. {failed[0].id}: {failed[0].error}")
    return Exit.FAILED if len(failed) == len(results) else Exit.DONE


def _specs(options: argparse.Namespace) -> tuple[dict[str, RewardSpec], dict[str, str] | None]:
    """Return the functions by domain, and the domain of each tag; None: one for all."""
    if options.reward is not None:
        arguments = key_values(options.overrides, "an argument of the reward")
        return {"all": RewardSpec(name=options.reward, kwargs=arguments, key="--reward")}, None
    from roll.configs.parsing.loader import load_config
    from roll.pipelines.reward_router import reward_spec

    file = find_config(options.config)
    config = load_config(file.parent, file.stem, options.overrides)
    if not isinstance(config, RLVRConfig):
        raise ValueError(f"--config: {file} is a file of pipeline {config.pipeline}, expected one of pipeline rlvr")
    for domain, reward in config.rewards.items():
        if reward.models:
            raise ValueError(
                f"--config: rewards.{domain} asks {' and '.join(reward.models)}, which this command doesn't start; it "
                "scores with functions: leave the domain and its rows out, or score with --reward"
            )
    specs = {domain: reward_spec(config, domain) for domain in config.rewards}
    return specs, {tag: domain for domain in config.rewards for tag in config.tags_of(domain)}


def _request(row: Row, column: str, domains: Mapping[str, str] | None) -> RewardRequest:
    payload = dict(row.values)
    tag = str(payload.get("tag") or "all")
    if domains is None:
        domain = "all"
    elif tag in domains or len(set(domains.values())) == 1:
        domain = domains.get(tag, next(iter(domains.values())))
    else:
        raise ValueError(f"{row.where}: no domain of the configuration has tag {tag!r}; tags: {', '.join(domains)}")
    truth = next((payload[name] for name in TRUTHS if payload.get(name) is not None), None)
    if truth is not None:
        payload["ground_truth"] = truth
    question = json.dumps(payload.get("row", payload.get("prompt", payload.get("messages"))), default=str)
    task = Task(id=question, source=row.where, payload=payload, seed=0, tag=tag, domain=domain)
    return RewardRequest(
        id=row.where,
        domain=domain,
        response=payload[column],
        task=task,
        finish_reason=payload["finish_reason"] if payload.get("finish_reason") in ("stop", "length") else "stop",
    )


def _scored(specs: Mapping[str, RewardSpec], requests: Sequence[RewardRequest]) -> list[RewardResult]:
    from roll.rewards.reward_pool import RewardPool

    with RewardPool(specs) as pool:
        pool.wait_ready()
        return pool.score(requests)


def by_tag(
    requests: Sequence[RewardRequest], results: Sequence[RewardResult], threshold: float, ks: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each tag, and one for all: how many, mean score, accuracy and pass@k by question."""
    from roll.pipelines.validation import pass_at_k

    tags: dict[str, list[tuple[str, RewardResult]]] = defaultdict(list)
    for request, result in zip(requests, results, strict=True):
        tags[request.task.tag].append((request.task.id, replace(result, error="")))
    if len(tags) > 1:
        tags["(all)"] = [pair for pairs in list(tags.values()) for pair in pairs]
    table = []
    for tag, pairs in tags.items():
        questions: dict[str, list[bool]] = defaultdict(list)
        values = [result.reward.value for _, result in pairs if result.reward is not None]
        for question, result in pairs:
            if result.reward is not None:
                questions[question].append(result.reward.value >= threshold)
        row: dict[str, Any] = {"tag": tag, "rows": len(questions), "responses": len(pairs)}
        row["failed"] = len(pairs) - len(values)
        row["mean score"] = f"{fmean(values):.4g}" if values else "–"
        row["accuracy"] = f"{fmean(fmean(right) for right in questions.values()):.1%}" if values else "–"
        for k in ks:
            enough = [right for right in questions.values() if len(right) >= k]
            mean = fmean(pass_at_k(len(right), sum(right), k) for right in enough) if enough else None
            row[f"pass@{k}"] = "–" if mean is None else f"{mean:.1%}"
        table.append(row)
    return table


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(highlight=False, markup=False).print(table)


# --- files ------------------------------------------------------------------------------------------------------------


def _rows(file: str) -> list[Row]:
    rows = [row for source in resolve_sources(file) for row in read_rows(source)]
    if not rows:
        raise ValueError(f"{file}: no rows")
    return rows


def _parquet(file: Path, key: str) -> None:
    if file.suffix != ".parquet" or file.is_dir():
        raise ValueError(f"{key}: {file}: expected the name of a file that ends in .parquet")


def _write(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # of several types: as JSON
            columns[name] = pa.array([json.dumps(value, default=str) for value in values])
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    pq.write_table(pa.table(columns), temporary)
    temporary.replace(file)
