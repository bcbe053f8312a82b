"""From the columns of a row to a conversation, for all that learn from finished rows: fine-tuning and preferences.

| form | prompt | response |
|---|---|---|
| texts, or lists of messages (TRL) | `prompt` | `completion`, `output`, `response`; of pairs `chosen`, `rejected` |
| whole conversations | - | `messages`, or ShareGPT's `conversations` |
| Alpaca's | `instruction`, `input` (Dolly's `context`), `history` | `output` |

A column `system` holds the system message, `tools` the tools that are offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roll.data.messages import LEARNING_FLAGS, RowMessage, encodable, parse_conversation, parse_tools
from roll.utils.pictures import refuse_pictures
from roll.utils.rows import BadRowError, Row, column_value, has_column

Messages = tuple[RowMessage, ...]

_PROMPT_COLUMNS = ("prompt", "conversations", "messages", "instruction")
CONVERSATION_COLUMNS = ("messages", "conversations")
"""Where there is no column with the response, these end with it."""
_NEITHER_ONE_NOR_NONE = (None, True, 1, 1.0, "", "1", "true")
_TEMPLATE_COLUMNS = ("chat_template_kwargs", "enable_thinking")
"""TRL's and verl's columns of variables for the chat template."""


class RowColumns:
    """The columns of one row, and which of them were read."""

    def __init__(self, row: Row) -> None:
        """Start with none read."""
        self.row, self.where = row, row.where
        self.used: set[str] = set()
        self.picture_columns: tuple[str, ...] = ()
        """Those whose pictures are shown to the model."""

    def has(self, column: str) -> bool:
        """Return whether the row has the column."""
        return has_column(self.row.values, column)

    def get(self, column: str, role: str) -> Any:
        """Return a column that must be there; raises `BadRowError`."""
        if not self.has(column):
            columns = sorted(self.row.values)
            raise BadRowError(f"{self.where}: no column {column!r} (named for {role}); columns: {columns}")
        return self.optional(column)

    def optional(self, column: str) -> Any:
        """Return a column, None where there is none."""
        self.used.add(column)
        return column_value(self.row.values, column)

    def placed(self, messages: Messages) -> Messages:
        """Return messages with the pictures that the row has for them; rows of text have none."""
        return messages

    def place_into(self, payload: dict[str, Any]) -> None:
        """Put the pictures that the row has for its prompt into the payload of its task; rows of text have none."""

    def first(self, names: Iterable[str]) -> str | None:
        """Return the first of these columns that the row has."""
        return next((name for name in names if self.has(name)), None)


def prompt_of(columns: RowColumns, column: str | None) -> Messages | None:
    """Return the prompt that stands in a column of its own, in this one or where prompts usually are; None without."""
    column = column or columns.first(_PROMPT_COLUMNS)
    if column is None:
        return None
    value, where = columns.get(column, "prompt"), columns.where
    if isinstance(value, str):
        return _text_prompt(columns, column, value)
    if not isinstance(value, Sequence):
        raise BadRowError(f"{where}: the prompt is {value!r:.80}, expected a non-empty string or a list of messages")
    messages = with_system(columns, tuple(parse_conversation(value, where, column)))
    if messages[-1]["role"] == "assistant":
        raise BadRowError(f"{where}: the prompt ends with the assistant's words, so there is nothing to answer")
    return messages


def _text_prompt(columns: RowColumns, column: str, text: str) -> Messages:
    """Return a prompt of texts: Alpaca's `input` (Dolly's `context`) is what its instruction is about, `history` the
    turns before."""
    where, alpaca = columns.where, column == "instruction"
    if alpaca and (beside := columns.first(("input", "context"))) is not None:
        about = columns.optional(beside)
        if about is not None and not isinstance(about, str):
            raise BadRowError(f"{where}: the column {beside!r} is {about!r:.80}, expected a text")
        text = "\n".join(part for part in (text, about) if part and part.strip())
    if not text.strip():
        raise BadRowError(f"{where}: the prompt is empty; mend the row or drop it")
    messages: list[RowMessage] = [*_system(columns)]
    history = column_value(columns.row.values, "history")
    if alpaca or (isinstance(history, list | tuple) and all(isinstance(turn, list | tuple) for turn in history)):
        messages += _history(columns)
    return (*messages, {"role": "user", "content": encodable(text, where)})


def _history(columns: RowColumns) -> list[RowMessage]:
    history, messages = columns.optional("history"), list[RowMessage]()
    for turn in history if isinstance(history, list | tuple) else (history,) if history else ():
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise BadRowError(f"{columns.where}: history has {turn!r:.80}, expected pairs of a prompt and its answer")
        messages += [
            {"role": role, "content": encodable(text, columns.where)}
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    return messages


def _system(columns: RowColumns) -> Messages:
    """Return the system message that stands in a column of its own, as LLaMA-Factory writes it."""
    value = columns.optional("system") if columns.has("system") else None
    if value is not None and not isinstance(value, str):
        raise BadRowError(
            f"{columns.where}: the column 'system' is {value!r:.80}, expected the text of the system message"
        )
    if value is None or not value.strip():
        return ()
    return ({"role": "system", "content": encodable(value, columns.where)},)


def with_system(columns: RowColumns, messages: Messages) -> Messages:
    """Return messages with the column `system` before them; raises `BadRowError` for two that differ."""
    system = _system(columns)
    if messages[0]["role"] != "system" or not system:
        return (*system, *messages)
    if messages[0]["content"].strip() != system[0]["content"].strip():
        raise BadRowError(
            f"{columns.where}: the column 'system' and the system message of the conversation differ; keep one of them"
        )
    return messages


def conversation_of_column(columns: RowColumns, column: str, role: str, prompt: Messages | None) -> Messages:
    """Return the conversation that ends with the response in a column: a text, a message, or a list of them.

    `prompt` is what comes before, unless the column has it itself. Raises `BadRowError`.
    """
    value, where = columns.get(column, role), columns.where
    if isinstance(value, str) and prompt is None and (column in CONVERSATION_COLUMNS or role == "messages"):
        value = parse_conversation(value, where, column)
    if isinstance(value, str):
        if prompt is None:
            raise BadRowError(
                f"{where}: {column!r} is a text, and no column has its prompt; name one in prompt, or give lists "
                "of messages"
            )
        messages: Messages = ({"role": "assistant", "content": encodable(value, where)},)
    elif isinstance(value, Mapping | list | tuple):
        messages = tuple(parse_conversation([value] if isinstance(value, Mapping) else value, where, column))
    else:
        raise BadRowError(f"{where}: {column!r} is {value!r:.80}, expected a text or a list of messages")
    if messages[-1]["role"] != "assistant":
        raise BadRowError(
            f"{where}: {column!r} ends with a message of the {messages[-1]['role']}, expected the assistant's; drop "
            "what nobody answers"
        )
    if says_nothing(messages[-1]):
        raise BadRowError(f"{where}: the response in {column!r} is empty; mend the row or drop it")
    if messages[0]["role"] != "assistant":
        messages = with_system(columns, messages)
    if prompt is None or messages[: len(prompt)] == prompt:
        if len(messages) == 1:
            raise BadRowError(f"{where}: {column!r} has an answer and nothing that it answers; name a prompt column")
        return messages
    if messages[0]["role"] != "assistant":
        raise BadRowError(f"{where}: {column!r} begins with another prompt than the one in the prompt column")
    return (*prompt, *messages)


def says_nothing(message: RowMessage) -> bool:
    """Return whether there is nothing in a message to learn."""
    return not message["content"].strip() and not message.get("tool_calls") and not message.get("function_call")


def tools_of(columns: RowColumns) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that a row offers, in OpenAI's form."""
    return tuple(parse_tools(columns.optional("tools"), columns.where)) if columns.has("tools") else ()


