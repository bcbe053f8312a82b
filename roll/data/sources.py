"""Dataset rows as tasks, each error with the file and the line it is about.

`load_tasks` = `data_sources` (files, folders, globs, Hub ids, a class) -> `scan_rows` -> one `Task` per row.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll.configs.schema.reward_config import ANY_TAG
from roll.configs.schema.worker_config import DataArgs
from roll.data.curriculum import difficulty_of
from roll.data.messages import encodable, parse_messages, parse_tools
from roll.data.own_dataset import own_rows, own_source
from roll.data.procedural import PAYLOAD_KEY
from roll.data.quarantine import Quarantine
from roll.data.row_conversations import RowColumns, prompt_of, refuse_template_columns, with_system
from roll.types.trajectory import Task
from roll.utils.pictures import refuse_pictures
from roll.utils.readers import resolve_sources, scan_rows
from roll.utils.rows import BadRow, BadRowError, DataError, Row, Source, column_value, has_column
from roll.utils.seeding import stable_hash

if TYPE_CHECKING:
    from roll.data.row_pictures import PictureFolder

logger = logging.getLogger(__name__)

GROUND_TRUTH_COLUMNS = ("ground_truth", "answer", "response", "reward_model.ground_truth")
"""Where the expected answer is looked for, in this order, when no column is named; the last is where verl has it."""


def load_tasks(
    files: str | Sequence[str],
    *,
    columns: DataArgs | None = None,
    seed: int,
    default_tag: str | None = None,
    quarantine: Quarantine | None = None,
) -> list[Task]:
    """Read one or many sources (see `resolve_sources`) into tasks without a domain, in file and row order.

    A task's id is `<tag>:<id column>` or, without an id column, `<file>:<row number from 1>`; its seed depends on
    `seed` and the id alone. Its payload holds `prompt`, `messages` (one of them None), `ground_truth` where the
    dataset has one, and every other column. `default_tag` is the tag of rows in files without a tag column. `columns`
    says which columns mean what: a named one must be there, but for `id`, and for `tag` beside a `default_tag`; the
    defaults are the columns of these names, for the ground truth the first of `GROUND_TRUTH_COLUMNS`.

    Raises `DataError` naming file and line for a bad row (with a `quarantine`: for one too many), for a named column
    that isn't there, for an id that occurs twice, and for a source without rows.
    """
    columns = columns or DataArgs()
    sources = data_sources(files, columns)
    reader = TaskReader(columns, seed=seed, default_tag=default_tag, quarantine=quarantine or Quarantine())
    tasks: list[Task] = []
    first_use: dict[str, str] = {}
    for _, task, row in reader.read(sources):
        if task.id in first_use:
            first = f"was used before at {first_use[task.id]}; ids must be unique within a tag"
            raise DataError(f"{row.where}: id {task.id!r} {first}{ID_HINT}")
        first_use[task.id] = row.where
        tasks.append(task)
    reader.finish()
    return tasks


ID_HINT = ": mend the id column or remove it, then rows are numbered"


def data_sources(files: str | Sequence[str], columns: DataArgs) -> list[Source]:
    """Return the files' sources, and that of the dataset class if there is one."""
    if columns.prompt is not None and columns.messages is not None:
        raise DataError(
            f"data columns: prompt={columns.prompt!r} and messages={columns.messages!r} are both named; "
            "a task is made of one of them, set the other to null"
        )
    if columns.dataset is None:
        return resolve_sources(files)
    return [*(resolve_sources(files) if files else ()), own_source(columns.dataset)]


_ROWS_FOR_COLUMNS = 100
_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RowRoles:
    """The column of each role in one source, None where it has none."""

    prompt: str | None
    messages: str | None
    ground_truth: str | None
    id: str | None
    tag: str | None


