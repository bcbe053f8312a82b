"""How commands end: signals at any moment, closed outputs, full disks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roll.cli import exits
from roll.cli.__main__ import main
from roll.utils import signals

START = Path(__file__).parents[2] / "examples" / "start_pipeline.py"
ROLL = "import sys; from roll.cli.__main__ import main; sys.exit(main())"
SIGNALS = [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]

HOOK = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
            for _ in range(1000):
                pass

sys.meta_path.insert(0, Finder())
"""
"""A signal at the import of a module."""


def run(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize(("number", "code", "said"), SIGNALS)
@pytest.mark.parametrize("module", ["roll.cli.parsers", "argparse", "roll.cli.train"])
def test_a_signal_during_imports_is_one_word(number, code, said, module):
    done = run(HOOK.format(module=module, number=int(number)) + ROLL, "train", "no_such_file")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_so_it_is_for_the_module_and_the_script(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(module="roll.cli.exits", number=int(signal.SIGINT)))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{START.parents[1]}"}
    for command in (["-m", "roll.cli", "--version"], [str(START), "--config_name", "x"]):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def guarded_code(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return (
        "import os, signal, sys\nfrom roll.cli.exits import guarded\nfrom roll.utils.signals import install\n"
        f"install()\ndef command():\n{lines}    return 0\nsys.exit(guarded(command))\n"
    )


@pytest.mark.parametrize(("number", "code", "said"), SIGNALS)
def test_a_signal_during_the_work_lets_it_close_what_it_opened(number, code, said):
    body = f"try:\n    os.kill(os.getpid(), {int(number)}); signal.pause()\nfinally:\n    print('closed')"
    done = run(guarded_code(body))
    assert (done.returncode, done.stdout, done.stderr) == (code, "closed\n", said)


@pytest.mark.parametrize(("number", "code", "said"), SIGNALS)
def test_a_signal_that_became_another_error_is_still_a_signal(number, code, said):
    """torch.save does that: it closes its file while the exception passes, and fails."""
    body = f"try:\n    os.kill(os.getpid(), {int(number)}); signal.pause()\nfinally:\n    raise OSError('unexpected')"
    done = run(guarded_code(body))
    assert (done.returncode, done.stderr) == (code, said)
    assert exits.was_interrupted(RuntimeError()) is False


def test_the_code_is_kept_where_the_exception_passes_through_exec():
    """The interpreter kills itself with SIGINT then; dataclasses are made that way."""
    done = run(guarded_code("exec('os.kill(os.getpid(), signal.SIGINT); signal.pause()')"))
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_signal_while_the_interpreter_ends_shows_no_traceback():
    body = f"import atexit; atexit.register(lambda: [os.kill(os.getpid(), {int(signal.SIGINT)}), signal.pause()])"
    done = run(guarded_code(body))
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise ValueError('x')", 2)])
def test_what_was_registered_is_done_and_the_interpreter_is_not_taken_down(end, code):
    """Compiled modules then tell of every object that is left: triton's in forty lines behind a run's summary."""
    late = "class Late:\n    def __del__(self, write=os.write): write(1, b'leaked')\nsys.late = Late()\n"
    done = run(guarded_code(f"{late}import atexit\natexit.register(print, 'closed')\n{end}"))
    assert (done.returncode, done.stdout) == (code, "closed\n")


def test_ignored_signals_stay_ignored_and_forked_children_end_as_usual():
    """`nohup roll train ... &` ignores Ctrl-C; a library that forks ends its children with SIGTERM."""
    code = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from roll.utils.signals import install\ninstall()\nos.kill(os.getpid(), signal.SIGINT)\n"
        "pid = os.fork()\nif pid == 0:\n    os.kill(os.getpid(), signal.SIGTERM); signal.pause()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "-15\n", "")


# --- closed outputs ---------------------------------------------------------------------------------------------------


def test_ray_leaves_sigterm_as_it_was(monkeypatch):
    from roll.distributed import ray_session

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray_session, "_connect", lambda *_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    ray_session.connect("auto", Path("x"), {})
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("body", "code"), [("print('x')", 0), ("print('x' * 10**6)\nprint('never', file=sys.stderr)", 141)]
)
def test_a_reader_that_leaves_ends_what_is_printed(body, code):
    """At the end, and in the middle; once the work is done its own code stands."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", guarded_code(body)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (code, "")


def test_closed_standard_streams_are_nobodys():
    """Else the next file that is opened gets what is printed."""
    body = "assert os.open(os.devnull, os.O_RDONLY) > 2\nprint('x')\nsys.stderr.write('x')"
    command = [sys.executable, "-c", guarded_code(body)]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], timeout=60, check=False)
    assert done.returncode == 0


def test_nobody_reads_errors_either():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", guarded_code("raise ValueError('x')")]
    done = subprocess.run(command, stdout=write_end, stderr=write_end, timeout=60, check=False)
    os.close(write_end)
    assert done.returncode == 2


# --- full disks -------------------------------------------------------------------------------------------------------

FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"),
]


@pytest.mark.parametrize("error", FULL, ids=range(len(FULL)))
def test_a_full_disk_is_one_sentence_with_the_folder_and_its_room(capsys, tmp_path, error):
    def fail() -> int:
        raise RuntimeError("tracker 'jsonl' failed") from error

    assert exits.guarded(fail) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the disk is full: ")
    assert "iB are free in /" in said and said.count("\n") == 1


def test_a_full_disk_names_the_folder_of_the_file(capsys, tmp_path):
    def fail() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "runs" / "x.jsonl"))

    assert exits.guarded(fail) == 1
    assert f"are free in {tmp_path / 'runs'};" in capsys.readouterr().err


def test_help_and_version_work_without_a_handler(capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert signal.getsignal(signal.SIGINT) is before, "a call from Python leaves the signals alone"
    assert signals.received() is None
