"""Processes of agents: what they print is bounded, how they end is told, and nothing that they start survives."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.configs.schema.agents_config import AgentEnv
from roll.gateway.agents import runners
from roll.gateway.agents.logs import HEAD, TAIL, AgentLog
from roll.gateway.agents.pool import AgentFailed, AgentFunctions
from roll.gateway.agents.process import AgentNotStarted, AgentProcess
from roll.gateway.agents.runners import CommandRunner, Order
from roll.isolation.sandbox.public_files import public_parts

FORKS = r"""
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(1, f"{os.getpid()}\n".encode())
            time.sleep(600)
        os._exit(0)
"""


async def start(code, log=None):
    words = [sys.executable, "-c", code]
    return await AgentProcess.start(words, environment=dict(os.environ), cwd=None, log=log or AgentLog())


async def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        await asyncio.sleep(0.01)


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "ended"),
    [("import sys; sys.exit(3)", "exit code 3"), ("pass", "exit code 0"), ("import os; os.abort()", "signal 6")],
)
def test_how_an_agent_ends_is_told(code, ended):
    async def run():
        process = await start(code)
        return (await process.wait()).text

    assert asyncio.run(run()) == ended


@pytest.mark.parametrize("by_itself", [True, False])
def test_nothing_that_an_agent_starts_survives_its_end(by_itself):
    async def run():
        log = AgentLog()
        process = await start(FORKS + ("time.sleep(0.5)" if by_itself else "time.sleep(600)"), log)
        await until(lambda: log.text.count("\n") == 3)
        pids = [int(pid) for pid in log.text.split()]
        assert all(map(is_alive, pids))
        if not by_itself:
            await process.kill()
        ended = await process.wait()
        return ended.text, [pid for pid in [process.pid, *pids] if is_alive(pid)]

    assert asyncio.run(run()) == ("exit code 0" if by_itself else "signal 9", [])


def test_nothing_survives_a_run_that_is_killed():
    code = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_gateway_agents_process import FORKS, AgentLog, start, until
async def run():
    log = AgentLog()
    await start(FORKS + "time.sleep(600)", log)
    await until(lambda: log.text.count(chr(10)) == 3)
    print(log.text, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    asyncio.run(until(lambda: not any(map(is_alive, pids))))


def test_a_program_that_is_not_there_is_named():
    async def run():
        await AgentProcess.start(["no-such-agent"], environment=dict(os.environ), cwd=None)

    with pytest.raises(AgentNotStarted, match="can't run no-such-agent: No such file or directory"):
        asyncio.run(run())


def test_a_flood_of_output_costs_no_more_than_its_beginning_and_its_end():
    async def run():
        log = AgentLog()
        process = await start("print('first')\nfor i in range(300): print('x' * 10_000)\nprint('last')", log)
        await process.wait()
        return log

    log = asyncio.run(run())
    assert log.text.startswith("first\nxxx")
    assert log.text.endswith("xxx\nlast\n")
    assert HEAD + TAIL <= len(log.text) < HEAD + 3 * TAIL
    assert log.stdout_lines[-1] == "last"


HOARDS = """
import os, time
os.chdir(os.environ["ROLL_WORKSPACE"])
os.makedirs("closed/inside")
os.chmod("closed", 0)
for _ in range(200):
    os.mkdir("d")
    os.chdir("d")
