"""Dataset rows as tasks, each error with the file and the line it is about.

`load_tasks` = `resolve_sources` (files, folders, globs, Hub ids) -> `readers.read_rows` -> one `Task` per row.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.configs.schema.worker_config import DataArgs
from roll.data.procedural import PAYLOAD_KEY
from roll.types.episode import Task
from roll.utils.readers import DataError, Row, Source, read_rows, resolve_sources
from roll.utils.seeding import stable_hash

GROUND_TRUTH_COLUMNS = ("ground_truth", "answer", "response")
"""Where the expected answer is looked for, in this order, when no column is named."""


def load_tasks(
    files: str | Sequence[str], *, columns: DataArgs | None = None, seed: int, default_tag: str | None = None
) -> list[Task]:
    """Read one or many sources (see `resolve_sources`) into tasks without a domain, in file and row order.

    A task's id is `<tag>:<id column>` or, without an id column, `<file>:<row number from 1>`; its seed depends on
    `seed` and the id alone. Its payload holds `prompt`, `messages` (one of them None), `ground_truth` where the
    dataset has one, and every other column. `default_tag` is the tag of rows in files without a tag column. `columns`
    says which columns mean what: a named one must be there, but for `id`, and for `tag` beside a `default_tag`; the
    defaults are the columns of these names, for the ground truth the first of `GROUND_TRUTH_COLUMNS`.

    Raises `DataError` naming file and line for a bad row, for a named column that isn't there, for an id that occurs
    twice, and for a source without rows.
    """
    columns = columns or DataArgs()
    if columns.prompt is not None and columns.messages is not None:
        raise DataError(
            f"data columns: prompt={columns.prompt!r} and messages={columns.messages!r} are both named; "
            "a task is made of one of them, set the other to null"
        )
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for source in resolve_sources(files):
        roles: dict[str, str | None] | None = None
        for item in read_rows(source):
            roles = roles or _roles(columns, item, default_tag)
            task = _task(item, source, roles, seed, default_tag or source.name)
            if task.id in seen:
                mend = f": mend column {roles['id']!r} or remove it, then rows are numbered" if roles["id"] else ""
                first = f"was used before at {seen[task.id]}; ids must be unique within a tag"
                raise DataError(f"{item.where}: id {task.id!r} {first}{mend}")
            seen[task.id] = item.where
            tasks.append(task)
        if roles is None:
            raise DataError(f"{source.name}: no rows")
    return tasks


def _roles(columns: DataArgs, row: Row, default_tag: str | None) -> dict[str, str | None]:
    """Return the column of each role in this row's file; raises when a named one isn't there."""
    there = set(row.values)
    roles: dict[str, str | None] = {}
    for role in ("prompt", "messages", "ground_truth", "id", "tag"):
        named = getattr(columns, role)
        if named is not None and named not in there:
            if role == "id" or (role == "tag" and default_tag is not None):
                roles[role] = None
                continue
            hint = "; give its rows a default_tag" if role == "tag" else ""
            raise DataError(f"{row.where}: no column {named!r} (named for {role}); columns: {sorted(there)}{hint}")
        defaults = GROUND_TRUTH_COLUMNS if role == "ground_truth" else (role,)
        roles[role] = named or next((name for name in defaults if name in there), None)
    if columns.prompt is not None:
        roles["messages"] = None
    elif columns.messages is not None:
        roles["prompt"] = None
    if roles["prompt"] is not None and roles["messages"] is not None:
        raise DataError(
            f"{row.where}: has both a `prompt` and a `messages` column; name one of them in data_args "
            "(prompt: prompt, or messages: messages)"
        )
    if roles["prompt"] is None and roles["messages"] is None:
        raise DataError(
            f"{row.where}: no `prompt` or `messages` column; columns: {sorted(there)}. Name the one that holds the "
            "question in data_args, e.g. prompt: question"
        )
    return roles


def _task(row: Row, source: Source, roles: Mapping[str, str | None], seed: int, default_tag: str) -> Task:
    missing = [column for column in roles.values() if column is not None and column not in row.values]
    if missing:
        raise DataError(
            f"{row.where}: no column {missing[0]!r}, which earlier rows have; columns: {sorted(row.values)}"
        )
    if PAYLOAD_KEY in row.values:  # verifiers trust what stands there: some evaluate it
        raise DataError(
            f"{row.where}: the column {PAYLOAD_KEY!r} is reserved for tasks made by data_args.procedural; rename it"
        )
    payload: dict[str, Any] = dict(row.values)
    payload["prompt"] = payload["messages"] = None
    if roles["messages"] is not None:
        payload["messages"] = parse_messages(row.values[roles["messages"]], row.where)
    else:
        payload["prompt"] = _prompt(row.values[roles["prompt"] or ""], row.where)
    if roles["ground_truth"] is not None:
        truth = row.values[roles["ground_truth"]]
        if truth is None or truth == "" or (isinstance(truth, float) and math.isnan(truth)):
            raise DataError(f"{row.where}: column {roles['ground_truth']!r} (the ground truth) is empty")
        payload["ground_truth"] = truth
    tag = _label(row, roles["tag"]) or default_tag
    row_id = _label(row, roles["id"])
    task_id = f"{tag}:{row_id}" if row_id is not None else f"{source.name}:{row.number}"
    key = stable_hash(seed, "task", task_id)
    return Task(id=task_id, source=source.name, payload=payload, seed=key, tag=tag, domain="")


def _label(row: Row, column: str | None) -> str | None:
    """Return an id or a tag as text; raises when the row leaves it empty."""
    if column is None:
        return None
    value = row.values[column]
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{row.where}: column {column!r} is {value!r}, expected a non-empty string or an integer")
    return str(value)


def _prompt(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: the prompt is {value!r:.80}, expected a non-empty string")
    return encodable(value, where)


def encodable(text: str, where: str) -> str:
    """Return `text`, unless it holds what no tokenizer takes: JSON can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise DataError(f"{where}: the text has {half!r} at {error.start}, half of a surrogate pair; mend it") from None
    return text


