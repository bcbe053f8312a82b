"""Every response of a step in a parquet file: tokens, masks, log-probs, rewards, advantages, where they came from.

    rollouts-000005.parquet     what step 5 trained on, a row per response (or context of an episode)
    dropped-000005.parquet      what it didn't train on: filtered and failed responses, with the reason in `dropped`
    validation-000005.parquet   the validation after step 5; 0 is the starting model's

All three have the schema of `columns()`, which docs/view.md explains and `SCHEMA_VERSION` numbers. Whatever reads
parquet reads them; `roll.tracking.recorded_responses` does it for Python and for `roll view`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import pyarrow

Kind = Literal["train", "dropped", "validation"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FILE_NAMES: dict[Kind, str] = {"train": "rollouts", "dropped": "dropped", "validation": "validation"}
"""First word of a file's name, by what is in it."""

SCHEMA_VERSION = 3
"""2 lacked `untrained_turns`, `untrained_token_ids` and `greedy_reward`. 1 had 18 columns, which have kept their names
and types; it isn't written into those files."""
METADATA_KEY = b"roll"
"""Of the file: JSON with `version`, and `notes`: why a column is empty, by its name."""
ROW_GROUP_TOKENS = 65_536
"""A row group holds about so many tokens, so that one episode is read without the others of a large step."""

FLOAT_TOKEN_COLUMNS = (
    "sampling_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "entropies",
    "values",
    "token_rewards",
    "advantages",
    "returns",
    "importance_weights",
)
TOKEN_COLUMNS = ("action_mask", "loss_mask", "versions", *FLOAT_TOKEN_COLUMNS)
"""Columns with one entry per token, or empty where nobody computed them."""

EXCERPT = 200
"""Characters of `prompt_end` and `response_start`, so that a list of rows is shown without reading their texts."""

TEXT_COLUMNS = (
    "row_id",
    "task_id",
    "domain",
    "tag",
    "source",
    "status",
    "finish_reason",
    "dropped",
    "error",
    "prompt",
    "response",
    "prompt_end",
    "response_start",
    "answer",
    "ground_truth",
    "payload",
    "explanation",
    "trace",
)
COUNT_COLUMNS = (
    "seed",
    "member",
    "num_tokens",
    "num_response_tokens",
    "num_turns",
    "num_tool_calls",
    "version_min",
    "version_max",
)
NUMBER_COLUMNS = (
    "reward",
    "greedy_reward",
    "shaped_reward",
    "advantage",
    "loss_weight",
    "mismatch_mean",
    "mismatch_max",
    "kl_mean",
)
LIST_COLUMNS = ("token_ids", "turns", "untrained_turns", "untrained_token_ids")
MAP_COLUMNS = ("reward_parts", "role_rewards", "spans", "counts")


def file_of(folder: Path, step: int, kind: Kind = "train") -> Path:
    """Return where a step's rows of this kind are."""
    return folder / f"{FILE_NAMES[kind]}-{step:06d}.parquet"