class TaskReader:
    """Makes tasks of rows, one at a time, and leaves out bad ones and repeated prompts; see `load_tasks`.

    Ids may repeat: whoever keeps the tasks finds out.
    """

    def __init__(
        self,
        columns: DataArgs,
        *,
        seed: int,
        default_tag: str | None,
        quarantine: Quarantine,
        on_row: Callable[[Row], None] | None = None,
        keeps: bool = True,
    ) -> None:
        """Start without any row; `on_row` is called with each that can be read, good or bad. `keeps`: tasks stay in
        memory, so that rows with the same picture may share it."""
        self._on_row, self._pictures = on_row, _picture_folder(columns, keeps=keeps)
        self._columns, self._seed, self._default_tag = columns, seed, default_tag
        self._quarantine = quarantine
        self._roles: dict[str, RowRoles] = {}
        self._prompts = PromptFilter() if columns.deduplicate else None
        self._shown = time.monotonic()
        self._beside: set[str] = set()

    def read(self, sources: Sequence[Source]) -> Iterator[tuple[int, Task, Row]]:
        """Yield the number of the source, the task, and the row that it was made of."""
        for number, source in enumerate(sources):
            for item in self._read(source):
                self._count(source)
                if isinstance(item, BadRow):
                    self._quarantine.add(item.where, item.reason)
                    continue
                if self._on_row is not None:
                    self._on_row(item)
                try:
                    task = self.make(source, item)
                except BadRowError as error:
                    self._quarantine.add(item.where, str(error).removeprefix(f"{item.where}: "))
                    continue
                if self._prompts is not None and self._prompts.repeats(task):
                    self._quarantine.duplicates += 1
                    continue
                yield number, task, item

    def finish(self) -> None:
        """Raise `DataError` if no row that was read has a picture, where some should."""
        if self._pictures is not None:
            self._pictures.refuse_none()

    def used_columns(self, source: str) -> set[str]:
        """Return the columns of a source that are read here; all others are in the payload too, for rewards."""
        roles = self._roles[source]
        named = (
            roles.prompt, roles.messages, roles.ground_truth, roles.id, roles.tag, self._columns.curriculum.column,
            self._columns.images,
        )  # fmt: skip
        return {"tools", *self._beside, *(name for name in named if name is not None)}

    def _read(self, source: Source) -> Iterator[Row | BadRow]:
        items = own_rows(source, self._columns.dataset_args) if source.format == "own" else scan_rows(source)
        # The columns are those of the first rows together: one row that lacks one is a bad row, wherever it is.
        first = list(itertools.islice(items, _ROWS_FOR_COLUMNS))
        if not first:
            raise DataError(f"{source.name}: no rows")
        self._roles[source.name] = _roles_of(self._columns, first, self._default_tag)
        yield from first
        yield from items

    def _count(self, source: Source) -> None:
        self._quarantine.rows += 1
        if time.monotonic() - self._shown > _PROGRESS_SECONDS:
            self._shown = time.monotonic()
            logger.info("reading %s: %d rows so far", source.location, self._quarantine.rows)

    def make(self, source: Source, row: Row) -> Task:
        """Return the task of a row, again for one that `read` gave; raises `BadRowError`."""
        roles = self._roles[source.name]
        for role in _ROLES:
            column = getattr(roles, role)
            if column is not None and not has_column(row.values, column):
                raise BadRowError(
                    f"{row.where}: no column {column!r}, which other rows have; columns: {sorted(row.values)}"
                )
        late = next((name for name in GROUND_TRUTH_COLUMNS if has_column(row.values, name)), None)
        if roles.ground_truth is None and late is not None:
            raise BadRowError(
                f"{row.where}: column {late!r} (the ground truth), which the first rows don't have; give all rows one"
            )
        if PAYLOAD_KEY in row.values:  # verifiers trust what stands there: some evaluate it
            raise BadRowError(
                f"{row.where}: the column {PAYLOAD_KEY!r} is reserved for tasks made by data_args.procedural; rename it"
            )
        order = self._columns.curriculum
        if order.by == "column" and order.column is not None:
            try:
                difficulty_of(row.values, order.column)
            except ValueError as error:
                raise BadRowError(f"{row.where}: {error}") from None
        tag = _label(row, roles.tag) or self._default_tag or source.name
        row_id = _label(row, roles.id)
        task_id = f"{tag}:{row_id}" if row_id is not None else f"{source.name}:{row.number}"
        key = stable_hash(self._seed, "task", task_id)
        columns = RowColumns(row) if self._pictures is None else self._pictures.columns(source, row)
        payload = _payload(columns, roles, self._beside)
        return Task(id=task_id, source=source.name, payload=payload, seed=key, tag=tag, domain="")