def refuse_unheeded(columns: RowColumns, conversations: Iterable[Messages]) -> None:
    """Raise `BadRowError` for columns that change what a row means and that nothing here heeds."""
    texts = [message["content"] for messages in conversations for message in messages]
    refuse_pictures(columns.row, texts, shown=columns.picture_columns)
    refuse_template_columns(columns.row)
    for column in LEARNING_FLAGS:
        value = columns.row.values.get(column)
        if column not in columns.used and not isinstance(value, Mapping) and _excludes(value):
            raise BadRowError(
                f"{columns.where}: the column {column!r} is {value!r:.60}, which elsewhere weights a row or leaves it "
                "out; here all rows count alike. Drop the rows that shall not count, and rename the column if it is "
                "something else"
            )


def refuse_template_columns(row: Row) -> None:
    """Raise `BadRowError` for columns with variables of the chat template, which would change one row's prompt."""
    for column in _TEMPLATE_COLUMNS:
        value = row.values.get(column)
        variables = value.values() if isinstance(value, Mapping) else [value]
        if any(each not in (None, "", {}, [], "{}", "null") for each in variables):
            raise BadRowError(
                f"{row.where}: the column {column!r} sets variables of the chat template for this row alone, which "
                "isn't supported; give them to all rows with chat_template_kwargs of the run, or drop the column"
            )


def _excludes(value: Any) -> bool:
    return value not in _NEITHER_ONE_NOR_NONE and not (isinstance(value, list) and all(value))


def unused_columns(values: Mapping[str, Any], used: Iterable[str]) -> list[str]:
    """Return the columns of a row that were not read; of a nested one that was read in part, none."""
    roots = {name.split(".")[0] for name in used} | set(used)
    return [name for name, value in values.items() if name not in roots and value is not None]
