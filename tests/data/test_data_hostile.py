"""Rows as nobody should write them: refused with file and line, or read rightly. And rows as verl writes them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from data_tokenizers import word_tokenizer

from roll.configs.schema.worker_config import DataArgs
from roll.data import templates
from roll.data.prompts import encode_prompts
from roll.data.quarantine import Quarantine
from roll.data.sources import load_tasks
from roll.data.templates import PromptEncoder
from roll.types.trajectory import Task
from roll.utils.rows import DataError

P = b'{"prompt": "p"}\n'
REFUSED: list[tuple[str, bytes, str]] = [
    ("a.jsonl", P + b'{"prompt": "q", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", r"a\.jsonl:2: .*too deeply"),
    ("a.jsonl", P + b'{"prompt": "q", "x": ' + b"[" * 300 + b"]" * 300 + b"}\n", r"a\.jsonl:2: .*200 levels"),
    ("a.jsonl", P + b'{"prompt": "q", "x": ' + b"9" * 5000 + b"}\n", r"a\.jsonl:2: .*too many digits"),
    ("a.jsonl", P + b'{"prompt": "q", "prompt": "r"}\n', r"a\.jsonl:2: .*'prompt' is given twice"),
    ("a.jsonl", P * 3000 + b"\x00\xff\xfe\n" + P, r"a\.jsonl:3001: not UTF-8: .*0xff at byte 2"),
    ("a.jsonl", "\ufeff".encode("utf-16-le") + '{"prompt": "p"}'.encode("utf-16-le"), "it looks like UTF-16"),
    ("a.csv", b"prompt,answer\n" + b"p,1\n" * 3000 + b"\xff,2\n" + b"p,1\n" * 3000, r"a\.csv:3002: not UTF-8"),
    ("a.json", b'[{"prompt": "p"},\n{"prompt": "\xff"}]', r"a\.json:2: not UTF-8"),
    ("a.json", b"[" * 100_000, r"a\.json: .*too deeply"),
    ("a.jsonl.gz", gzip.compress(P * 1000, mtime=0)[:-20], r"a\.jsonl\.gz:\d+: not gzip, or cut short"),
    ("a.jsonl.gz", P, "not gzip"),
    ("a.parquet.gz", P, "unknown format"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"), REFUSED, ids=[f"{row[2]} {i}" for i, row in enumerate(REFUSED)]
)
def test_a_hostile_file_is_refused_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tasks(str(tmp_path / name), seed=1)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + P + P,
        P.replace(b"\n", b"\r\n") * 2,
        P + b"\n\r\n" + P.strip(),
        P + b'{"prompt": "p", "x": NaN}',
    ],
    ids=["BOM", "CRLF", "blank lines", "NaN"],
)
def test_odd_files_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert [task.payload["prompt"] for task in load_tasks(str(tmp_path / "a.jsonl"), seed=1)] == ["p", "p"]


def test_gzip_and_long_lines_are_read_and_other_files_of_a_folder_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(P * 2, mtime=0))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "x" * 10_000_000}) + "\n")
    for other in ("README.md", ".hidden.jsonl", "picture.png"):
        (tmp_path / other).write_bytes(b"\xff")
    assert [task.id for task in load_tasks(str(tmp_path), seed=1)] == ["a:1", "a:2", "b:1"]


@pytest.mark.parametrize("at", [1, 5])
def test_a_missing_answer_is_refused_in_whichever_row(tmp_path: Path, at: int) -> None:
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(1, 8)]
    del rows[at - 1]["answer"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=rf"a\.jsonl:{at}: no column 'answer', which other rows have"):
        load_tasks(str(tmp_path / "a.jsonl"), seed=1)


def test_answers_that_begin_after_many_rows_without_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(P * 200 + b'{"prompt": "q", "answer": 1}')
    with pytest.raises(DataError, match=r"a\.jsonl:201: column 'answer' .* the first rows don't have"):
        load_tasks(str(tmp_path / "a.jsonl"), seed=1)


def verl_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"data_source": f"openai/{'ab'[i % 2]}", "prompt": [{"role": "user", "content": f"q{i}"}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(i)}, "extra_info": {"index": i, "split": "train"}}
        for i in range(count)
    ]  # fmt: skip


def test_parquet_files_of_verl_load_as_they_are(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl_rows(3)), file)
    tasks = load_tasks(str(file), seed=1)
    assert [(task.id, task.tag) for task in tasks] == [
        ("train:1", "openai/a"), ("train:2", "openai/b"), ("train:3", "openai/a")
    ]  # fmt: skip
    assert tasks[1].payload["messages"] == [{"role": "user", "content": "q1"}]
    assert tasks[1].payload["ground_truth"] == "1"
    assert tasks[1].payload["extra_info"] == {"index": 1, "split": "train"}
    assert {task.tag for task in load_tasks(str(file), seed=1, default_tag="one")} == {"one"}
    named = DataArgs(prompt="prompt", id="extra_info.index", tag="data_source")
    assert load_tasks(str(file), seed=1, columns=named)[2].id == "openai/a:2"


def test_a_share_of_rows_may_be_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(P * 8 + b"{\n" + P)
    quarantine = Quarantine(0.1, tmp_path / "bad.jsonl")
    assert len(load_tasks(str(tmp_path / "a.jsonl"), seed=1, quarantine=quarantine)) == 9
    quarantine.finish()
    (line,) = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 9
    assert json.loads(line)["reason"].startswith("not JSON")


OWN = """
class Indexed:
    def __init__(self, count: int = 3):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("gone")
        return {"prompt": f"p{index}", "answer": index}
