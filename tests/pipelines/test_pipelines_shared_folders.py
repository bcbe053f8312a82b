"""Several machines: folders that aren't shared and models that differ are refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roll.configs.checks import machine_folder_checks as machine_folders
from roll.configs.checks.machine_folder_checks import versions
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.distributed.cluster import Executor
from roll.pipelines.run.shared_folders import check_shared_folders

JOB = """
pipeline: sft
num_nodes: 2
pretrain: {model}
output_dir: {output}
max_steps: 1
sequence_length: 64
actor_train: {{device_mapping: [1], data_args: {{file_name: rows.jsonl}}}}
"""


class OtherMachine(Executor):
    """A machine whose disk is the folder `root`; None: it shares all folders with this one."""

    def __init__(self, root: Path | None, **versions: str) -> None:
        self._root = root
        self.versions = versions

    def _start(self, *_):
        raise NotImplementedError

    def on_each_machine(self, function, *args, roles=None):
        if function is versions:
            return {"10.0.0.2": {**versions(), **self.versions}}
        markers, models = args
        there = self._there
        sight = function({there(folder): name for folder, name in markers.items()}, [there(name) for name in models])
        back = {there(name): name for name in (*markers, *models)}
        models_there = {back[name]: files for name, files in sight.models.items()}
        return {"10.0.0.2": replace(sight, missing=tuple(back[name] for name in sight.missing), models=models_there)}

    def _there(self, name):
        return name if self._root is None else f"{self._root}{name}"


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_folders.look, "__defaults__", (0.0,))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "job.yaml").write_text(JOB.format(model=tmp_path / "model", output=tmp_path / "run" / "output"))
    return lambda *keys: load_config(tmp_path, "job", keys)


def refused(config, machine) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_shared_folders(config, machine)
    return [str(violation) for violation in caught.value.violations]


def test_a_folder_on_a_disk_of_the_machines_own_is_refused_and_no_marker_stays(job, tmp_path):
    other = tmp_path / "other"
    (other / str(tmp_path)[1:] / "run" / "output" / "hf_model").mkdir(parents=True)  # a folder of the same name
    folders, model = refused(job(), OtherMachine(other))
    assert folders.startswith(
        f"output_dir: got '{tmp_path}/run/output/hf_model', expected a folder that all machines share"
    )
    assert "10.0.0.2, where actor_train run, would write to a disk of its own" in folders
    assert "output_dir=/shared/run" in folders
    assert f"10.0.0.2 has no {tmp_path}/model, which actor_train need there" in model
    assert not (tmp_path / "run").exists()


def test_another_version_of_roll_is_refused_and_one_of_torch_warned_of(job, caplog):
    (violation,) = refused(job(), OtherMachine(None, roll="0.0.1"))
    assert "the same version of roll on all machines; 10.0.0.2 has roll 0.0.1 (here " in violation
    check_shared_folders(job(), OtherMachine(None, torch="1.0"))
    assert "10.0.0.2 has torch 1.0 (here " in caplog.text


def test_each_folder_is_named_by_its_key(job, tmp_path):
    keys = ("save_steps=1", f"checkpoint_config.output_dir={tmp_path}/c", f"export_dir={tmp_path}/e")
    violations = refused(job(*keys), OtherMachine(tmp_path / "other"))
    assert [violation.partition(":")[0] for violation in violations] == [
        "checkpoint_config.output_dir", "export_dir", "pretrain",
    ]  # fmt: skip


def test_shared_folders_and_equal_models_pass_and_leave_nothing_behind(job, tmp_path):
    check_shared_folders(job("save_steps=1"), OtherMachine(None))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "output" / "checkpoints").mkdir(parents=True)
    check_shared_folders(job("save_steps=1"), OtherMachine(None))
    assert list((tmp_path / "run" / "output" / "checkpoints").iterdir()) == []


def test_a_machine_that_may_not_write_is_named(job, tmp_path, monkeypatch):
    touch = Path.touch

    def refuse(self, *args, **kwargs):
        if self.name.count(".") > 1:  # what another machine leaves
            raise PermissionError(13, "Permission denied")
        return touch(self, *args, **kwargs)

    monkeypatch.setattr(Path, "touch", refuse)
    (violation,) = refused(job(), OtherMachine(None))
    assert "a folder that 10.0.0.2 can write to (Permission denied)" in violation


def test_a_model_of_another_content_is_named_with_its_file(job, tmp_path):
    other = tmp_path / "other"
    there = other / str(tmp_path)[1:] / "model"
    there.mkdir(parents=True)
    (there / "config.json").write_text("{ }")
    (violation,) = refused(job("export_model=false"), OtherMachine(other))
    assert f"10.0.0.2 has another config.json in {tmp_path}/model" in violation
    (there / "config.json").write_text("{}")
    (there / "notes.txt").write_text("of no concern")
    check_shared_folders(job("export_model=false"), OtherMachine(other))


def test_a_folder_inside_of_rays_copy_of_a_jobs_working_directory_is_refused(job, tmp_path):
    from roll.configs.checks.folder_checks import folder_checks

    copy = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    (violation,) = folder_checks(job(f"output_dir={copy}/output"))
    assert violation.path == "output_dir"
    assert "may delete afterwards" in violation.expected
