"""The door: `roll train`, `roll check` and `examples/start_pipeline.py` find, check and run a file, and end alike."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll.cli import exits
from roll.cli.__main__ import main
from roll.cli.train import start_pipeline
from roll.configs.parsing.find import find_by_name

START = Path(__file__).parents[2] / "examples" / "start_pipeline.py"
HEAVY = ("torch", "ray", "transformers", "datasets", "vllm", "sglang", "hydra", "numpy", "rich", "yaml")

PLAN = "2 groups x 2 episodes = 4 episodes per step"
JOB = """
pipeline: agentic
executor: inline
output_dir: output
pretrain: {model}
max_steps: 1
rollout_batch_size: 4
prompt_length: 32
response_length: 8
sequence_length: 128
custom_envs: {{lake: {{env_type: frozen_lake-v1}}}}
train_env_manager: {{num_env_groups: 2, group_size: 2}}
"""


@pytest.fixture(autouse=True)
def debug_variable(monkeypatch):
    """As it was before, after a test of `--debug`."""
    monkeypatch.setenv(exits.DEBUG_VARIABLE, "0")


@pytest.fixture
def toy(tiny_model, tmp_path, monkeypatch) -> Path:
    """A folder with a configuration of four episodes a step, and a file that is none; it is the working directory."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "toy.yaml").write_text(JOB.format(model=tiny_model))
    (folder / "case.jsonl").write_text("")
    monkeypatch.chdir(folder)
    return folder


COMMANDS = ["", "train", "check", "resume", "plot", "rollout", "eval generate", "envs", "envs test", "examples"]


def test_help_loads_nothing():
    code = (
        "import contextlib, io, json, runpy, sys\n"
        "from roll.cli.__main__ import main\n"
        f"starts = [({START.name!r}, runpy.run_path({str(START)!r})['main'], [])]\n"
        f"for name, run, words in [*((name, main, name.split()) for name in {COMMANDS}), *starts]:\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stdout(said):\n"
        "        try:\n"
        "            run([*words, '--help'])\n"
        "        except SystemExit as end:\n"
        "            status = end.code\n"
        "    loaded = {module.split('.')[0] for module in sys.modules}\n"
        f"    print(json.dumps([name, status, said.getvalue()[:7], sorted(loaded & {set(HEAVY)})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told == [[name, 0, "usage: ", []] for name in (*COMMANDS, START.name)]


@pytest.mark.parametrize("file", ["toy", "toy.yaml", "./toy", "ABSOLUTE/toy"])
def test_check_prints_the_plan_and_loads_no_model(toy, capsys, checks_start_no_process, file):
    assert main(["check", file.replace("ABSOLUTE", str(toy)), "seed=7"]) == 0
    assert PLAN in capsys.readouterr().out
    assert not (toy / "output").exists()


def test_check_imports_neither_torch_nor_an_engine(toy):
    code = (
        "import sys; from roll.cli.__main__ import main; from roll.pipelines import check_process\n"
        "check_process._PROCESS_S = 300.0\n"  # other tests may have the cores
        "status = main(['check', 'toy'])\n"
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'ray', 'transformers', 'vllm')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=500)
    assert PLAN in done.stdout
    assert "not looked at" not in done.stderr  # the process that looks has answered


LATER = ("torch", "ray", "transformers", "datasets", "rich", "sympy", "pandas", "pyarrow", "tensorboard")
AT_FIRST = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in {later}:
            os.write(2, f"imports {{name}}".encode())
            os._exit(7)