print("full", flush=True)
time.sleep(600)
"""


def test_the_folder_of_an_agent_in_the_sandbox_goes_with_it_when_it_is_killed(tmp_path, monkeypatch):
    (tmp_path / "hoards.py").write_text(HOARDS)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    runner = CommandRunner(AgentEnv(command=("python", "hoards.py"), sandbox=True, cwd=str(tmp_path)))
    order = Order(episode="e", task={}, base_url="http://127.0.0.1:9/v1", api_key="key", timeout_s=9.0)

    async def run():
        log = AgentLog()
        playing = asyncio.create_task(runner.run(order, log))
        await until(lambda: log.text.strip() == "full" or playing.done())
        assert not playing.done(), log.text
        assert len(list((tmp_path / "temporary").iterdir())) == 1
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(run())
    assert not list((tmp_path / "temporary").iterdir())


GREEDY = """
import os, subprocess, sys, time
os.chdir(os.environ["ROLL_WORKSPACE"])
match sys.argv[1]:
    case "one file":
        with open("large", "wb") as file:
            try:
                file.write(bytes(20 << 20))
            except OSError as error:
                print("too large:", error.strerror)
        time.sleep(2)
        print("lives")
    case "files":
        os.makedirs("within/closed")
        for number in range(20):
            with open(f"within/closed/{number}", "wb") as file:
                file.write(bytes(1 << 20))
        os.chmod("within/closed", 0)
        time.sleep(60)
    case "removed files":
        held = []
        for number in range(20):
            held.append(open("file", "wb"))
            held[-1].write(bytes(1 << 20))
            os.remove("file")
        time.sleep(60)
    case "memory":
        held = []
        for _ in range(30):
            held.append(bytearray(32 << 20))
        time.sleep(60)
    case "children":
        code = "held = bytearray(100 << 20); import time; time.sleep(2)"
        children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(8)]
        codes = [child.wait() for child in children]
        print("killed", sum(code < 0 for code in codes), flush=True)
"""
MEMORY, DISK = "sandbox_memory_mb", "sandbox_disk_mb"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("one file", "too large: File too large"),
        ("files", DISK),
        ("removed files", DISK),
        ("memory", MEMORY),
        ("children", "killed"),
    ],
)
def test_an_agent_in_the_sandbox_has_no_more_memory_and_disk_than_it_may(tmp_path, monkeypatch, what, told):
    (tmp_path / "greedy.py").write_text(GREEDY)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    env = AgentEnv(command=("python", "greedy.py", what), sandbox=True, cwd=str(tmp_path), **{MEMORY: 512, DISK: 8})
    order = Order(episode="e", task={}, base_url="http://127.0.0.1:9/v1", api_key="key", timeout_s=30.0)
    log = AgentLog()
    outcome = asyncio.run(CommandRunner(env).run(order, log))
    assert told in log.text
    assert (outcome.code is None) == (told in (MEMORY, DISK)), "killed, not ended with a code"
    if what == "one file":
        assert "lives" in log.text
    if what == "children":
        assert int(log.text.split()[-1]) >= 3
    assert not list((tmp_path / "temporary").iterdir())


READS = """
import pathlib, sys
for name in sys.argv[1:]:
    try:
        print(pathlib.Path(name).read_text())
    except OSError as error:
        print(type(error).__name__)
"""


def test_an_agent_in_the_sandbox_reads_of_the_system_what_every_user_may(tmp_path, monkeypatch):
    for folder in ("system/open/deep", "system/closed", "here"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here" / "reads.py").write_text(READS)
    files = ["open/deep/file", "open/secret", "closed/file", "open/link"]
    for name in files[:3]:
        (tmp_path / "system" / name).write_text(name)
    (tmp_path / "system" / "open" / "secret").chmod(0o600)
    (tmp_path / "system" / "closed").chmod(0o700)
    (tmp_path / "system" / "open" / "link").symlink_to("secret")
    monkeypatch.setattr("roll.gateway.agents.runners._SYSTEM", (*runners._SYSTEM, str(tmp_path / "system")))
    command = ("python", "reads.py", *(str(tmp_path / "system" / name) for name in files))
    log = AgentLog()
    order = Order(episode="e", task={}, base_url="http://127.0.0.1:9/v1", api_key="key", timeout_s=30.0)
    runner = CommandRunner(AgentEnv(command=command, sandbox=True, cwd=str(tmp_path / "here")))
    asyncio.run(runner.run(order, log))
    assert log.text.split() == ["open/deep/file", "PermissionError", "PermissionError", "PermissionError"]
    assert public_parts(str(tmp_path / "system")) == (str(tmp_path / "system" / "open" / "deep"),)
    assert public_parts(str(tmp_path / "system" / "open" / "deep")) == (str(tmp_path / "system" / "open" / "deep"),)
    assert public_parts(str(tmp_path / "system" / "closed")) == public_parts("/no/such/folder") == ()


FUNCTION = """
import os, sys, time

