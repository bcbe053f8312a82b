"""`roll eval score`: what the responses in a file are worth. generate.py makes such a file."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from roll.cli.exits import Exit, say
from roll.cli.key_values import key_values
from roll.configs.parsing.find import find_config
from roll.configs.schema.reward_config import ANY_TAG
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.data.opened_thoughts import ends_with_thought
from roll.rewards.base import RewardRequest, RewardResult, RewardSpec
from roll.types.episode import Task
from roll.utils.readers import Row, read_rows, resolve_sources
from roll.utils.rows import column_value, has_column

TRUTHS = ("ground_truth", "answer", "reward_model.ground_truth")
"""Columns in which the expected answer is looked for; the last is where verl has it."""
TAGS = ("tag", "data_source")
"""Columns that say which kind of task a row is."""


def score(options: argparse.Namespace) -> int:
    """Print a table by tag, and write the scores if asked for."""
    if (options.reward is None) == (options.config is None):
        raise ValueError("give either --reward, a function for all rows, or --config, whose rewards go by tags")
    if options.output is not None:
        check_output(options.output, "-o")
    rows = read_all(options.file)
    specs, domains = _specs(options)
    said = [(row, text) for row in rows for text in _responses(row, options.response_key)]
    requests = [_request(row, text or "", options, domains) for row, text in said]
    silent = {number for number, (_, text) in enumerate(said) if text is None}
    scored = iter(_scored(specs, [request for number, request in enumerate(requests) if number not in silent]))
    results = [_unsaid(one) if number in silent else next(scored) for number, one in enumerate(requests)]
    table = by_tag(requests, results, options.threshold, options.pass_at_k or (), options.maj_at_k or ())
    _print(table)
    if options.output is not None:
        write_rows(_with_scores(rows, results, options.response_key), options.output)
        say(f"scores in {options.output}")
    failed = [result for result in results if result.reward is None]
    if failed:
        say(f"{len(failed)} responses have no score, e.g. {failed[0].id}: {failed[0].error}")
    return Exit.FAILED if len(failed) == len(results) else Exit.DONE


def _responses(row: Row, column: str) -> list[str | None]:
    """Return what a row's column has: a text, or a list of texts as verl writes several to one prompt; None: nothing
    was said."""
    value = column_value(row.values, column, 0)
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(text is None or isinstance(text, str) for text in found):
        raise ValueError(
            f"{row.where}: no text in column {column!r}; columns: {', '.join(row.values)}; name another with "
            "--response_key"
        )
    return found


def _unsaid(request: RewardRequest) -> RewardResult:
    return RewardResult(id=request.id, status="error", reward=None, error="there is no response")


def _with_scores(rows: Sequence[Row], results: Sequence[RewardResult], column: str) -> list[dict[str, Any]]:
    """Return the rows with their scores: lists where the responses are lists."""
    left, found = iter(results), []
    for row in rows:
        own = [next(left) for _ in _responses(row, column)]
        scores = [result.reward.value if result.reward else None for result in own]
        errors = [result.error for result in own]
        several = isinstance(column_value(row.values, column), (list, tuple))
        found.append(
            {**row.values, "score": scores if several else scores[0], "score_error": errors if several else errors[0]}
        )
    return found


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


def _request(row: Row, response: str, options: argparse.Namespace, domains: Mapping[str, str] | None) -> RewardRequest:
    payload = dict(row.values)
    source = _named(row, options.data_source_key, "--data_source_key", TAGS)
    tag = "all" if source is None else str(source)
    if domains is None:
        domain = "all"
    elif tag in domains or ANY_TAG in domains or len(set(domains.values())) == 1:
        domain = domains.get(tag, domains.get(ANY_TAG, next(iter(domains.values()))))
    else:
        raise ValueError(f"{row.where}: no domain of the configuration has tag {tag!r}; tags: {', '.join(domains)}")
    truth = _named(row, options.reward_model_key, "--reward_model_key", TRUTHS)
    if isinstance(truth, Mapping) and "ground_truth" in truth:
        truth = truth["ground_truth"]
    if truth is not None:
        payload["ground_truth"] = truth
    if options.data_source_key is not None:
        payload["data_source"] = source  # where functions of verl's look for it
    prompt = _named(row, options.prompt_key, "--prompt_key", ("row", "prompt", "messages", "question"))
    question = json.dumps(prompt, default=str)
    task = Task(id=question, source=row.where, payload=payload, seed=0, tag=tag, domain=domain)
    if isinstance(prompt, str) and ends_with_thought(prompt):
        task = replace(task, opens_thought=True)
    return RewardRequest(
        id=row.where,
        domain=domain,
        response=response,
        task=task,
        finish_reason=payload["finish_reason"] if payload.get("finish_reason") in ("stop", "length") else "stop",
    )


def _named(row: Row, column: str | None, option: str, usual: Sequence[str]) -> Any:
    """Return the value of the column that an option names, else of the first of the usual ones that has one."""
    if column is not None and not has_column(row.values, column):
        raise ValueError(f"{option}: {row.where} has no column {column!r}; columns: {', '.join(row.values)}")
    values = (column_value(row.values, name) for name in ([column] if column is not None else usual))
    return next((value for value in values if value is not None), None)


def _scored(specs: Mapping[str, RewardSpec], requests: Sequence[RewardRequest]) -> list[RewardResult]:
    from roll.rewards.reward_pool import RewardPool

    with RewardPool(specs) as pool:
        pool.wait_ready()
        return pool.score(requests)


def by_tag(
    requests: Sequence[RewardRequest],
    results: Sequence[RewardResult],
    threshold: float,
    ks: Sequence[int],
    votes: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Return a row for each tag, and one for all: how many, mean score, accuracy, pass@k and maj@k by question."""
    from roll.pipelines.validation import majority_of_k, pass_at_k

    tags: dict[str, list[tuple[str, RewardResult]]] = defaultdict(list)
    for request, result in zip(requests, results, strict=True):
        tags[request.task.tag].append((request.task.id, replace(result, error="")))
    if len(tags) > 1:
        tags["(all)"] = [pair for pairs in list(tags.values()) for pair in pairs]
    table = []
    for tag, pairs in tags.items():
        questions: dict[str, list[bool]] = defaultdict(list)
        answers: dict[str, list[str | None]] = defaultdict(list)
        values = [result.reward.value for _, result in pairs if result.reward is not None]
        for question, result in pairs:
            if result.reward is not None:
                questions[question].append(result.reward.value >= threshold)
                answers[question].append(result.reward.answer)
        row: dict[str, Any] = {"tag": tag, "rows": len(questions), "responses": len(pairs)}
        row["failed"] = len(pairs) - len(values)
        row["mean score"] = f"{fmean(values):.4g}" if values else "–"
        row["accuracy"] = f"{fmean(fmean(right) for right in questions.values()):.1%}" if values else "–"
        for k in ks:
            enough = [right for right in questions.values() if len(right) >= k]
            mean = fmean(pass_at_k(len(right), sum(right), k) for right in enough) if enough else None
            row[f"pass@{k}"] = "–" if mean is None else f"{mean:.1%}"
        said = any(answer is not None for of in answers.values() for answer in of)
        for k in votes:
            voted = [
                majority_of_k(answers[question], [float(one) for one in right], k, question)
                for question, right in questions.items()
                if said and len(right) >= k
            ]
            row[f"maj@{k}"] = f"{fmean(voted):.1%}" if voted else "–"
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