sys.meta_path.insert(0, Finder())
from roll.cli.__main__ import main
main(["train", "toy"])
"""


def test_a_run_says_what_it_does_before_it_imports_what_is_heavy(toy):
    code = AT_FIRST.format(later=LATER)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    said, _, imported = done.stderr.rpartition("imports ")
    assert (done.returncode, imported in LATER) == (7, True), done.stderr
    assert f"1 steps of {PLAN}" in said
    assert "share slots: " in said


def test_check_prints_every_key(toy, capsys):
    assert main(["check", "toy", "--print_config", "seed=7"]) == 0
    assert "\nseed: 7\n" in capsys.readouterr().out


# --- what can't be found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("toi", "there is no configuration file toi.yaml; did you mean toy.yaml?"),
        ("job_a", "did you mean examples/b/job_b.yaml?"),
        ("../job", "job is a folder, not a configuration file; it has toy"),
        ("case.jsonl", "case.jsonl isn't a configuration file: its name must end in .yaml"),
        ("gone/zzz", "there is no configuration file gone/zzz.yaml; seen from "),
        ("zzz", "there is no configuration file zzz.yaml; its folder has toy"),
    ],
)
def test_a_missing_file_names_the_nearest(toy, capsys, file, expected):
    (toy / "examples" / "b").mkdir(parents=True)
    (toy / "examples" / "b" / "job_b.yaml").write_text("")
    assert main(["train", file]) == 2
    assert expected in capsys.readouterr().err


def test_a_name_alone_is_looked_up_below_the_examples(toy, capsys, checks_start_no_process):
    for folder in ("a", "b/c"):
        (toy / "examples" / folder).mkdir(parents=True)
        (toy / "examples" / folder / "twice.yaml").write_text("")
    (toy / "toy.yaml").rename(toy / "examples" / "b" / "toy_v0.5.yaml")
    for name in ("toy_v0.5", "toy_v0.5.yaml", "b/toy_v0.5"):
        assert start_pipeline(["--config_name", name, "--check"], toy / "examples") == 0
    assert PLAN in capsys.readouterr().out
    assert find_by_name("c/twice", toy / "examples") == toy / "examples" / "b" / "c" / "twice.yaml"
    assert start_pipeline(["--config_name", "twice", "--check"], toy / "examples") == 2
    said = capsys.readouterr().err
    assert "2 files below" in said
    for folder in ("a", "b/c"):
        assert f"--config_path {toy / 'examples' / folder} --config_name twice" in said
    assert start_pipeline(["--config_name", "toy_v0.6", "--check"], toy / "examples") == 2
    assert "did you mean toy_v0.5?" in capsys.readouterr().err
    assert start_pipeline(["--config_name", "zzz", "--check"], toy / "examples") == 2
    assert "there are twice, twice, toy_v0.5" in capsys.readouterr().err
    assert start_pipeline(["--config_path", "gone", "--config_name", "toy"], toy / "examples") == 2
    assert "--config_path: there is no folder 'gone', neither in" in capsys.readouterr().err


# --- how it ends ------------------------------------------------------------------------------------------------------


def raiser(error: BaseException):
    def run(*_, **__):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ValueError("rows: got 3, expected 4"), 2, "error: rows: got 3, expected 4\n(traceback: "),
        (RuntimeError("a worker died"), 1, "error: RuntimeError: a worker died\n(traceback: "),
        (KeyboardInterrupt(), 130, "interrupted; no checkpoint was saved yet"),
    ],
)
def test_a_run_ends_with_one_code_for_each_kind_of_end(toy, capsys, monkeypatch, error, code, expected):
    monkeypatch.setattr("roll.pipelines.run_pipeline", raiser(error))
    assert main(["train", "toy"]) == code
    assert start_pipeline(["--config_path", ".", "--config_name", "toy"], toy) == code
    said = capsys.readouterr().err
    assert said.count(expected) == 2
    assert "most recent call" not in said
    if code != 130:
        assert "most recent call" in (toy / "output" / "logs" / "error.txt").read_text()


def test_an_error_is_said_though_its_traceback_cannot_be_written(toy, capsys, monkeypatch):
    def run(config):
        shutil.rmtree(config.logging_path)
        raise RuntimeError("a worker died")

    monkeypatch.setattr("roll.pipelines.run_pipeline", run)
    assert main(["train", "toy"]) == 1
    assert capsys.readouterr().err.endswith("error: RuntimeError: a worker died\n(--debug shows the traceback)\n")


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ValueError("no such row"), 2, "error: no such row\n"),
        (KeyError("x"), 1, "error: KeyError: 'x'\n(--debug shows the traceback)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_goes_wrong_before_a_run_ends_alike(toy, capsys, monkeypatch, error, code, expected):
    monkeypatch.setattr("roll.configs.full_check.load_checked", raiser(error))
    assert main(["check", "toy"]) == code
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("arguments", [["--debug", "train", "toy"], ["train", "toy", "sead=1", "--debug"], ["train"]])
def test_debug_shows_the_traceback(toy, capsys, monkeypatch, arguments):
    if "--debug" not in arguments:
        monkeypatch.setenv(exits.DEBUG_VARIABLE, "1")
    assert main([*arguments, *(["toy"] if len(arguments) == 1 else []), "sead=1"]) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert said.index("Traceback") < said.index("error: 1 problem in toy.yaml")


def test_only_what_is_required_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: file\n")


@pytest.mark.parametrize("arguments", [[], ["trian", "toy"], ["train"], ["train", "toy", "--chek"], ["envs"]])
def test_a_wrong_command_line_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: roll" in capsys.readouterr().err


def test_the_page_names_every_code_and_command():
    from roll.cli.parsers import roll_parser

    page = (START.parents[1] / "docs" / "cli.md").read_text("utf-8")
    for code in exits.Exit:
        assert f"| {code.value} |" in page
    (commands,) = [action.choices for action in roll_parser()._actions if action.choices]
    for command in commands:
        assert f"`roll {command}" in page


@pytest.mark.parametrize("key", ["output_dir", "logging_dir", "rollout_dump_dir"])
def test_a_run_that_is_refused_writes_nothing_into_the_folder_of_the_other(key, toy, capsys):
    from roll.utils.locking import run_lock

    healthy = toy / "healthy"
    with run_lock({key: healthy}):
        before = sorted(healthy.rglob("*"))
        assert main(["train", "toy", f"{key}={healthy}"]) == 2
        assert sorted(healthy.rglob("*")) == before
    assert f"another run is writing to {healthy}; give each run its own {key}" in capsys.readouterr().err
