"""Two machines, started by hand as docs/cluster.md says: they train and leave their model, or say what to do.

The machines are network namespaces, which takes root; elsewhere these tests are skipped. Set `ROLL_EVIDENCE` to a
folder to keep what was printed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
from network_machines import Machine, last_rows, machines, roll, start_ray, wait_until, why_not
from tiny_models import build_tiny_model
from toy import write_toy

pytestmark = [pytest.mark.skipif(bool(reason := why_not()), reason=reason), pytest.mark.timeout(3600)]
TOKEN = "0123456789abcdef" * 4
TRAINED = "train", "toy.yaml", "max_steps=2"


@pytest.fixture
def note(evidence_folder, request):
    """Add what a command printed to the log of this test."""
    file = evidence_folder / f"machines-{request.node.name}.txt"

    def write(name: str, result: tuple[int, str, float]) -> str:
        status, text, seconds = result
        with open(file, "a") as log:
            log.write(f"--- {name}: exit {status} after {seconds:.0f} s\n" + "\n".join(text.splitlines()[-12:]) + "\n")
        return text

    return write


def put_job(folder: Path) -> None:
    """Write a job of relative paths, whose roles run on the second machine's device."""
    build_tiny_model(folder / "model")
    write_toy(folder, Path("model"))
    text = (folder / "toy.yaml").read_text().replace(f"{folder}/", "")
    text = text.replace("executor: inline", "num_nodes: 2\nnum_gpus_per_node: 1")
    for role in ("actor_train", "actor_infer"):
        text = text.replace(f"{role}:\n", f"{role}:\n  device_mapping: [0]\n")
    (folder / "toy.yaml").write_text(text)


def set_token(machine: Machine, token: str | None) -> None:
    file = machine.home / ".ray" / "auth_token"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if token is not None:
        file.write_text(token)


def assert_trained(machine: Machine, result: tuple[int, str, float], output: str = "output") -> None:
    assert result[0] == 0, result[1]
    model = machine.disk / output / "hf_model"
    assert json.loads((model / "roll_export.json").read_text())["step"] == 2
    # The modes of all files follow the umask, weights included.
    assert {path.stat().st_mode & 0o777 for path in model.iterdir() if path.is_file()} == {0o644}
    assert "model.safetensors" in {path.name for path in model.iterdir()}


def run_alone(machine: Machine) -> tuple[int, str, float]:
    return roll(machine, *TRAINED, "num_nodes=1", "output_dir=alone", "ray_init.num_cpus=1")


def test_folders_that_machines_do_not_share_are_refused_before_anything_is_loaded(note):
    with machines(2, shared=False) as (head, other):
        put_job(head.disk)
        put_job(other.disk)
        start_ray(head, other)
        for keys in ((), ("save_steps=1",)):
            result = roll(head, *TRAINED, *keys)
            text = note(f"own disks {keys}", result)
            assert result[0] == 2
            assert "expected a folder that all machines share: 10.77.0.2, where actor_train run" in text
            assert "fix: name a folder that all machines mount" in text
        # A model that differs is named, too, and so is one that isn't there.
        (other.disk / "model" / "config.json").write_text("{}")
        text = note("other model", roll(head, *TRAINED, "export_model=false"))
        assert "10.77.0.2 has another config.json in" in text
        assert not (other.disk / "output" / "hf_model").exists()


def test_a_cluster_that_was_started_before_a_local_run_trains_and_a_cut_machine_is_named(note):
    with machines(2, shared=True) as (head, other):
        put_job(head.disk)
        start_ray(head, other)
        assert_trained(head, run_alone(head), "alone")
        assert not (head.home / ".ray").exists(), "a run on one machine wrote into the home"
        result = roll(head, *TRAINED, "save_steps=1")
        note("cluster before a local run", result)
        assert_trained(head, result)
        set_token(head, TOKEN)  # as ray.init of a notebook leaves it
        result = roll(head, *TRAINED)
        note("the same with a token file in the home", result)
        assert_trained(head, result)

        output = head.disk / "cut.txt"
        long = head.start(
            sys.executable, "-m", "roll.cli", "train", "toy.yaml", "max_steps=100000", "rpc_timeout=20",
            "output_dir=cut", output=output,
        )  # fmt: skip
        rows = head.disk / "cut" / "logs" / "metrics.jsonl"
        wait_until(lambda: len(last_rows(rows)) > 2 or long.poll() is not None, 200, "the first rows")
        other.cut()
        begun = time.monotonic()
        status = long.wait(timeout=200)
        text = note("cut", (status, output.read_text(), time.monotonic() - begun))
        assert status == 1
        assert "machine1 (10.77.0.2)" in text
        assert "can't be reached: nothing answers at 10.77.0.2:" in text or "is dead to Ray" in text


def test_a_cluster_that_is_started_after_a_local_run_trains(note):
    with machines(2, shared=True) as (head, other):
        put_job(head.disk)
        assert_trained(head, run_alone(head), "alone")
        result = roll(head, "doctor")
        assert "a cluster on this machine starts" in note("doctor", result)
        assert not (head.home / ".ray").exists()
        printed = start_ray(head, other)
        assert "Token authentication is disabled" in printed
        result = roll(head, *TRAINED)
        note("cluster after a local run", result)
        assert_trained(head, result)


def test_a_cluster_with_a_token_trains_or_says_what_to_do(note):
    with machines(2, shared=True) as (head, other):
        put_job(head.disk)
        for machine in (head, other):
            set_token(machine, TOKEN)
        start_ray(head, other, RAY_AUTH_MODE="token")
        result = roll(head, *TRAINED)
        note("token", result)
        assert_trained(head, result)
        for token, message in ((None, "asks for a token, and there is none here"), ("ff" * 32, "refuses the token of")):
            set_token(head, token)
            result = roll(head, *TRAINED)
            text = note(message, result)
            assert result[0] == 2
            assert message in text
        result = roll(head, *TRAINED, RAY_ADDRESS="10.77.0.1:9999")
        assert result[0] == 2
        assert "no Ray answers at 10.77.0.1:9999" in note("no cluster", result)
        assert result[2] < 120


@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="ray[default] isn't installed")
def test_a_submitted_job_trains_or_says_that_its_folder_is_a_copy(note):
    with machines(2, shared=False) as (head, other):
        put_job(head.disk)
        shared = head.disk.parents[1] / "shared"
        shared.mkdir()
        start_ray(head, other, dashboard=True)
        submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address=http://127.0.0.1:8265"]
        submit += ["--working-dir=.", "--", sys.executable, "-m", "roll.cli", *TRAINED]
        for keys, status, message in (
            ((), 1, "a folder outside of the copy that Ray makes of a job's working directory"),
            ((f"output_dir={shared}",), 0, "succeeded"),
        ):
            begun = time.monotonic()
            done = head.run(*submit, *keys, timeout=400)
            text = note(f"job {keys}", (done.returncode, done.stdout, time.monotonic() - begun))
            assert done.returncode == status, text
            assert message in text
        assert (shared / "hf_model" / "model.safetensors").is_file()
        assert os.listdir(other.disk) == []