def write_rollouts(
    folder: Path,
    step: int,
    rows: Sequence[Mapping[str, Any]],
    *,
    kind: Kind = "train",
    notes: Mapping[str, str] | None = None,
    token_text: Callable[[Sequence[int]], list[str]] | None = None,
) -> Path:
    """Write a step's rows of one kind; the file is there whole or not at all, and one that is there is replaced.

    Args:
        rows: values by column. What is left out is null, or empty. Token columns are aligned with `token_ids` as in
            `TokenBatch`, as lists or arrays.
        notes: why a column is empty, by its name.
        token_text: texts of distinct token ids, for the column `token_texts`; None: leave that column empty.

    Returns:
        its path.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, step, kind)
    temporary = path.with_name(path.name + ".tmp")
    about = json.dumps({"version": SCHEMA_VERSION, "notes": dict(notes or {})}, sort_keys=True)
    fields = columns()
    arrays = [
        _texts_of_tokens(rows, token_text)
        if name == "token_texts"
        else pa.array([clean(_cell(row, name, step, kind)) for row in rows], type=dtype)
        for name, dtype in fields.items()
    ]
    schema = pa.schema(list(fields.items()), metadata={METADATA_KEY: about.encode()})
    tokens = sum(len(row.get("token_ids", ())) for row in rows)
    per_group = max(1, min(len(rows), ROW_GROUP_TOKENS * len(rows) // max(tokens, 1)))
    table = pa.Table.from_arrays(arrays, schema=schema)
    try:
        pq.write_table(table, temporary, row_group_size=per_group, compression="zstd")
    except OSError as error:  # pyarrow doesn't name the file
        raise OSError(error.errno, f"{error}", str(path)) from error
    temporary.replace(path)
    return path


def delete_oldest(folder: Path, limit: int, *, keep: int) -> list[int]:
    """Delete the files of the oldest steps until the rest has at most `limit` bytes; return those steps.

    Args:
        keep: a step whose files stay.
    """
    by_step: dict[int, list[Path]] = {}
    for path in folder.glob("*-[0-9]*.parquet"):
        name, _, number = path.stem.rpartition("-")
        if name in FILE_NAMES.values() and number.isdecimal():
            by_step.setdefault(int(number), []).append(path)
    sizes = {step: sum(path.stat().st_size for path in paths) for step, paths in by_step.items()}
    total, deleted = sum(sizes.values()), []
    for step in sorted(by_step):
        if total <= limit or step == keep:
            break
        for path in by_step[step]:
            path.unlink(missing_ok=True)
        total -= sizes[step]
        deleted.append(step)
    return deleted


def columns() -> dict[str, pyarrow.DataType]:
    """Return the columns in their order, with their types."""
    import pyarrow as pa

    text, pairs = pa.string(), pa.map_(pa.string(), pa.float64())
    call = pa.struct({"id": text, "name": text, "arguments": text})
    turn = pa.struct(
        {
            "number": pa.int32(),
            "start": pa.int32(),  # position of its first token in the row
            "prompt_tokens": pa.int32(),
            "response_tokens": pa.int32(),
            "prompt": text,
            "response": text,
            "observation": text,
            "reward": pa.float64(),
            "finish_reason": text,
            "role": text,
            "state": text,
            "after": pa.int32(),
            "resets_context": pa.bool_(),
            "shared": pa.bool_(),  # trained in another row of the episode
            "metrics": pairs,
            "tool_calls": pa.list_(call),
        }
    )
    return {
        "step": pa.int64(),
        "kind": text,
        **dict.fromkeys(TEXT_COLUMNS, text),
        **{name: pa.uint64() if name == "seed" else pa.int64() for name in COUNT_COLUMNS},
        **dict.fromkeys(NUMBER_COLUMNS, pa.float64()),
        **dict.fromkeys(MAP_COLUMNS, pairs),
        "token_ids": pa.list_(pa.int64()),
        "token_texts": pa.list_(pa.dictionary(pa.int32(), text)),
        "action_mask": pa.list_(pa.bool_()),
        "loss_mask": pa.list_(pa.bool_()),
        "versions": pa.list_(pa.int64()),
        **dict.fromkeys(FLOAT_TOKEN_COLUMNS, pa.list_(pa.float32())),
        "turns": pa.list_(turn),
        "untrained_turns": pa.list_(turn),
        "untrained_token_ids": pa.list_(pa.int64()),
    }


def clean(value: Any) -> Any:
    """Return a value whose texts are valid Unicode: half a pair of surrogates becomes its escape."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(clean(item) for item in value)
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return [clean(item) for item in value]
    return value


def _cell(row: Mapping[str, Any], name: str, step: int, kind: Kind) -> Any:
    if name in ("step", "kind"):
        return {"step": step, "kind": kind}[name]
    if name == "prompt_end":
        return str(row.get("prompt") or "")[-EXCERPT:]
    if name == "response_start":
        return str(row.get("response") or "")[:EXCERPT]
    if name in MAP_COLUMNS:
        return sorted(dict(row.get(name) or ()).items())
    if name in TOKEN_COLUMNS or name in LIST_COLUMNS:
        return row.get(name, ())
    return row.get(name, "" if name in TEXT_COLUMNS else None)


def _texts_of_tokens(
    rows: Sequence[Mapping[str, Any]], token_text: Callable[[Sequence[int]], list[str]] | None
) -> pyarrow.Array:
    """Return the column of token texts, each distinct text once: what is repeated is an index."""
    import numpy as np
    import pyarrow as pa

    ids = [np.asarray(row.get("token_ids", ()), dtype=np.int64) for row in rows]
    if token_text is None:
        ids = [one[:0] for one in ids]
    flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    distinct, indices = np.unique(flat, return_inverse=True)
    texts = [clean(text) for text in token_text(distinct.tolist())] if token_text is not None else []
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in ids])]).astype(np.int32)
    values = pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), pa.array(texts, type=pa.string()))
    return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values)
