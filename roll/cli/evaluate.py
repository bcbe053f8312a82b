"""`roll eval score`: what the responses in a file are worth. generate.py makes such a file."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll.cli.accuracy_table import (
    ScoredResponse,
    digest,
    distinguishing_columns,
    print_table,
    question_key,
    results_table,
)
from roll.cli.command_parser import key_values
from roll.cli.exits import Exit
from roll.configs.parsing.find import find_config
from roll.configs.schema.reward_config import ANY_TAG
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.data.thought_spans import ends_with_thought
from roll.rewards.base import RewardRequest, RewardResult, RewardSpec
from roll.types.trajectory import Task
from roll.utils.readers import Row, read_rows, resolve_sources
from roll.utils.rows import column_value, has_column
from roll.utils.terminal import say

TRUTHS = ("ground_truth", "answer", "reward_model.ground_truth")
"""Columns in which the expected answer is looked for; the last is where verl has it."""
PROMPTS = ("row", "prompt", "messages", "question")
"""Columns in which the question is looked for."""
TAGS = ("tag", "data_source")
"""Columns that say which kind of task a row is."""


def score(options: argparse.Namespace) -> int:
    """Print a table by tag, and write the scores if asked for."""
    if (options.reward is None) == (options.config is None):
        raise ValueError("give either --reward, a function for all rows, or --config, whose rewards go by tags")
    if options.output is not None:
        check_output(options.output, "-o")
    ks, votes = _counts(options.pass_at_k, "--pass_at_k"), _counts(options.maj_at_k, "--maj_at_k")
    rows = read_all(options.file)
    specs, domains = _specs(options)
    tasks = [_task(row, options, domains) for row in rows]
    questions = [_question(row, task, options) for row, task in zip(rows, tasks, strict=True)]
    answers = [
        answer
        for row, task, question in zip(rows, tasks, questions, strict=True)
        for answer in _answers(row, task, question, options.response_key)
    ]
    scores = iter(_scored(specs, [answer.request for answer in answers if answer.text is not None]))
    results = [None if answer.text is None else next(scores) for answer in answers]
    responses = [
        ScoredResponse(question=answer.question, tag=answer.request.task.tag, result=result)
        for answer, result in zip(answers, results, strict=True)
    ]
    print_table(results_table(responses, options.threshold, ks, votes))
    if options.output is not None:
        write_rows(_with_scores(rows, results, options.response_key), options.output)
        say(f"scores in {options.output}")
    _report_left_out(results)
    _report_questions(rows, tasks, questions, answers, max([*ks, *votes], default=1), options)
    return Exit.FAILED if all(result is None or result.reward is None for result in results) else Exit.DONE


@dataclass(frozen=True, slots=True)
class _Answer:
    """One response of a row, or the place of one that isn't there."""

    text: str | None
    request: RewardRequest
    question: str


def _counts(values: Sequence[int] | None, option: str) -> list[int]:
    if small := [value for value in values or () if value < 1]:
        raise ValueError(f"{option}: got {small[0]}, expected at least 1")
    return list(dict.fromkeys(values or ()))


def _question(row: Row, task: Task, options: argparse.Namespace) -> str:
    """Return what responses to one question share: the column that is named, or the row."""
    if options.prompt_key is not None and (prompt := column_value(row.values, options.prompt_key)) is not None:
        return digest([prompt, task.payload.get("ground_truth"), task.tag])
    return question_key(row.values, options.response_key)


def _answers(row: Row, task: Task, question: str, column: str) -> list[_Answer]:
    """Return the responses of a row; one that is absent for a row that has none."""
    texts = _responses(row, column) or [None]
    endings = column_value(row.values, "finish_reason")
    if not isinstance(endings, (list, tuple)) or len(endings) != len(texts):
        endings = [endings] * len(texts)
    return [
        _Answer(text, _request(text or "", task, ending), question) for text, ending in zip(texts, endings, strict=True)
    ]


def _report_left_out(results: Sequence[RewardResult | None]) -> None:
    """Say how many responses are absent, and how many have no score."""
    if absent := sum(result is None for result in results):
        say(
            f"{absent} of {len(results)} responses are null: they count as not right in accuracy, pass@k and maj@k, "
            "and have no score"
        )
    if failed := [result for result in results if result is not None and result.reward is None]:
        say(
            f"{len(failed)} responses have no score and are left out of every mean, e.g. {failed[0].id}: "
            f"{failed[0].error}"
        )