def _roles_of(columns: DataArgs, items: Sequence[Row | BadRow], default_tag: str | None) -> RowRoles:
    """Return the column of each role in these rows of one file; raises when a named one isn't there."""
    rows = [row for row in items if isinstance(row, Row)]
    if not rows:
        bad = next(row for row in items if isinstance(row, BadRow))
        raise BadRowError(f"{bad.where}: {bad.reason}")
    where, there = rows[0].where, {name for row in rows for name in row.values}
    defaults = {**{role: (role,) for role in _ROLES}, "ground_truth": GROUND_TRUTH_COLUMNS}
    if default_tag is None:
        defaults["tag"] = ("tag", VERL_TAG)
    roles: dict[str, str | None] = {}
    for role in _ROLES:
        named = getattr(columns, role)
        if named is not None and not any(has_column(row.values, named) for row in rows):
            if role == "id" or (role == "tag" and default_tag is not None):
                roles[role] = None
                continue
            hint = "; give its rows a default_tag" if role == "tag" else ""
            raise DataError(f"{where}: no column {named!r} (named for {role}); columns: {sorted(there)}{hint}")
        # The first that all rows have, else the first that any has.
        in_all = (name for name in defaults[role] if all(has_column(row.values, name) for row in rows))
        in_any = (name for name in defaults[role] if any(has_column(row.values, name) for row in rows))
        roles[role] = named or next(in_all, None) or next(in_any, None)
    if columns.prompt is not None:
        roles["messages"] = None
    elif columns.messages is not None:
        roles["prompt"] = None
    if roles["prompt"] is not None and roles["messages"] is not None:
        raise DataError(
            f"{where}: has both a `prompt` and a `messages` column; name one of them in data_args "
            "(prompt: prompt, or messages: messages)"
        )
    if roles["prompt"] is None and roles["messages"] is None:
        raise DataError(
            f"{where}: no `prompt` or `messages` column; columns: {sorted(there)}. Name the one that holds the "
            "question in data_args, e.g. prompt: question"
        )
    return RowRoles(**roles)


_ROLES = ("prompt", "messages", "ground_truth", "id", "tag")
VERL_TAG = "data_source"


def _picture_folder(columns: DataArgs, *, keeps: bool) -> PictureFolder | None:
    if columns.images is None:
        return None
    from roll.data.row_pictures import PictureFolder

    return PictureFolder(columns.images, shares=keeps)


def _payload(columns: RowColumns, roles: RowRoles, beside: set[str]) -> dict[str, Any]:
    """Return a row's payload; the columns that the prompt was made of are added to `beside`."""
    row = columns.row
    payload: dict[str, Any] = dict(row.values)
    payload["prompt"] = payload["messages"] = None
    asked = columns.optional(roles.prompt) if roles.prompt is not None else None
    if roles.prompt is None or (isinstance(asked, Sequence) and not isinstance(asked, str)):  # as verl has them
        written = columns.get(roles.messages, "messages") if roles.messages is not None else asked
        payload["messages"] = list(with_system(columns, tuple(parse_messages(written, row.where))))
    else:
        _prompt(asked, row.where)
        messages = prompt_of(columns, roles.prompt) or ()
        if len(messages) == 1:
            payload["prompt"] = messages[0]["content"]
        else:  # a system message, or turns before
            payload["messages"] = list(messages)
    columns.place_into(payload)
    beside.update(columns.used)
    refuse_template_columns(row)
    texts = [payload["prompt"]] if payload["messages"] is None else [m["content"] for m in payload["messages"]]
    refuse_pictures(row, texts, shown=columns.picture_columns)
    parse_tools(payload.get("tools"), row.where)
    if roles.ground_truth is not None:
        truth = column_value(row.values, roles.ground_truth)
        if truth is None or truth == "" or (isinstance(truth, float) and math.isnan(truth)):
            raise BadRowError(f"{row.where}: column {roles.ground_truth!r} (the ground truth) is empty")
        payload["ground_truth"] = truth
    return payload