def read_all(file: str) -> list[Row]:
    """Return all rows of what is named; raises `ValueError` where there are none."""
    rows = [row for source in resolve_sources(file) for row in read_rows(source)]
    if not rows:
        raise ValueError(f"{file}: no rows")
    return rows


def check_output(file: Path, key: str) -> None:
    """Raise `ValueError` for a name that `write_rows` can't write."""
    if file.suffix not in (".parquet", ".jsonl") or file.is_dir():
        raise ValueError(f"{key}: {file}: expected the name of a file that ends in .parquet or .jsonl")


def write_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write a parquet or jsonl file, whole or not at all; columns that parquet can't hold become JSON there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    if file.suffix == ".jsonl":
        temporary.write_text(
            "".join(f"{json.dumps(row, ensure_ascii=False, default=str)}\n" for row in rows),
            encoding="utf-8",
            errors="backslashreplace",
        )
    else:
        _write_parquet(rows, temporary)
    temporary.replace(file)


def _write_parquet(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            column = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError):  # of several types, say
            column = None
        if column is None or _has_empty_struct(column.type):
            column = pa.array([json.dumps(value, default=str) for value in values])
        columns[name.encode("utf-8", "backslashreplace").decode()] = column
    pq.write_table(pa.table(columns), file)


def _has_empty_struct(kind: Any) -> bool:
    """Whether a type has objects without keys, for which parquet has no place."""
    inside = [kind.field(i).type for i in range(kind.num_fields)]
    return (not inside and str(kind) == "struct<>") or any(map(_has_empty_struct, inside))