class Iterated:
    def __iter__(self):
        yield {"prompt": "p", "answer": 1}
        raise OSError("broken")
class Neither:
    pass
class Broken:
    def __init__(self):
        raise RuntimeError("no rows today")
"""


def test_a_dataset_class_gives_rows_or_says_why_not(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)

    def load(name: str, **arguments: Any) -> list[Task]:
        return load_tasks((), seed=1, columns=DataArgs(dataset=f"{file}:{name}", dataset_args=arguments))

    assert [(task.id, task.payload["ground_truth"]) for task in load("Indexed")] == [
        ("Indexed:1", 0), ("Indexed:2", 1), ("Indexed:3", 2)
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"\[row 6\]: __getitem__\(5\) raised KeyError: 'gone'"):
        load("Indexed", count=9)
    with pytest.raises(DataError, match="raised OSError: broken after row 1"):
        load("Iterated")
    with pytest.raises(DataError, match="give the class __len__ and __getitem__, or __iter__"):
        load("Neither")
    with pytest.raises(DataError, match=r"can't be made with \{\}: RuntimeError: no rows today"):
        load("Broken")
    with pytest.raises(ValueError, match="data_args.dataset: .*did you mean 'Indexed'"):
        load("Indexd")


def test_a_prompt_of_fifty_megabytes_is_measured_and_only_its_ends_are_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "_SURELY_SHORT", 1000)  # instead of what takes a second
    encoder = PromptEncoder(word_tokenizer(adds_bos=False), template="plain")
    tokenised: list[int] = []
    whole = PromptEncoder._encode_text
    monkeypatch.setattr(
        PromptEncoder,
        "_encode_text",
        lambda self, task, text: (tokenised.append(len(text)), whole(self, task, text))[1],
    )
    text = "w1 " + "w0 " * 17_000_000 + "w2"  # w0 is token 7
    task = Task(id="t:1", source="s", payload={"prompt": text, "messages": None}, seed=0, tag="t", domain="d")
    with pytest.raises(DataError, match=r"'t:1' with at least \d+ \(it has 51,000,005 characters\)"):
        encode_prompts([task], encoder, prompt_length=4)
    ends: list[tuple[Any, tuple[int, ...]]] = [
        ("left", (7, 7, 7, 9)), ("right", (8, 7, 7, 7)), ("middle", (8, 7, 7, 9))
    ]  # fmt: skip
    for how, ids in ends:
        assert encode_prompts([task], encoder, prompt_length=4, truncation=how).prompt_ids(task) == ids
    assert max(tokenised) <= 2000