def _report_questions(
    rows: Sequence[Row],
    tasks: Sequence[Task],
    questions: Sequence[str],
    answers: Sequence[_Answer],
    draws: int,
    options: argparse.Namespace,
) -> None:
    """Say where there are too few responses to draw from, and which rows look like one question but aren't."""
    most = max(Counter(answer.question for answer in answers).values())
    if draws > most:
        say(f"no question has {draws} responses; {most} at most")
    if options.prompt_key is not None:
        return
    shared = [
        question if (prompt := _prompt(row, options)) is None else digest([prompt, task.payload.get("ground_truth")])
        for row, task, question in zip(rows, tasks, questions, strict=True)
    ]
    count, columns = distinguishing_columns([row.values for row in rows], questions, shared, options.response_key)
    if count:
        say(
            f"{count} rows have the prompt and the expected answer of an earlier row, but differ in column "
            f"{', '.join(columns)}: each is a question of its own. If they are further responses to one question, name "
            "the column that these share with --prompt_key"
        )


def _prompt(row: Row, options: argparse.Namespace) -> Any:
    return _named(row, options.prompt_key, "--prompt_key", PROMPTS)


def _responses(row: Row, column: str) -> list[str | None]:
    """Return what a row's column has: a text, or a list of texts as verl writes several to one prompt; None: nothing
    was said."""
    value = column_value(row.values, column, 0)
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(
            f"{row.where}: no text in column {column!r}; columns: {', '.join(row.values)}; name another with "
            "--response_key"
        )
    return texts


def _with_scores(rows: Sequence[Row], results: Sequence[RewardResult | None], column: str) -> list[dict[str, Any]]:
    """Return the rows with their scores: lists where the responses are lists."""
    remaining, scored = iter(results), []
    for row in rows:
        texts = _responses(row, column)
        own = [next(remaining) for _ in texts or [None]][: len(texts)]
        scores = [None if result is None or result.reward is None else result.reward.value for result in own]
        errors = ["there is no response" if result is None else result.error for result in own]
        several = isinstance(column_value(row.values, column), (list, tuple))
        scored.append(
            {**row.values, "score": scores if several else scores[0], "score_error": errors if several else errors[0]}
        )
    return scored


def _specs(options: argparse.Namespace) -> tuple[dict[str, RewardSpec], dict[str, str] | None]:
    """Return the functions by domain, and the domain of each tag; None: one for all."""
    if options.reward is not None:
        arguments = key_values(options.overrides, "an argument of the reward")
        return {"all": RewardSpec(name=options.reward, kwargs=arguments, key="--reward")}, None
    from roll.configs.parsing.loader import load_config
    from roll.pipelines.rollouts.reward_router import reward_spec

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


def _task(row: Row, options: argparse.Namespace, domains: Mapping[str, str] | None) -> Task:
    """Return the row as a task, with its expected answer where rewards look for it."""
    payload = dict(row.values)
    source = _named(row, options.data_source_key, "--data_source_key", TAGS)
    tag = "all" if source is None else str(source)
    if domains is None:
        domain = "all"
    elif tag in domains or ANY_TAG in domains or len(set(domains.values())) == 1:
        domain = domains.get(tag, domains.get(ANY_TAG, next(iter(domains.values()))))
    else:
        raise ValueError(f"{row.where}: no domain of the configuration has tag {tag!r}; tags: {', '.join(domains)}")
    columns = [column for column in TRUTHS if column != options.response_key]
    truth = _named(row, options.reward_model_key, "--reward_model_key", columns)
    if isinstance(truth, Mapping) and "ground_truth" in truth:
        truth = truth["ground_truth"]
    if truth is not None:
        payload["ground_truth"] = truth
    if options.data_source_key is not None:
        payload["data_source"] = source  # where functions of verl's look for it
    prompt = _prompt(row, options)  # refuses a column that isn't there
    task = Task(id=row.where, source=row.where, payload=payload, seed=0, tag=tag, domain=domain)
    return replace(task, opens_thought=True) if isinstance(prompt, str) and ends_with_thought(prompt) else task


def _request(response: str, task: Task, finish_reason: Any) -> RewardRequest:
    return RewardRequest(
        id=task.id,
        domain=task.domain,
        response=response,
        task=task,
        finish_reason=finish_reason if finish_reason in ("stop", "length") else "stop",
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
    """Return whether a type has objects without keys, for which parquet has no place."""
    inside = [kind.field(i).type for i in range(kind.num_fields)]
    return (not inside and str(kind) == "struct<>") or any(map(_has_empty_struct, inside))
