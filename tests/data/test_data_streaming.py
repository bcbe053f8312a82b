"""Rows that stay on disk: the same tasks in the same order as in memory, and a cursor that continues exactly."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from data_tokenizers import word_tokenizer

from roll.configs.schema.worker_config import CurriculumArgs, DataArgs
from roll.data.curriculum import difficulty_of
from roll.data.prompts import LengthRule, PromptSet, encode_prompts
from roll.data.quarantine import Quarantine
from roll.data.sampler import TaskSource
from roll.data.sources import load_tasks, route_by_tag
from roll.data.streaming import StreamedPrompts, Streamer
from roll.data.templates import PromptEncoder
from roll.types.trajectory import Task
from roll.utils.rows import DataError

TAGS = {"maths": ("a", "b"), "code": ("c",)}
LIMIT = 4


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(word_tokenizer(adds_bos=False), template="plain")


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": " ".join(["w1"] * (1 + i % 5)) + f" w{i}", "answer": i, "tag": "abc"[i % 3], "level": (i * 7) % 11}
        for i in range(count)
    ]


def write(path: Path, content: list[dict[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in content) + "\n")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    return str(path)


def streamed(data: DataArgs, encoder: PromptEncoder, folder: Path, **more: Any) -> tuple[TaskSource, StreamedPrompts]:
    quarantine = Quarantine(data.max_bad_rows, folder / "bad.jsonl")
    streamer = Streamer(
        data, encoder, LengthRule(LIMIT, "filter"), tags=TAGS, seed=3, default_tag=None, prompt_length=LIMIT,
        quarantine=quarantine, folder=folder / "out",
    )  # fmt: skip
    found = streamer.scan({domain: [] for domain in TAGS})
    return source(found.tables, data, difficulty=found.difficulty, **more), found.prompts


def in_memory(data: DataArgs, encoder: PromptEncoder, folder: Path, **more: Any) -> tuple[TaskSource, PromptSet]:
    quarantine = Quarantine(data.max_bad_rows, folder / "bad.jsonl")
    tasks = route_by_tag(load_tasks(data.file_name, columns=data, seed=3, quarantine=quarantine), TAGS)
    prompts = encode_prompts(
        [task for of in tasks.values() for task in of], encoder, prompt_length=LIMIT, truncation="filter",
        quarantine=quarantine,
    )  # fmt: skip
    domains = {domain: [task for task in prompts.tasks if task.domain == domain] for domain in TAGS}
    difficulty = {}
    if data.curriculum.by == "column":
        difficulty = {name: [difficulty_of(task.payload, "level") for task in of] for name, of in domains.items()}
    return source(domains, data, difficulty=difficulty, **more), prompts


def source(domains: Any, data: DataArgs, **more: Any) -> TaskSource:
    return TaskSource(domains, seed=3, probs={"maths": 2, "code": 1}, curriculum=data.curriculum, **more)


ORDERS = [CurriculumArgs(), CurriculumArgs(by="column", column="level", window=0.2), CurriculumArgs(by="success")]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("order", ORDERS, ids=["shuffle", "column", "success"])
def test_streamed_rows_come_as_those_in_memory(
    tmp_path: Path, encoder: PromptEncoder, suffix: str, order: CurriculumArgs
) -> None:
    file = write(tmp_path / f"data.{suffix}", [*rows(41), *rows(5)])  # the last five repeat
    data = DataArgs(file_name=(file,), deduplicate=True, curriculum=order)
    (one, prompts), (other, others) = streamed(data, encoder, tmp_path), in_memory(data, encoder, tmp_path)
    for _ in range(4):
        mine, theirs = one.take(23), other.take(23)
        assert mine == theirs
        assert [prompts.prompt_ids(task) for task in mine] == [others.prompt_ids(task) for task in mine]
        assert one.state_dict() == other.state_dict()
        for task in mine:
            one.observe(task.id, task.payload["answer"] % 2)
            other.observe(task.id, task.payload["answer"] % 2)
        assert one.apply_observed() == other.apply_observed()
    assert prompts.metrics == others.metrics
    assert prompts.metrics["data/prompts"] == 41
    assert prompts.metrics["data/prompts_filtered"] > 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 7), st.sampled_from(ORDERS))
@settings(max_examples=40, deadline=None)
def test_stopped_anywhere_and_resumed_equals_never_stopped(takes: list[int], stop: int, order: CurriculumArgs) -> None:
    def start() -> TaskSource:
        tasks = {
            name: [
                Task(id=f"{name}:{i}", source="s", payload={"prompt": "p"}, seed=i, tag=name, domain=name)
                for i in range(7)
            ]
            for name in TAGS
        }
        return source(tasks, DataArgs(curriculum=order), difficulty={name: list(range(7)) for name in TAGS})

    def step(tasks: TaskSource, count: int) -> list[str]:
        taken = tasks.take(count)
        tasks.put_back(taken[-1:])
        for task in taken:
            tasks.observe(task.id, task.seed / 6)
        tasks.apply_observed()
        return [task.id for task in taken]

    never = start()
    whole = [step(never, count) for count in takes]
    first, second = start(), start()
    stop = min(stop, len(takes))
    begun = [step(first, count) for count in takes[:stop]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + [step(second, count) for count in takes[stop:]] == whole
    assert second.state_dict() == never.state_dict()


@given(st.integers(1, 60), st.floats(0, 1), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_by_difficulty_every_row_comes_once_an_epoch_and_near_its_rank(count: int, window: float, seed: int) -> None:
    order = CurriculumArgs(by="column", column="level", window=window)
    tasks = [Task(id=f"t:{i}", source="s", payload={}, seed=i, tag="t", domain="d") for i in range(count)]
    difficulty = {"d": [float((i * 13) % 17) for i in range(count)]}
    found = TaskSource({"d": tasks}, seed=seed, probs={"d": 1}, curriculum=order, difficulty=difficulty)
    ranks = sorted(difficulty["d"])
    for _ in range(2):
        epoch = [difficulty["d"][task.seed] for task in found.take(count)]
        assert sorted(epoch) == ranks
        if not window:
            assert epoch == ranks
        for place, level in enumerate(epoch):
            nearest = min(abs(place - rank) for rank, of in enumerate(ranks) if of == level)
            assert nearest <= window * count + 1


def test_rows_that_are_always_or_never_solved_are_passed_over() -> None:
    tasks = [Task(id=f"t:{i}", source="s", payload={}, seed=i, tag="t", domain="d") for i in range(300)]
    found = TaskSource({"d": tasks}, seed=1, probs={"d": 1}, curriculum=CurriculumArgs(by="success", min_share=0.1))
    assert len({task.id for task in found.take(300)}) == 300  # every new row is played
    rates = (0.0, 0.5, 1.0)  # of rows 0, 1, 2; 3, 4, 5; ...
    for task in tasks:
        found.observe(task.id, rates[task.seed % 3])
    assert found.take(0) == []
    metrics = found.apply_observed()
    assert metrics == {"data/success_rate": 0.5, "data/passed_over": 0.0}
    again = [task.seed % 3 for task in found.take(120) if task.id.endswith("@e1")]
    # An epoch has the 100 rows of rate 0.5, and about 10 of each other 100.
    assert again.count(1) == 100
    assert 2 <= again.count(0) <= 25
    assert 2 <= again.count(2) <= 25


def test_a_draw_ends_when_every_row_would_be_passed_over() -> None:
    tasks = [Task(id=f"t:{i}", source="s", payload={}, seed=i, tag="t", domain="d") for i in range(5)]
    order = CurriculumArgs(by="success", min_share=1e-9)
    found = TaskSource({"d": tasks}, seed=1, probs={"d": 1}, curriculum=order, num_train_epochs=4)
    for task in found.take(5):
        found.observe(task.id, 1.0)
    found.apply_observed()
    rest = found.take(100)  # 15 places are left; after five in a row that are passed over one is played
    assert len(rest) == 2
    assert found.take(1) == []


def test_a_checkpoint_of_one_curriculum_is_refused_by_another() -> None:
    tasks = {"d": [Task(id="t:0", source="s", payload={}, seed=0, tag="t", domain="d")]}
    plain = TaskSource(tasks, seed=1, probs={"d": 1})
    other = TaskSource(tasks, seed=1, probs={"d": 1}, curriculum=CurriculumArgs(by="success"))
    with pytest.raises(DataError, match="saved with curriculum"):
        plain.load_state_dict(other.state_dict())
    with pytest.raises(DataError, match="saved with curriculum = None"):
        other.load_state_dict(plain.state_dict())


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path: Path, encoder: PromptEncoder) -> None:
    file = tmp_path / "data.jsonl"
    write(file, rows(9))
    found, _ = streamed(DataArgs(file_name=(str(file),)), encoder, tmp_path)
    file.write_text(file.read_text().replace("w1", "w2"))
    with pytest.raises(DataError, match=r"data\.jsonl\[row \d\] has changed since the run began"):
        found.take(6)


def test_streaming_refuses_what_reading_into_memory_refuses(tmp_path: Path, encoder: PromptEncoder) -> None:
    twice = [{"prompt": "w1", "tag": "a", "id": 1}, {"prompt": "w2", "tag": "c", "id": 1}]
    write(tmp_path / "a.jsonl", [*twice, {"prompt": "w3", "tag": "a", "id": 1}])
    write(tmp_path / "b.jsonl", [{"prompt": "w1", "tag": "x"}])
    write(tmp_path / "c.jsonl", [{"prompt": "w1", "tag": "a", "id": "q@e1"}])
    for name, message in (("a", "id 'a:1' is used twice"), ("b", r"no domain includes the tags \{'x': 1\}"),
                          ("c", "must not end in @e")):  # fmt: skip
        with pytest.raises(DataError, match=message):
            streamed(DataArgs(file_name=(str(tmp_path / f"{name}.jsonl"),)), encoder, tmp_path)


def test_a_task_is_found_by_its_id(tmp_path: Path, encoder: PromptEncoder) -> None:
    found, _ = streamed(DataArgs(file_name=(write(tmp_path / "d.jsonl", rows(30)),)), encoder, tmp_path)
    task = found.take(1)[0]
    assert found.task(task.id) == task
    assert found.task(f"{task.id}@e3") == replace(task, id=f"{task.id}@e3")
    with pytest.raises(ValueError, match="not one of this source"):
        found.task("a:99")
