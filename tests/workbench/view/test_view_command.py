"""`roll view` as a command, and the run that comes with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_run import group, write_run

import roll
from roll.cli.__main__ import main
from roll.tracking.rollouts import columns
from roll.workbench.view.export import demo_runs


def test_the_demo_is_a_whole_run_of_the_quickstart():
    found = roll.rollouts(demo_runs()[0])
    assert found.steps[0] == 1 and found.steps[-1] == 16 and found.validations == [0, 8, 16]
    table = found.table(1)
    assert table.column_names == list(columns()) and table.num_rows == 64
    rows = list(found.rows(16))
    assert all(len(row["token_texts"]) == len(row["old_logprobs"]) == len(row["entropies"]) > 0 for row in rows)
    before, after = (found.table(step, kind="validation")["reward"].to_pylist() for step in (0, 16))
    assert sum(after) / len(after) > 1.5 * sum(before) / len(before)
    size = sum(path.stat().st_size for path in demo_runs()[0].rglob("*") if path.is_file())
    assert size < 800_000, "it is in every wheel"


def test_the_demo_of_agents_is_small_and_names_no_machine():
    runs = demo_runs("agentic")
    assert [run.name for run in runs] == ["dial", "dial-collapsed"]
    assert [roll.rollouts(run).steps for run in runs] == [[5, 50], [5, 50]]
    files = [path for run in runs for path in run.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_100_000, "it is in every wheel"
    about = [row["error"] + row["dropped"] for run in runs for row in roll.rollouts(run).rows(kind="dropped")]
    texts = [*about, *(path.read_text() for path in files if path.suffix in (".json", ".jsonl"))]
    assert any("jammed_dial.py" in text for text in texts)
    assert not [text for text in texts if str(Path.cwd()) in text or '"pid"' in text or '"host"' in text]


def test_an_export_of_the_demo_is_written_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "demo.html"
    assert main(["view", "--demo", "--export", str(out), "--episodes", "70", "--steps", "16"]) == 0
    assert (
        "194 episodes" in capsys.readouterr().err
    )  # the step's 64, and its validation, of which each kind has one step
    assert out.read_text(encoding="utf-8").count("<script") == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which run?"),
        (["nowhere"], "there is no folder 'nowhere'"),
        (["RUN", "--export", "out.html", "--steps", "7"], "no run has recorded step 7"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "RUN", {1: group("t", 1.0)})
    assert main(["view", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


def test_without_the_packages_of_the_server_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("roll.cli.view.NEEDS", ("starlette", "a_package_that_is_not_there"))
    assert main(["view", str(write_run(tmp_path / "run", {1: group("t", 1.0)}))]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "a_package_that_is_not_there" in said and "roll-rl[view]" in said