def play(task, base_url, api_key):
    print("plays", task["do"])
    match task["do"]:
        case "raises": raise KeyError("a word")
        case "exits": os._exit(4)
        case "sys.exit": sys.exit(7)
        case "hangs": time.sleep(600)
        case "forks":
            if os.fork() == 0: time.sleep(600)
        case "returns an object": return object()
        case "a long text": return "x" * 9_000_000
    return {"pid": os.getpid(), "key": os.environ["OPENAI_API_KEY"]}
"""


def functions(tmp_path, source=FUNCTION, name="play"):
    (tmp_path / "agent.py").write_text(source)
    return AgentFunctions(f"{tmp_path}/agent.py:{name}", python=sys.executable, environment=dict(os.environ), cwd=None)


def request(do, key="k"):
    return {"task": {"do": do}, "base_url": "", "api_key": key, "environment": {"OPENAI_API_KEY": key}}


def test_a_function_stays_loaded_and_each_episode_has_its_own_words(tmp_path):
    async def run():
        played = functions(tmp_path)
        logs = [AgentLog(), AgentLog()]
        found = [await played.play(request(f"game {i}", f"key {i}"), logs[i]) for i in range(2)]
        await played.close()
        return found, [log.text for log in logs]

    (first, second), logs = asyncio.run(run())
    assert first["pid"] == second["pid"]
    assert (first["key"], second["key"]) == ("key 0", "key 1")
    assert logs == ["plays game 0\n", "plays game 1\n"]
    assert not is_alive(first["pid"])


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raises", "KeyError: 'a word'\nTraceback"),
        ("exits", "its process ended with exit code 4"),
        ("sys.exit", "SystemExit: 7"),
        ("returns an object", "it returned a object that JSON doesn't take"),
        ("a long text", "can't be understood"),
    ],
)
def test_a_function_that_fails_costs_one_episode(tmp_path, do, message):
    async def run():
        played = functions(tmp_path)
        try:
            with pytest.raises(AgentFailed) as error:
                await played.play(request(do), AgentLog())
            assert await played.play(request("well"), AgentLog())
        finally:
            await played.close()
        return str(error.value)

    assert message in asyncio.run(run())


@pytest.mark.parametrize("do", ["hangs", "forks"])
def test_a_process_that_hangs_or_leaves_children_is_not_used_again(tmp_path, do):
    async def run():
        played = functions(tmp_path)
        first = await played.play(request("well"), AgentLog())
        try:
            await asyncio.wait_for(played.play(request(do), AgentLog()), 0.5)
        except TimeoutError:
            assert do == "hangs"
        assert not is_alive(first["pid"])
        second = await played.play(request("well"), AgentLog())
        await played.close()
        return first["pid"], second["pid"]

    first, second = asyncio.run(run())
    assert first != second


def test_a_function_that_cannot_be_loaded_says_why(tmp_path):
    async def run(**changes):
        await functions(tmp_path, **changes).play(request("well"), AgentLog())

    with pytest.raises(AgentNotStarted, match="has no attribute 'nothing'"):
        asyncio.run(run(name="nothing"))
    with pytest.raises(AgentNotStarted, match="No module named 'no_such_package'"):
        asyncio.run(run(source="import no_such_package"))
    with pytest.raises(AgentNotStarted, match="ended with exit code 9"):
        asyncio.run(run(source="import os; os._exit(9)"))
