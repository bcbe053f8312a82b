"""The command `roll migrate`: what goes where, files that are there, the report as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import migrate_cases as cases
import pytest
import yaml

from roll.cli.__main__ import main


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(cases.script(cases.VERL_GRPO), "utf-8")
    return file


def test_without_a_name_the_configuration_goes_to_standard_output(old: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["migrate", str(old)]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["pipeline"] == "rlvr"
    assert "translated" in err and "data.train_batch_size = 1024 -> rollout_batch_size" in err


def test_with_a_name_it_is_written_whole_and_never_over_a_file(old: Path, capsys: pytest.CaptureFixture[str]):
    new = old.with_name("new.yaml")
    assert main(["migrate", str(old), "-o", str(new)]) == 0
    first = new.read_text("utf-8")
    assert yaml.safe_load(first)["rollout_batch_size"] == 1024
    assert [path.name for path in old.parent.iterdir() if path.name.startswith(".")] == []
    new.write_text("mine", "utf-8")
    assert main(["migrate", str(old), "-o", str(new)]) == 2
    assert "--force" in capsys.readouterr().err and new.read_text("utf-8") == "mine"
    assert main(["migrate", str(old), "-o", str(new), "--force"]) == 0
    assert new.read_text("utf-8") == first


def test_the_report_is_json_for_programs(old: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["migrate", str(old), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"translated", "decided", "dead", "absent", "unexpanded", "filled", "missing"} <= found.keys()
    assert {"key": "data.train_batch_size", "value": 1024, "ours": ["rollout_batch_size"], "note": ""} in found[
        "translated"
    ]
    target = old.with_name("report.json")
    assert main(["migrate", str(old), "--report", str(target), "-o", str(old.with_name("n.yaml"))]) == 0
    assert json.loads(target.read_text("utf-8"))["system"] == "verl"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.yaml"], "there is no file"),
        (["."], "is a folder"),
        (["run.sh", "-o", "no/such/new.yaml"], "be written"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], said: str, old: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(old.parent)
    assert main(["migrate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_whose_file_it_is_can_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "a.yaml"
    file.write_text("seed: 1\nmax_steps: 5\n", "utf-8")
    assert main(["migrate", str(file), "--from", "trl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["system"] == "TRL"


def test_what_a_terminal_would_obey_is_shown_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "job.yaml"
    file.write_text('rollout_batch_size: 8\nexp_name: "a\\e[2Jb"\n"x\\e]0;t\\ay\\nmade up = 1": 3\n', "utf-8")
    assert main(["migrate", str(file), "--from", "roll"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\\x1b[2J" in err
    assert not any(line.strip().startswith("made up") for line in err.splitlines())


@pytest.mark.parametrize("system", ["trl", "openrlhf", "roll"])
def test_a_job_that_is_another_projects_is_a_mistake(system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo data.train_files=a.parquet\n", "utf-8")
    assert main(["migrate", "--from", system, str(tmp_path / "run.sh")]) == 2
    assert f"a job of verl: leave out --from {system}" in capsys.readouterr().err
