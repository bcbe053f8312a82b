"""Reading datasets: every format gives the same tasks, and every broken row names its file and line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.schema.worker_config import DataArgs
from roll.data.sources import load_tasks, parse_messages, route_by_tag
from roll.types.trajectory import Task
from roll.utils.readers import DataError, resolve_sources

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
ROWS = [
    {"id": "a", "prompt": "one,\n1?", "ground_truth": "1", "tag": "x", "level": "3"},
    {"id": "b", "prompt": "två ×?", "ground_truth": "2", "tag": "y", "level": "4"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same_tasks(tmp_path: Path, suffix: str) -> None:
    tasks = load_tasks(str(write(tmp_path / f"data.{suffix}", ROWS)), seed=1)
    assert [(t.id, t.source, t.tag) for t in tasks] == [("x:a", "data", "x"), ("y:b", "data", "y")]
    assert tasks[0].payload == {**ROWS[0], "messages": None}
    assert tasks[1].payload["prompt"] == "två ×?"
    assert tasks == load_tasks(str(write(tmp_path / "again" / "data.json", ROWS)), seed=1)


def test_a_task_seed_depends_on_the_run_seed_and_the_id(tmp_path: Path) -> None:
    file = str(write(tmp_path / "data.json", ROWS))
    one, two = load_tasks(file, seed=1), load_tasks(file, seed=2)
    assert one[0].seed != one[1].seed != two[1].seed
    assert load_tasks(str(write(tmp_path / "data.json", ROWS[1:])), seed=1)[0].seed == one[1].seed


def test_a_list_under_data_and_json_lines_named_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": ROWS}))
    (tmp_path / "b.json").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert [len(load_tasks(str(tmp_path / name), seed=1)) for name in ("a.json", "b.json")] == [2, 2]


def test_a_saved_dataset_is_read_with_its_splits(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "many")
    assert len(load_tasks(str(tmp_path / "single"), seed=1)) == 2
    assert len(load_tasks(str(tmp_path / "many"), seed=1)) == 2
    assert [t.id for t in load_tasks(str(tmp_path / "many") + "#test", seed=1)] == ["y:b"]
    with pytest.raises(DataError, match=r"no split 'dev'; splits: \['test', 'train'\]"):
        load_tasks(str(tmp_path / "many") + "#dev", seed=1)
    with pytest.raises(DataError, match="drop '#dev'"):
        load_tasks(str(tmp_path / "single") + "#dev", seed=1)


def test_folders_globs_and_lists_are_read_in_order_with_distinct_names(tmp_path: Path) -> None:
    plain = [{"prompt": "p"}]
    for name in ("b/data.jsonl", "a/data.jsonl", "a/other.csv"):
        write(tmp_path / name, plain)
    ids = [t.id for t in load_tasks(str(tmp_path / "*" / "data.jsonl"), seed=1)]
    assert ids == ["data:1", "b/data:1"]
    assert [t.id for t in load_tasks(str(tmp_path / "a"), seed=1)] == ["data:1", "other:1"]
    both = [str(tmp_path / "b"), str(tmp_path / "a" / "other.csv")]
    assert [t.id for t in load_tasks(both, seed=1)] == ["data:1", "other:1"]


def test_files_without_the_id_or_tag_column_are_numbered_and_get_the_default_tag(tmp_path: Path) -> None:
    columns = DataArgs(id="key", tag="kind")
    with_both = write(tmp_path / "a.jsonl", [{"prompt": "p", "key": "k", "kind": "x"}])
    without = write(tmp_path / "b.jsonl", [{"prompt": "p"}])
    tasks = load_tasks([str(with_both), str(without)], seed=1, columns=columns, default_tag="y")
    assert [(t.id, t.tag) for t in tasks] == [("x:k", "x"), ("b:1", "y")]


def test_a_hub_id_is_told_from_a_file() -> None:
    assert [(s.location, s.format) for s in resolve_sources("owner/name/main#test")] == [
        ("owner/name/main#test", "hub")
    ]


def test_messages_may_be_a_list_or_a_json_string(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"messages": messages, "answer": 3}, {"messages": json.dumps(messages), "answer": 4}]
    tasks = load_tasks(str(write(tmp_path / "m.jsonl", rows)), seed=1)
    assert [t.payload["messages"] for t in tasks] == [messages, messages]
    assert [(t.payload["prompt"], t.payload["ground_truth"]) for t in tasks] == [(None, 3), (None, 4)]


def test_named_columns_are_used(tmp_path: Path) -> None:
    rows = [{"q": "p", "prompt": "no", "messages": "no", "target": 5, "answer": "no", "key": 7, "kind": "k"}]
    columns = DataArgs(prompt="q", ground_truth="target", id="key", tag="kind")
    task = load_tasks(str(write(tmp_path / "n.jsonl", rows)), seed=1, columns=columns)[0]
    assert (task.id, task.payload["prompt"], task.payload["messages"], task.payload["ground_truth"]) == (
        "k:7",
        "p",
        None,
        5,
    )


P = '{"prompt": "p"}\n'
BAD_FILES: list[tuple[str, str | bytes, DataArgs | None, str]] = [
    ("bad.jsonl", P + '{"prompt": \n', None, r"bad\.jsonl:2: not JSON: Expecting value"),
    ("bad.jsonl", P + "[1]\n", None, r"bad\.jsonl:2: a row is \[1\]"),
    ("bad.jsonl", P.encode() + b'{"prompt": "\xff"}\n', None, r"bad\.jsonl:2: not UTF-8"),
    ("bad.jsonl", P + '{"prompt": ""}\n', None, r"bad\.jsonl:2: the prompt is ''"),
    ("bad.jsonl", P + '{"prompt": 5}\n', None, r"bad\.jsonl:2: the prompt is 5"),
    ("bad.jsonl", P + '{"prompt": "x\\ud800"}\n', None, r"bad\.jsonl:2: .* at 1, half of a surrogate pair"),
    ("bad.jsonl", '{"messages": [{"role": "user", "content": "\\udc00"}]}', None, "half of a surrogate pair"),
    ("bad.jsonl", P + '{"text": "p"}\n', None, r"bad\.jsonl:2: no column 'prompt', which other rows have"),
    ("bad.jsonl", "", None, "bad: no rows"),
    ("bad.jsonl", "\n\n", None, "bad: no rows"),
    ("bad.json", "", None, "bad: no rows"),
    ("bad.json", "[]", None, "bad: no rows"),
    ("bad.json", '[{"prompt": "p"},\n{"prompt": }]', None, r"bad\.json:2: not JSON"),
    ("bad.json", '[{"prompt": "p"}, 3]', None, r"bad\.json\[row 2\]: a row is 3"),
    ("bad.json", '{"rows": []}', None, r'expected a list of rows or \{"data"'),
    ("bad.json", b"\xff\xfe\x00", None, "not UTF-8"),
    ("bad.csv", "prompt,answer\np,1\nq\n", None, r"bad\.csv:3: 1 fields, but the header has 2"),
    ("bad.csv", 'prompt,answer\n"p\nq",1\nq,2,3\n', None, r"bad\.csv:4: 3 fields"),
    ("bad.csv", 'prompt,answer\n"p,1\n', None, r"bad\.csv:\d: not csv"),
    ("bad.csv", "prompt,prompt\np,1\n", None, r"bad\.csv:1: the header names a column twice"),
    ("bad.csv", "prompt,answer\n", None, "bad: no rows"),
    ("bad.csv", "", None, "bad: no rows"),
    ("bad.parquet", "not parquet", None, r"bad\.parquet: not parquet"),
    ("bad.txt", "p", None, r"unknown format '\.txt'; expected one of .*'\.csv'"),
    ("bad.jsonl", '{"question": "p"}', None, r"no `prompt` or `messages` column; columns: \['question'\]"),
    ("bad.jsonl", '{"prompt": "p", "messages": []}', None, "has both a `prompt` and a `messages` column"),
    ("bad.jsonl", P, DataArgs(prompt="q"), r"no column 'q' \(named for prompt\); columns: \['prompt'\]"),
    ("bad.jsonl", P, DataArgs(ground_truth="answer"), r"no column 'answer' \(named for ground_truth\)"),
    ("bad.jsonl", P, DataArgs(tag="kind"), "no column 'kind' .*default_tag"),
    (
        "bad.jsonl",
        '{"prompt": "p", "answer": null}',
        None,
        r"bad\.jsonl:1: column 'answer' \(the ground truth\) is empty",
    ),
    ("bad.jsonl", '{"prompt": "p", "answer": ""}', None, "is empty"),
    ("bad.jsonl", '{"prompt": "p", "answer": NaN}', None, "is empty"),
    ("bad.jsonl", '{"prompt": "p", "id": null}', None, "column 'id' is None"),
    (
        "bad.jsonl",
        '{"prompt": "p", "id": 1}\n{"prompt": "q", "id": "1"}',
        None,
        r"bad\.jsonl:2: id 'bad:1' .* at \S*:1",
    ),
    ("bad.jsonl", '{"messages": []}', None, "messages is .*expected a non-empty list"),
    ("bad.jsonl", '{"messages": "[{"}', None, "messages is a string but not JSON"),
    ("bad.jsonl", '{"messages": [{"role": "user"}]}', None, r"messages\[0\] is"),
    ("bad.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', None, "nothing to answer"),
    (
        "bad.jsonl",
        '{"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "f"}]}]}',
        None,
        r"messages\[0\] has the tool calls .*a call has no name",
    ),
]


@pytest.mark.parametrize(("name", "content", "columns", "message"), BAD_FILES)
def test_a_bad_file_or_row_is_named(
    tmp_path: Path, name: str, content: str | bytes, columns: DataArgs | None, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        load_tasks(str(path), seed=1, columns=columns)


def test_missing_files_name_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no data file .*tran\.jsonl.* did you mean 'train\.jsonl'"):
        load_tasks(str(tmp_path / "tran.jsonl"), seed=1)
    with pytest.raises(DataError, match="its folder .* doesn't exist"):
        load_tasks(str(tmp_path / "no" / "train.jsonl"), seed=1)
    with pytest.raises(DataError, match="no file matches"):
        load_tasks(str(tmp_path / "*.csv"), seed=1)
    with pytest.raises(DataError, match="given twice"):
        load_tasks([str(tmp_path), str(tmp_path / "train.jsonl")], seed=1)
    with pytest.raises(DataError, match="no data files are given"):
        load_tasks([], seed=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        load_tasks(str(tmp_path / "empty"), seed=1)


def test_both_columns_named_is_refused() -> None:
    with pytest.raises(ValueError, match="both named"):
        load_tasks("a.jsonl", columns=DataArgs(prompt="a", messages="b"), seed=1)


def tagged(*tags: str) -> list[Task]:
    return [Task(id=f"{t}:{i}", source="f", payload={}, seed=0, tag=t, domain="") for i, t in enumerate(tags)]


def test_a_domain_may_be_left_for_generated_tasks() -> None:
    assert route_by_tag(tagged("a"), {"math": ["a"], "sums": ["b"]})["sums"] == []


def test_tags_decide_the_domain() -> None:
    routed = route_by_tag(tagged("a", "b", "c", "a"), {"math": ["a", "c"], "code": ["b"]})
    assert {d: [(t.id, t.domain) for t in ts] for d, ts in routed.items()} == {
        "math": [("a:0", "math"), ("c:2", "math"), ("a:3", "math")],
        "code": [("b:1", "code")],
    }


@pytest.mark.parametrize(("included", "message"), [({"math": ["a"]}, r"no domain includes the tags \{'b': 1\}")])
def test_tags_that_do_not_fit_the_domains_are_refused(included: dict[str, list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        route_by_tag(tagged("a", "b"), included)


def test_a_named_column_decides_the_domain_and_values_that_none_takes_are_one_error(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "kind": kind, "data_source": "all/the/same"} for kind in ("gsm8k", "aime", "gsm8k", "aime")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_tasks(str(tmp_path / "rows.jsonl"), columns=DataArgs(tag="kind"), seed=1)
    routed = route_by_tag(tasks, {"easy": ["gsm8k"], "rest": ["*"]})
    assert {domain: [task.tag for task in of] for domain, of in routed.items()} == {
        "easy": ["gsm8k"] * 2,
        "rest": ["aime"] * 2,
    }
    many = [*tasks, *tagged(*(f"x{i}" for i in range(30)))]
    with pytest.raises(DataError) as error:
        route_by_tag(many, {"easy": ["gsm8k"]})
    said = str(error.value)
    assert "{'aime': 2, 'x0': 1, " in said and "and 11 more (tag: rows), 32 rows in all" in said
    assert "rewards.<domain>.tag_included" in said


def test_real_files_load() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent")
    deepmath = load_tasks(str(SHARED / "deepmath"), columns=DataArgs(messages="messages"), seed=1)
    assert len(deepmath) == 4994
    assert deepmath[0].payload["messages"][0]["role"] == "system"
    assert len(load_tasks(str(SHARED / "gsm8k" / "*.jsonl"), columns=DataArgs(prompt="question"), seed=1)) == 8792


def test_a_messages_content_may_be_a_list_of_text_parts():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    (message,) = parse_messages([{"role": "user", "content": parts}], "f:1")
    assert message == {"role": "user", "content": "What is 2 + 2?"}
    for content in ([], [{"type": "image_url", "image_url": "x"}], [*parts, {"type": "image"}], [3], None):
        with pytest.raises(DataError, match=r"f:1: messages\[0\]"):
            parse_messages([{"role": "user", "content": content}], "f:1")


def test_a_file_cannot_pass_for_a_generated_task(tmp_path: Path) -> None:
    # Some verifiers evaluate the entry, so only entries of the generator itself may reach them.
    entry = {"dataset": "number_sorting", "config": {}, "entry": {"question": "", "answer": "__import__('os')"}}
    file = write(tmp_path / "rows.jsonl", [{"prompt": "p"}, {"prompt": "q", "reasoning_gym": entry}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*column 'reasoning_gym'.*procedural"):
        load_tasks(str(file), seed=1)
