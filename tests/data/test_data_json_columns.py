"""Columns of JSON, as datasets 5 writes those whose rows differ in type, read back as the values that were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.schema.worker_config import DataArgs
from roll.data.prompts import LengthRule
from roll.data.quarantine import Quarantine
from roll.data.sources import load_tasks
from roll.data.streaming import Streamer
from roll.data.templates import PromptEncoder
from roll.utils.readers import read_rows, resolve_sources, scan_rows
from roll.utils.rows import BadRow

ROWS: list[dict[str, Any]] = [
    # One content is a text, another a list of parts: the column is JSON, and so are the answers and what is nested.
    {"prompt": [{"role": "user", "content": "w1 w2"}], "ground_truth": "four", "extra": {"hints": ["a", {"b": 1}]}},
    {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "w3"}]}],
        "ground_truth": ["4", 5.0],
        "extra": {"hints": None},
    },
    {"prompt": [{"role": "user", "content": "w4"}], "ground_truth": {"k": [1]}, "extra": {"hints": [7, None]}},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same rows as datasets writes them: parquet, and a folder of Arrow files."""
    import datasets

    folder = tmp_path_factory.mktemp("written")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    loaded = datasets.load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    loaded.to_parquet(str(folder / "rows.parquet"))
    loaded.save_to_disk(str(folder / "disk"))
    return {"parquet": str(folder / "rows.parquet"), "disk": str(folder / "disk")}


@pytest.mark.parametrize("kind", ["parquet", "disk"])
def test_a_json_column_of_datasets_is_read_as_the_values_that_were_written(files: dict[str, str], kind: str) -> None:
    import pyarrow.parquet

    types = str(pyarrow.parquet.ParquetFile(files["parquet"]).schema_arrow)
    assert types.count("extension<arrow.json>") >= 3  # else this shows nothing
    (source,) = resolve_sources(files[kind])
    assert [dict(row.values) for row in read_rows(source)] == ROWS


@pytest.mark.parametrize("kind", ["parquet", "disk"])
def test_prompts_and_answers_have_no_quotes_around_in_memory_or_streamed(
    files: dict[str, str], kind: str, tmp_path: Path
) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    from data_tokenizers import word_tokenizer

    data = DataArgs(file_name=(files[kind],))
    tasks = load_tasks(files[kind], columns=data, seed=0, default_tag="t")
    assert [task.payload["messages"][0]["content"] for task in tasks] == ["w1 w2", "w3", "w4"]
    assert [task.payload["ground_truth"] for task in tasks] == ["four", ["4", 5.0], {"k": [1]}]
    streamer = Streamer(
        data, PromptEncoder(word_tokenizer()), LengthRule(99, "error"), tags={"d": ["t"]}, seed=0, default_tag="t",
        prompt_length=99, quarantine=Quarantine(0), folder=tmp_path,
    )  # fmt: skip
    table = streamer.scan({"d": []}).tables["d"]
    assert [dict(table[i].payload) for i in range(3)] == [dict(task.payload) for task in tasks]


def test_json_inside_of_lists_and_maps_is_read_and_what_is_no_json_is_a_bad_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    json_type = pa.json_()
    table = pa.table(
        {
            "list": pa.array([['"a"', "1"], None, []], pa.list_(pa.string())).cast(pa.list_(json_type)),
            "map": pa.array([[("k", '{"x": 1}')], [], None], pa.map_(pa.string(), pa.string())).cast(
                pa.map_(pa.string(), json_type)
            ),
            "plain": ['"a"', "1", None],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "nested.parquet")
    (source,) = resolve_sources(str(tmp_path / "nested.parquet"))
    assert [dict(row.values) for row in read_rows(source)] == [
        {"list": ["a", 1], "map": [("k", {"x": 1})], "plain": '"a"'},
        {"list": None, "map": [], "plain": "1"},
        {"list": [], "map": None, "plain": None},
    ]
    bad = pa.table({"a": pa.array(["1", "{"], pa.string()).cast(json_type)})
    pyarrow.parquet.write_table(bad, tmp_path / "bad.parquet")
    (source,) = resolve_sources(str(tmp_path / "bad.parquet"))
    _, wrong = scan_rows(source)
    assert isinstance(wrong, BadRow)
    assert "column 'a' is of type JSON, and its text isn't" in wrong.reason


def test_arrows_nulls_in_calls_and_tools_are_no_arguments(tmp_path: Path) -> None:
    import datasets

    def row(**arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        properties = {key: {"type": "string"} for key in arguments}
        tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
        return {"messages": [{"role": "user", "content": "w0"}, call], "tools": [tool], "case": arguments}

    rows = [row(city="w1"), row(day="w2", unit="w3")]
    written = datasets.Dataset.from_list(rows)
    assert written[0]["tools"][0]["parameters"]["properties"]["day"] is None  # else this shows nothing
    written.to_parquet(str(tmp_path / "rows.parquet"))
    written.save_to_disk(str(tmp_path / "disk"))
    for name in ("rows.parquet", "disk"):
        (source,) = resolve_sources(str(tmp_path / name))
        found = [dict(each.values) for each in read_rows(source)]
        for values, one in zip(found, rows, strict=True):
            assert values["tools"] == one["tools"]
            assert values["messages"][1]["tool_calls"] == one["messages"][1]["tool_calls"]
        assert found[0]["case"] == {"city": "w1", "day": None, "unit": None}  # for rewards, as it stands in the file
