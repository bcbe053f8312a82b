"""What a program gets, how its end is told, and that nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from attack_world import survivors

from roll.isolation.sandbox import confine, local, mechanisms, open_sandbox, parent_process, usage
from roll.isolation.sandbox.base import Limits, Outcome, Program, Sandbox, SandboxError, SandboxUnavailable
from roll.isolation.sandbox.local import LocalSandbox

LIMITS = Limits(wall_s=60.0, cpu_s=10.0, processes=8)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    try:
        opened = open_sandbox.open_sandbox("auto")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    assert isinstance(opened, LocalSandbox)
    with opened:
        yield opened


def run(sandbox: Sandbox, source: str, limits: Limits = LIMITS, **fields: object) -> Outcome:
    return sandbox.run(Program(source=source, **fields), limits)  # type: ignore[arg-type]


def test_a_program_gets_its_input_arguments_and_files(sandbox: LocalSandbox):
    source = "import sys; print(sys.argv, sys.stdin.read(), open('a/b.txt').read(), __name__, __file__); sys.exit(3)"
    outcome = run(sandbox, source, stdin="ä".encode(), arguments=("x", "y"), files={"a/b.txt": b"z"})
    assert outcome.stdout.decode() == "['main.py', 'x', 'y'] ä z __main__ main.py\n"
    assert (outcome.ending, outcome.exit_code, outcome.stderr) == ("exited", 3, b"")


def test_an_exception_shows_the_line_of_the_program_alone(sandbox: LocalSandbox):
    outcome = run(sandbox, "x = 1\nraise ValueError('no')")
    text = outcome.stderr.decode()
    assert outcome.exit_code == 1
    assert text.startswith('Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n    raise Val')
    assert text.endswith("ValueError: no\n")
    assert "warm_parent" not in text


@pytest.mark.parametrize(
    ("source", "code", "errors"),
    [
        ("import sys; sys.exit()", 0, b""),
        ("import sys; sys.exit('bad')", 1, b"bad\n"),
        ("import os; os._exit(70)", 70, b""),
        ("def", 1, b"SyntaxError: invalid syntax\n"),
        ("import atexit; atexit.register(print, 'late')", 0, b""),
    ],
)
def test_exit_codes_are_those_of_an_interpreter(sandbox: LocalSandbox, source: str, code: int, errors: bytes):
    outcome = run(sandbox, source)
    assert (outcome.ending, outcome.exit_code) == ("exited", code)
    assert outcome.stderr.endswith(errors)
    assert outcome.stdout == (b"late\n" if "late" in source else b"")


@pytest.mark.parametrize(
    ("source", "ending"),
    [
        ("import time; time.sleep(60)", "timeout"),
        ("while True: pass", "timeout"),
        ("print('x' * 100_000)", "output"),
        ("import os; os.abort()", "killed"),
        ("import os, time\nfor _ in range(2):\n  os.fork()\nx = bytearray(60_000_000)\ntime.sleep(60)", "memory"),
    ],
)
def test_the_limit_that_was_reached_is_told(sandbox: LocalSandbox, source: str, ending: str):
    wall_s = 1.0 if source.startswith("import time") else 30.0  # on a loaded machine, the others need some time
    limits = Limits(wall_s=wall_s, cpu_s=2.0, memory_mb=128, output_bytes=1000)
    outcome = run(sandbox, source, limits)
    assert (outcome.ending, outcome.exit_code) == (ending, None), outcome
    assert outcome.note
    assert len(outcome.stdout) <= 1000


def test_a_program_that_talks_is_answered(sandbox: LocalSandbox):
    source = "print('ready')\nwhile True: print(int(input()) ** 2)"
    with sandbox.start(Program(source=source), LIMITS) as running:
        assert running.read_line(30.0) == b"ready\n"
        for number in range(20):
            assert running.write(b"%d\n" % number)
            assert running.read_line(30.0) == b"%d\n" % number**2
        assert running.read_line(0.05) is None
        running.close_input()
        outcome = running.wait()
    assert (outcome.ending, outcome.exit_code) == ("exited", 1)
    assert b"EOFError" in outcome.stderr


def test_a_program_that_talks_is_held_to_its_limits(sandbox: LocalSandbox):
    limits = Limits(wall_s=1.0, output_bytes=1000, processes=8)
    with sandbox.start(Program(source="while True: pass"), limits) as running:
        assert running.write(b"x" * 1_000_000) is False  # nobody reads it
        assert running.wait().ending == "timeout"
    with sandbox.start(Program(source="print('x' * 5000)"), replace(limits, wall_s=30.0)) as running:
        assert running.read_line(30.0) is None
        assert running.wait().ending == "output"
    with sandbox.start(Program(source="import time; time.sleep(60)"), LIMITS) as running:
        pass  # the end of the block kills it
    assert running.wait().ending == "killed"
    assert survivors(sandbox.folder) == []


def test_nothing_reaches_the_next_program(sandbox: LocalSandbox):
    first = (
        "import builtins, json, os, random, sys\n"
        "builtins.mine = json.mine = 1; os.environ['MINE'] = '1'; os.umask(0o777); sys.path.insert(0, 'mine')\n"
        "open('left', 'w'); random.seed(0); print(random.random())"
    )
    second = (
        "import builtins, json, os, random, sys\n"
        "print(hasattr(builtins, 'mine'), hasattr(json, 'mine'), 'MINE' in os.environ, os.umask(0) == 0o777,\n"
        "      'mine' in sys.path, os.listdir('.'))\nprint(random.random())"
    )
    outcomes = [run(sandbox, source).stdout.splitlines() for source in (first, second, second)]
    assert outcomes[1][0] == outcomes[2][0] == b"False False False False False []"
    assert outcomes[1][1] != outcomes[2][1] != outcomes[0][0]


def test_a_program_writes_into_its_own_folder_alone(sandbox: LocalSandbox):
    if not confine.landlock_abi():
        pytest.skip("without Landlock the warm parent is replaced after each program instead")
    before = sandbox.pids()
    for source in ("open('../x', 'w')", "import os; os.mkdir('../x')", "import os; os.rename('.', '../x')"):
        assert run(sandbox, source).exit_code == 1
    assert run(sandbox, "import os; os.rmdir(os.getcwd())").exit_code == 1
    assert sandbox.pids() == before


def test_several_threads_run_programs_at_once(sandbox: LocalSandbox):
    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(lambda i: run(sandbox, f"print({i})").stdout, range(24)))
    assert outcomes == [b"%d\n" % i for i in range(24)]


def test_a_thread_that_ends_takes_nothing_with_it(sandbox: LocalSandbox):
    for _ in range(2):
        thread = threading.Thread(target=run, args=(sandbox, "print(1)"))
        thread.start()
        thread.join()
    assert run(sandbox, "print(2)").stdout == b"2\n"


def test_packages_are_there_if_asked_for(sandbox: LocalSandbox, tmp_path: Path):
    (tmp_path / "made_here.py").write_text("value = 5", encoding="utf-8")
    source = "import sys\nprint('made_here' in sys.modules)\nimport made_here\nprint(made_here.value)"
    assert run(sandbox, source).exit_code == 1
    with sandbox.extended([str(tmp_path)], preload=["made_here"]) as further:
        assert run(further, source).stdout == b"True\n5\n"


def test_a_path_that_cannot_be_read_is_left_out_and_named(tmp_path: Path):
    with LocalSandbox("unconfined", import_paths=[str(tmp_path / "gone")]) as sandbox:
        assert sandbox.skipped == (str(tmp_path / "gone"),)
        assert run(sandbox, "print(1)").stdout == b"1\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", ""])
def test_a_file_outside_of_the_folder_is_refused(sandbox: LocalSandbox, path: str):
    with pytest.raises(ValueError, match="relative path"):
        run(sandbox, "", files={path: b""})
    assert run(sandbox, "print(1)").stdout == b"1\n"


def test_a_warm_parent_that_died_is_an_error_and_then_replaced(sandbox: LocalSandbox):
    running = sandbox.start(Program(source="import time; time.sleep(60)"), LIMITS)
    os.kill(running.parent_pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="ended"):
        running.wait()
    assert run(sandbox, "print(1)").stdout == b"1\n"
    assert survivors(sandbox.folder) == []


@pytest.mark.parametrize(
    ("what", "refusal"),
    [
        ("def landlock_own_rules(folder: int, null: int) -> int:", "wasn't run"),
        ("def seccomp_rest() -> bytes:", "ZeroDivisionError"),
        ("def seccomp_program() -> bytes:", "ZeroDivisionError"),
        ("def seccomp_enter(program: bytes) -> None:", "ZeroDivisionError"),
    ],
)
def test_a_program_that_cannot_be_confined_is_not_run(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch, what: str, refusal: str
):
    _break(monkeypatch, what, "    1 / 0")
    with LocalSandbox(sandbox.name) as other, pytest.raises(SandboxError, match=refusal):
        run(other, "print('it ran')")


def test_a_program_without_its_last_filter_is_not_run(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
    # The warm parent's filter has some thousand bytes, the one that a program adds has some hundred.
    _break(monkeypatch, "def seccomp_enter(program: bytes) -> None:", "    len(program) > 1000 or 1 / 0")
    with LocalSandbox(sandbox.name) as other, pytest.raises(SandboxError, match="wasn't run"):
        run(other, "print('it ran')")


def _break(monkeypatch: pytest.MonkeyPatch, what: str, line: str) -> None:
    """Put a line at the beginning of a function of `confine.py`, as warm parents run it."""
    sources = parent_process.read_sources()
    assert what in sources["confine"]
    broken = {**sources, "confine": sources["confine"].replace(what, f"{what}\n{line}")}
    monkeypatch.setattr(parent_process, "read_sources", lambda: broken)


def test_nothing_is_taken_in_the_place_of_what_does_not_work(monkeypatch: pytest.MonkeyPatch):
    def broken(start: object) -> object:
        raise SandboxUnavailable("not on this machine")

    monkeypatch.setitem(mechanisms.MECHANISMS, "sandlock", broken)
    monkeypatch.setitem(mechanisms.MECHANISMS, "bwrap", broken)
    assert local.MECHANISMS is mechanisms.MECHANISMS
    with pytest.raises(
        SandboxUnavailable, match=r"sandlock: .*not on this machine.*bwrap: .*not on this.*docs/sandbox"
    ):
        open_sandbox.open_sandbox("auto")
    with pytest.raises(SandboxUnavailable, match="sandlock: not on"):
        open_sandbox.probe_sandbox("sandlock")
    with pytest.raises(SandboxUnavailable, match="expected auto, sandlock"):
        open_sandbox.open_sandbox("docker")
    assert open_sandbox.probe_sandbox("unconfined") == "unconfined"


def test_a_closed_sandbox_is_gone(sandbox: LocalSandbox):
    with LocalSandbox(sandbox.name) as other:
        run(other, "print(1)")
        assert Path(other.folder).is_dir()
    other.close()
    assert not Path(other.folder).exists()
    with pytest.raises(SandboxError, match="closed"):
        run(other, "print(1)")


def test_what_killed_callers_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(local.tempfile, "mkdtemp", lambda prefix: str(tmp_path / f"{prefix}mine"))
    for name in (
        "roll-sandbox-empty",
        "roll-sandbox-left/0",
        "roll-sandbox-used/0/home",
        "roll-sandbox-young",
        "other",
    ):
        (tmp_path / name).mkdir(parents=True)
        if "young" not in name:
            os.utime(tmp_path / name.partition("/")[0], (0, 0))
    with LocalSandbox("unconfined") as sandbox:
        assert run(sandbox, "print(1)").stdout == b"1\n"
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == ["other", "roll-sandbox-mine", "roll-sandbox-used", "roll-sandbox-young"]
    assert not (tmp_path / "roll-sandbox-mine").exists()


def test_a_sandbox_that_nobody_closed_is_gone_with_its_process(tmp_path: Path):
    code = (
        "from roll.isolation.sandbox.base import *\nfrom roll.isolation.sandbox.local import LocalSandbox\n"
        "sandbox = LocalSandbox('unconfined')\nsandbox.run(Program(source=''), Limits())\nprint(*sandbox.pids())"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert not Path("/proc", done.stdout.strip()).exists()
    assert list(tmp_path.iterdir()) == []


def test_programs_end_with_their_caller(sandbox: LocalSandbox):
    code = (
        "from roll.isolation.sandbox.base import *\nfrom roll.isolation.sandbox.local import LocalSandbox\n"
        f"sandbox = LocalSandbox({sandbox.name!r})\n"
        "program = Program(source='import os\\nos.fork()\\nprint(1)\\nwhile True: pass')\n"
        "running = sandbox.start(program, Limits(wall_s=60.0))\n"
        "running.read_line(30.0)\nprint(sandbox.folder, flush=True)\nrunning.wait()\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    folder = caller.stdout.readline().strip()
    assert survivors(folder)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 20.0
    while survivors(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert survivors(folder) == []
    usage.remove_tree(folder)


def _steady(sandbox: LocalSandbox, runs: int) -> None:
    sources = ("print(1)", "1 / 0", "import os; os._exit(2)", "print('x' * 3000)", "open('left', 'w').write('x')")
    limits = Limits(wall_s=30.0, output_bytes=2000)
    with LocalSandbox(sandbox.name, parallel=1) as other:
        for _ in range(20):
            run(other, "print(1)", limits)
        before = (_resident(os.getpid()), len(os.listdir("/proc/self/fd")), threading.active_count())
        for i in range(runs):
            run(other, sources[i % len(sources)], limits)
        after = (_resident(os.getpid()), len(os.listdir("/proc/self/fd")), threading.active_count())
        assert len(other.pids()) == len(os.listdir(other.folder)) == 1
        (slot,) = os.listdir(other.folder)
        assert sorted(os.listdir(os.path.join(other.folder, slot))) == ["errors", "home"]
        assert os.listdir(os.path.join(other.folder, slot, "home")) == []
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 4 << 20


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_and_open_files_stay_the_same(sandbox: LocalSandbox):
    _steady(sandbox, 200)


def test_memory_and_open_files_stay_the_same_for_long(sandbox: LocalSandbox):
    _steady(sandbox, 1000)