def parse_messages(value: Any, where: str) -> list[dict[str, str]]:
    """Parse chat messages from a list or a JSON string; raises `DataError` unless a model could answer them."""
    messages = parse_conversation(value, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message is the assistant's, so there is nothing to answer; drop it")
    return messages


_SAID_ELSEWHERE = ("tool_calls", "function_call", "reasoning_content")
"""Keys of a message that hold something said."""


def parse_conversation(value: Any, where: str) -> list[dict[str, str]]:
    """Parse chat messages from a list or a JSON string, whoever speaks last; raises `DataError`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: messages is a string but not JSON: {error}") from error
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: messages is {value!r:.80}, expected a non-empty list of {{role, content}}")
    messages = []
    for position, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = _text_of(message.get("content")) if isinstance(message, Mapping) else None
        if not isinstance(role, str) or content is None:
            raise DataError(
                f"{where}: messages[{position}] is {message!r:.80}, expected "
                "{'role': ..., 'content': ...} with strings; content may be a list of {'type': 'text', 'text': ...}"
            )
        if lost := next((key for key in _SAID_ELSEWHERE if message.get(key)), None):
            raise DataError(
                f"{where}: messages[{position}] has {lost}, of which templates would see nothing; expected all that is "
                "said in content. Write it there, as the model shall write it, or remove it"
            )
        messages.append({"role": role, "content": encodable(content, where)})
    return messages


def _text_of(content: Any) -> str | None:
    """Return a message's text, written as a string or as a list of text parts; None for anything else."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content if isinstance(content, str) else None
    text_parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [part["text"] for part in text_parts if isinstance(part.get("text"), str)]
    return "".join(texts) if texts and len(texts) == len(content) else None


def route_by_tag(tasks: Iterable[Task], tag_included: Mapping[str, Sequence[str]]) -> dict[str, list[Task]]:
    """Group tasks by domain, `tag_included` being the tags of each domain; the domain is written into the task.

    Raises `DataError` for a tag that belongs to no domain. A domain may end up empty: generated tasks may fill it, and
    `TaskSource` refuses it otherwise.
    """
    owner = {tag: domain for domain, tags in tag_included.items() for tag in tags}
    routed: dict[str, list[Task]] = {domain: [] for domain in tag_included}
    lost: Counter[str] = Counter()
    for task in tasks:
        if task.tag in owner:
            routed[owner[task.tag]].append(replace(task, domain=owner[task.tag]))
        else:
            lost[task.tag] += 1
    if lost:
        known = {domain: list(tags) for domain, tags in tag_included.items()}
        raise DataError(f"no domain includes the tags {dict(lost)} (tag: rows); domains and their tags: {known}")
    return routed