def _label(row: Row, column: str | None) -> str | None:
    """Return an id or a tag as text; raises when the row leaves it empty."""
    if column is None:
        return None
    value = column_value(row.values, column)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise BadRowError(f"{row.where}: column {column!r} is {value!r}, expected a non-empty string or an integer")
    return str(value)


def _prompt(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"{where}: the prompt is {value!r:.80}, expected a non-empty string")
    return encodable(value, where)


class PromptFilter:
    """Leaves out tasks whose prompt an earlier one has, the exact text or messages. 100 bytes of memory per task."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def repeats(self, task: Task) -> bool:
        """Return whether the prompt was seen before."""
        key = prompt_key(task)
        if key in self._keys:
            return True
        self._keys.add(key)
        return False


def prompt_key(task: Task) -> int:
    """Return a number that is the same for equal prompts: the text, or all that the messages say, and the tools."""
    messages, tools = task.payload.get("messages"), task.payload.get("tools")
    more = () if tools is None else (str(tools),)
    return stable_hash(
        "prompt",
        *more,
        task.payload["prompt"] if messages is None else json.dumps(messages, sort_keys=True, default=str),
    )


def prompt_texts(task: Task) -> list[str]:
    """Return what a prompt says: its text, or those of its messages."""
    messages = task.payload.get("messages")
    return [task.payload["prompt"]] if messages is None else [message["content"] for message in messages]


def owner_by_tag(tag_included: Mapping[str, Sequence[str]]) -> Callable[[str], str | None]:
    """Return what gives a tag's domain, or None; `tag_included` are the tags of each domain."""
    owners = {tag: domain for domain, tags in tag_included.items() for tag in tags}
    return lambda tag: owners.get(tag, owners.get(ANY_TAG))


def route_by_tag(tasks: Iterable[Task], tag_included: Mapping[str, Sequence[str]]) -> dict[str, list[Task]]:
    """Group tasks by domain, `tag_included` being the tags of each domain; the domain is written into the task.

    Raises `DataError` for a tag that belongs to no domain. A domain may end up empty: generated tasks may fill it, and
    `TaskSource` refuses it otherwise.
    """
    owner = owner_by_tag(tag_included)
    routed: dict[str, list[Task]] = {domain: [] for domain in tag_included}
    lost: Counter[str] = Counter()
    for task in tasks:
        domain = owner(task.tag)
        if domain is not None:
            routed[domain].append(replace(task, domain=domain))
        else:
            lost[task.tag] += 1
    if lost:
        raise no_domain(lost, tag_included)
    return routed


def no_domain(lost: Mapping[str, int], tag_included: Mapping[str, Sequence[str]]) -> DataError:
    """Return the error for rows whose tag belongs to no domain, counted by tag."""
    known = {domain: list(tags) for domain, tags in tag_included.items()}
    shown = dict(Counter(lost).most_common(_TAGS_SHOWN))
    more = f" and {len(lost) - len(shown)} more" if len(lost) > len(shown) else ""
    return DataError(
        f"no domain includes the tags {shown}{more} (tag: rows), {sum(lost.values())} rows in all; domains and their "
        f'tags: {known}. List them in a rewards.<domain>.tag_included ("*" takes all others); data_args.tag names the '
        "column that tags come from"
    )


_TAGS_SHOWN = 20
