"""wandb, swanlab, mlflow and trackio: a run is written without network, and their own readers find it again."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import time

import pytest

from roll.tracking.base import Sample, TrackingError
from roll.tracking.mlflow import _flat, mlflow_name
from roll.tracking.tracker_registry import build_trackers

METRICS = ({"reward/mean": 0.25, "actor/loss": -0.5}, {"reward/mean": 0.75, "actor/loss": -0.25})
SAMPLE = Sample(domain="math", prompt="2+2?", response="4", reward=1.0)
SETTINGS = {"seed": 7, "actor_train": {"training_args": {"learning_rate": 1e-5}}, "api_key": "hidden-hidden"}


def write(name, folder, resume_step=None, first=1, **options):
    """Log two steps, samples and a summary."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs the package {name} (requirements-trackers.txt)")
    trackers = build_trackers([name], {name: options}, folder, resume_step, run_name="toy", settings=SETTINGS)
    for step, metrics in enumerate(METRICS, start=first):
        trackers.log(step, metrics)
    trackers.log_samples(first + 1, [SAMPLE])
    trackers.finish({"accuracy_after/all": 0.5})
    assert trackers.failed == {}


def log_records(content):
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB, pieces with checksum, length, type."""
    at, whole = 7, b""  # after the file's own header
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<xxxxHB", content, at)
        if at + 7 + length > len(content):
            return  # it is being written
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def wandb_records(folder, seconds=60.0):
    """Return the records of a finished run. On a busy machine `finish` returns while wandb's own process still writes:
    the last record is the exit code."""
    from wandb.proto import wandb_internal_pb2

    (run,) = folder.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + seconds
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in log_records(run.read_bytes())]
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < end, [record.WhichOneof("record_type") for record in records]
        time.sleep(0.1)


def test_wandb_writes_a_run_that_can_be_synchronised_later(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 3)
    write("wandb", tmp_path, project="proj", tags=["a", "b"], mode="offline")
    rows, started = [], None
    for record in wandb_records(tmp_path):
        if record.HasField("history"):
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
        if record.HasField("run"):
            started = record.run
    assert [json.loads(row["reward/mean"]) for row in rows if "reward/mean" in row] == [0.25, 0.75]
    assert (started.project, started.display_name, list(started.tags)) == ("proj", "toy", ["a", "b"])
    assert started.run_id == (tmp_path / "wandb_run_id").read_text().strip()
    config = {item.key: item.value_json for item in started.config.update}
    assert (config["seed"], config["api_key"]) == ("7", '"[secret]"')
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"0123456789abcdef" not in file.read_bytes(), file


def test_mlflow_keeps_metrics_parameters_and_samples_and_goes_on_after_a_resume(tmp_path):
    write("mlflow", tmp_path, project="proj", tags=["a"])
    write("mlflow", tmp_path, resume_step=2, first=3, project="proj")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.25), (2, 0.75), (3, 0.25), (4, 0.75)]
    assert run.data.params["actor_train.training_args.learning_rate"] == "1e-05"
    assert run.data.params["api_key"] == "[secret]"
    assert (run.info.run_name, run.info.status, run.data.tags["a"]) == ("toy", "FINISHED", "true")
    (file,) = tmp_path.glob("mlflow_artifacts/*/artifacts/samples/000002.json")
    assert json.loads(file.read_text())[0]["response"] == "4"


def mlflow_runs(folder, view=1):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return client, client.search_runs([client.get_experiment_by_name("proj").experiment_id], run_view_type=view)


NAMES = [
    "math[hard]",
    "c++",
    "a=b",
    "a:b",
    'q"x',
    "back\\slash",
    "..",
    "a//b",
    "/a",
    "über",
    "数学",
    "x" * 300,
    "5:5b:",
]


def test_names_that_mlflow_refuses_are_written_in_its_letters_each_as_another(tmp_path):
    pytest.importorskip("mlflow")
    settings = {"rewards": {name: {"weight": i} for i, name in enumerate(NAMES)}, "long": "y" * 7000}
    options = {"mlflow": {"project": "proj", "tags": ["v[1]"]}}
    trackers = build_trackers(["mlflow"], options, tmp_path, None, settings=settings)
    trackers.log(1, {f"custom/{name}": float(i) for i, name in enumerate(NAMES)})
    trackers.finish({f"accuracy_after/{name}": 1.0 for name in NAMES})
    assert trackers.failed == {}
    _, (run,) = mlflow_runs(tmp_path)
    assert run.info.status == "FINISHED"
    for i, name in enumerate(NAMES):
        assert run.data.params[mlflow_name(f"rewards.{name}.weight")] == str(i)
        assert run.data.metrics[mlflow_name(f"custom/{name}")] == i
    assert mlflow_name("custom/math[hard]") == "custom/math:5b:hard:5d:"
    assert mlflow_name("val/a:b/reward") == "val/a:b/reward"
    assert run.data.tags["v:5b:1:5d:"] == "true"
    (file,) = tmp_path.glob("mlflow_artifacts/*/artifacts/settings.json")
    assert json.loads(file.read_text())["long"] == "y" * 7000


def test_two_names_never_become_one():
    names = [
        "a+b",
        "a:2b:b",
        "a:3a:2b:b",
        "a/b",
        "a//b",
        "a/:: /b",
        "a/::/b",
        "a/./b",
        "a/:2e:/b",
        "z" * 250,
        "z" * 251,
    ]
    assert len({mlflow_name(name) for name in names}) == len(names)
    assert sorted(_flat({"a.b": 1, "a": {"b": 2}}).values()) == ["1", "2"]
    assert sorted(_flat({"a": {"b": 2}, "a.b": 1}).values()) == ["1", "2"]


def test_a_configuration_that_can_not_be_written_whole_leaves_no_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    write, calls = MlflowClient.log_batch, []

    def once(self, *args, **options):
        calls.append(None)
        if len(calls) == 2:
            raise ConnectionError("the line is down")
        return write(self, *args, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", once)
    with pytest.raises(TrackingError, match="'mlflow' failed while opening .*the line is down"):
        build_trackers(
            ["mlflow"], {"mlflow": {"project": "proj"}}, tmp_path, None, settings={f"k{i}": i for i in range(150)}
        )
    assert mlflow_runs(tmp_path)[1] == []
    assert [run.info.status for run in mlflow_runs(tmp_path, view=2)[1]] == ["FAILED"]  # among the deleted ones
    assert not (tmp_path / "mlflow_run_id").exists()


def test_a_step_that_is_played_again_has_one_record_in_mlflow(tmp_path):
    write("mlflow", tmp_path, project="proj")
    write("mlflow", tmp_path, resume_step=1, first=2, project="proj")  # steps 2 and 3, and 2 is there
    client, (run,) = mlflow_runs(tmp_path)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.25), (2, 0.75), (3, 0.75)]


def test_swanlab_writes_a_run_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    write("swanlab", tmp_path, project="proj", mode="offline")
    written = b"".join(file.read_bytes() for file in sorted((tmp_path / "swanlab").rglob("*")) if file.is_file())
    for expected in (b"reward/mean", b"actor/loss", b"learning_rate", b"toy"):
        assert expected in written
    assert b"hidden-hidden" not in written


def test_trackio_writes_a_run_of_this_machine_and_a_step_that_is_played_again_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    write("trackio", tmp_path, project="proj")
    write("trackio", tmp_path, resume_step=1, first=2, project="proj")  # steps 2 and 3, and 2 is there
    database = next((tmp_path / "trackio").rglob("proj*.db"))
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {name.split("-")[0] for name, *_ in rows} == {"toy"}
    values = [(step, json.loads(metrics).get("reward/mean")) for _, step, metrics in rows]
    assert [value for value in values if value[1] is not None] == [(1, 0.25), (2, 0.75), (3, 0.75)]
