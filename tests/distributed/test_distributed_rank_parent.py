"""Ranks that are forked from a process which has imported what they need: what they are, and what ends them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll.distributed.rank_parent import RankParent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors of processes are Linux's")
WORKER = """
    import json, os, signal, sys, time
    about = {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "arguments": sys.argv,
        "folder": os.getcwd(), "path": sys.path[0], "ready": "wave" in sys.modules, "name": __name__,
        "note": os.environ.get("NOTE"), "other": os.environ.get("OTHER"),
        "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "files": sorted(int(number) for number in os.listdir("/proc/self/fd")),
    }
    print(json.dumps(about), flush=True)
    time.sleep(float(sys.argv[1]))
    print("over", flush=True)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[RankParent]:
    """A warm parent that has imported `wave`, a small module that nothing else imports."""
    made = RankParent(tmp_path, ["wave"], {**os.environ, "OTHER": "of the parent"})
    yield made
    made.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """What starts a worker as Ray does: the command, the worker's script, its arguments."""
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    started: list[subprocess.Popen[str]] = []

    def start(command: str, seconds: float, **variables: str) -> subprocess.Popen[str]:
        words = [*shlex.split(command), str(script), str(seconds)]
        env = {**os.environ, **variables}
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()  # a rank may still hold the other end


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def gone(pid: int) -> bool:
    """Whether the process ends within some seconds; a zombie has."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_rank_is_forked_and_has_what_its_launcher_was_given(parent, launch, tmp_path):
    command = parent.command({"OTHER": "of the parent"})
    run = launch(command, 0.0, NOTE="of the rank")
    rank = told(run)
    assert rank["parent"] == parent._process.pid
    assert rank["ready"] and rank["name"] == "__main__"
    assert rank["arguments"] == [str(tmp_path / "worker.py"), "0.0"]
    assert (rank["folder"], rank["path"]) == (str(tmp_path), str(tmp_path))
    # The variables of the rank alone: what the warm parent had besides is gone.
    assert (rank["note"], rank["other"]) == ("of the rank", None)
    assert rank["session"] == rank["pid"] and rank["children"]
    # Its standard streams, the connection to its launcher, and the folder that it is reading.
    assert len(rank["files"]) == 5
    assert run.stdout.read() == "over\n" and run.wait(10) == 0


def test_two_ranks_live_side_by_side(parent, launch):
    command = parent.command({})
    first, second = launch(command, 60.0), launch(command, 0.0)
    assert told(first)["parent"] == told(second)["parent"] == parent._process.pid
    assert second.wait(10) == 0 and first.poll() is None


def test_without_the_warm_parent_a_rank_starts_by_itself(parent, launch):
    command = parent.command({})
    parent.close()
    run = launch(command, 0.0)
    rank = told(run)
    assert rank["pid"] == run.pid and not rank["ready"]
    assert parent.command({}) is None


def test_a_warm_parent_that_cannot_import_or_has_threads_forks_nothing(launch, tmp_path):
    (tmp_path / "threaded_module.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    for number, module in enumerate(("no_such_module", "threaded_module")):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
        made = RankParent(folder, [module], {**os.environ, "PYTHONPATH": path})
        try:
            command = made.command({})
            assert command is not None
            run = launch(command, 0.0)
            assert told(run)["pid"] == run.pid
        finally:
            made.close()


def test_a_rank_with_other_variables_is_not_forked(parent):
    assert parent.command({"OTHER": "of the parent"}) is not None
    assert parent.command({"OTHER": "of the rank"}) is None
    assert parent.command({"NOTE": "of the rank"}) is None


def test_the_launcher_ends_with_its_rank(parent, launch):
    run = launch(parent.command({}), 60.0)
    os.kill(int(told(run)["pid"]), signal.SIGKILL)
    run.wait(10)


def test_closing_the_warm_parent_ends_its_ranks(parent, launch):
    run = launch(parent.command({}), 60.0)
    pid = int(told(run)["pid"])
    parent.close()
    assert gone(pid)
    run.wait(10)


def test_ranks_end_with_the_controller_however_it_ends(launch, tmp_path):
    script = tmp_path / "controller.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from roll.distributed.rank_parent import RankParent\n"
        "made = RankParent(pathlib.Path(sys.argv[1]), ['wave'], dict(os.environ))\n"
        "print(made.command({}), flush=True)\n"
        "time.sleep(60)\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    controller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert controller.stdout is not None
    run = launch(controller.stdout.readline().strip(), 60.0)
    rank = told(run)
    controller.kill()
    controller.communicate()
    assert gone(int(rank["pid"])) and gone(int(rank["parent"]))
    run.wait(10)


def test_a_rank_outlives_a_killed_warm_parent(parent, launch):
    run = launch(parent.command({}), 60.0)
    pid = int(told(run)["pid"])
    parent._process.kill()
    parent._process.wait()
    time.sleep(0.2)
    assert run.poll() is None
    os.kill(pid, signal.SIGKILL)
    run.wait(10)
