"""Plants a fault in a copy of a project and runs the tests that reach its line.

Which they are, one run of the fast tier shows, in which the lines of all faults write down the test that runs them: in
whatever process, which coverage tools would miss.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from deliberate_faults import Fault
from drawn_faults import Function, Source

SECONDS = 180.0
"""For one fault, in all."""
BATCH = 40.0
"""About the seconds of one run of pytest: one with few files is enough for most faults."""
LEFT = (".git", ".venv*", "output", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")

REACHED = """
def _reached(number, _seen=set()):
    import io, os
    key = (number, os.environ.get("PYTEST_CURRENT_TEST", ""))
    if key not in _seen:
        _seen.add(key)
        try:
            with io.open("FOLDER/%d" % os.getpid(), "a", encoding="utf-8") as file:
                file.write("%d %s\\n" % key)
        except OSError:
            pass
"""


class Copy:
    """A copy of a project, beside links to its environments and to the shared data."""

    def __init__(self, checkout: Path):
        self.folder = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))  # short: sockets have long names
        self.project = self.folder / "p"
        shutil.copytree(checkout, self.project, ignore=shutil.ignore_patterns(*LEFT), symlinks=True)
        for environment in checkout.glob(".venv?*"):
            (self.project / environment.name).symlink_to(environment.resolve())
        if (checkout.parent / "shared").is_dir():
            (self.folder / "shared").symlink_to((checkout.parent / "shared").resolve())
        self._made = self.folder / "t"
        here = Path(__file__).parent
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": f"{self.project}{os.pathsep}{here}", "PYTHONDONTWRITEBYTECODE": ""}
        environment |= {"TMPDIR": str(self._made), "RAY_TMPDIR": str(self._made), "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        environment |= {"FAULTS_ORDER": str(self._made / "order"), "FAULTS_REPORT": str(self._made / "report")}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        command = [sys.executable, str(here / "watched_tests.py")]
        self._starter = subprocess.Popen(command, cwd=self.project, env=environment, **pipes)

    def read(self, file: str) -> str:
        return (self.project / "roll" / file).read_text("utf-8")

    def write(self, file: str, text: str) -> None:
        path = self.project / "roll" / file
        path.write_text(text, "utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):  # may be of the same second and size
            compiled.unlink()

    def pytest(
        self, arguments: list[str], seconds: float, tests: dict[str, float] | None = None
    ) -> tuple[int, dict[str, dict]]:
        """Run tests; return pytest's exit code and what was written down of each test."""
        self._made.mkdir(exist_ok=True)
        (self._made / "order").write_text(json.dumps({"seconds": seconds, "tests": tests}), "utf-8")
        files = dict.fromkeys(name.partition("::")[0] for name in tests or ())
        command = ["-q", "-p", "no:cacheprovider", "-p", "watched_tests", *files, *arguments]
        self._starter.stdin.write(json.dumps(command).encode() + b"\n")
        self._starter.stdin.flush()
        select.select([self._starter.stdout], [], [], seconds + 120)
        self._end_processes()
        code = int(self._starter.stdout.readline())
        report = self._made / "report"
        rows = [json.loads(line) for line in report.read_text("utf-8").splitlines()] if report.exists() else []
        shutil.rmtree(self._made, ignore_errors=True)
        return code, {row["id"]: row for row in rows}

    def _end_processes(self) -> None:
        """Kill whatever a run has left: all that works in the copy or inherited its folder for temporary files."""
        mark = f"TMPDIR={self._made}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                works_here = os.readlink(process / "cwd").startswith(str(self.folder))
                inherited = mark in (process / "environ").read_bytes().split(b"\0")
                if (works_here or inherited) and int(process.name) != self._starter.pid:
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue

    def remove(self) -> None:
        self._starter.kill()
        self._starter.wait()
        self._end_processes()
        shutil.rmtree(self.folder, ignore_errors=True)


def _watch(source: Source, offset: int, call: str) -> list[tuple[int, str]]:
    """Return what is inserted where, so that a call precedes a statement; nothing outside of functions."""
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.stmt)]
    around = sorted((*source.span(node), k) for k, node in enumerate(nodes) if source.holds(node, offset))
    start, _, number = around[-1]
    statement = nodes[number]
    if not any(isinstance(nodes[k], Function) for _, _, k in around[:-1]):
        return []
    if isinstance(statement, (ast.If, ast.While)):
        begin, end = source.span(statement.test)
        return [(begin, f"{call} or ("), (end, ")")]
    line = source.line_start(start)
    if source.text[line:start].strip():
        return [(start, f"{call}; ")]
    return [(line, f"{source.text[line:start]}{call}\n")]


def watch_lines(copy: Copy, faults: list[Fault], folder: Path) -> None:
    """Have each fault's line write down which tests run it."""
    by_file = defaultdict(list)
    for number, fault in enumerate(faults):
        by_file[fault.file].append((number, fault))
    for file, there in by_file.items():
        source = Source(copy.read(file))
        head = [n for n in source.tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
        head = head or [n for n in source.tree.body[:1] if isinstance(n, ast.Expr)]
        inserted = [(source.span(head[-1])[1] if head else 0, REACHED.replace("FOLDER", str(folder)))]
        for number, fault in there:
            inserted += _watch(source, source.changed_place(fault), f"_reached({number})")
        text = source.text
        for offset, new in sorted(inserted, key=lambda change: change[0], reverse=True):
            text = text[:offset] + new + text[offset:]
        copy.write(file, text)


@dataclasses.dataclass
class Reach:
    """What one run of the fast tier showed."""

    seconds: dict[str, float]
    """Of each test that passed."""
    tests: dict[str, list[str]]
    """By a fault's name: those that passed and ran the line, in whatever process."""

    def ordered(self, fault: Fault) -> list[str]:
        """Return a fault's tests: first those named for it or of its package, then quick ones, file by file."""
        package = f"tests/{fault.file.partition('/')[0]}/"
        where = tuple(f"tests/{name}" for name in fault.where)
        reaching = self.tests.get(fault.name) or [test for test in self.seconds if test.startswith(where)]

        def rank(test: str) -> tuple:
            seconds = self.seconds[test]
            near = test.startswith(where or package)
            return (not near, seconds > 0.2, seconds > 2, seconds > 10, test.partition("::")[0], seconds)

        return sorted(reaching, key=rank)


def reach(
    checkout: Path, faults: list[Fault], arguments: list[str], seconds: float, tests: dict[str, float] | None = None
) -> Reach:
    """Run tests, such as the fast tier, once with the lines of all faults watched."""
    copy = Copy(checkout)
    try:
        folder = copy.folder / "reached"
        folder.mkdir()
        watch_lines(copy, faults, folder)
        _, rows = copy.pytest(arguments, seconds, tests)
        passed = {name: row["seconds"] for name, row in rows.items() if row["outcome"] == "passed"}
        of_file = defaultdict(list)
        for name in passed:
            of_file[name.partition("::")[0]].append(name)
        found = defaultdict(set)
        for path in folder.iterdir():
            of_pytest = f"process {path.name}" in rows
            for line in path.read_text("utf-8").splitlines():
                number, _, test = line.partition(" ")
                test = test.rpartition(" (")[0]
                # Another process knows the test that started it, but later ones of the file may use it too.
                others = [] if of_pytest else of_file[test.partition("::")[0]]
                found[faults[int(number)].name].update([test, *others])
        return Reach(passed, {name: sorted(tests & set(passed)) for name, tests in found.items()})
    finally:
        copy.remove()


def _batches(tests: list[str], seconds: dict[str, float]) -> Iterator[dict[str, float]]:
    """Yield tests in their order, as many as one run of pytest may take."""
    batch: dict[str, float] = {}
    for test in tests:
        files = {name.partition("::")[0] for name in (*batch, test)}
        if batch and sum(batch.values()) + seconds[test] + len(files) > BATCH:
            yield batch
            batch = {}
        batch[test] = seconds[test]
    if batch:
        yield batch


class Trial:
    """One fault and the tests that may notice it."""

    def __init__(self, copy: Copy, fault: Fault, reach: Reach):
        self._copy, self._fault, self._reach = copy, fault, reach
        self._text = copy.read(fault.file)
        self._end = time.monotonic() + SECONDS
        self.ran = 0

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _first_failure(self, arguments: list[str], tests: dict[str, float] | None) -> str | None:
        code, rows = self._copy.pytest(["-x", "-p", "no:xdist", *arguments], max(self._left(), 20.0), tests)
        self.ran += sum(row["outcome"] is not None for row in rows.values())
        failed = [name for name, row in rows.items() if row["outcome"] == "failed"]
        return failed[0] if failed else None if code in (0, 1, 2, 5) else "the tests don't start, or wait for ever"

    def _noticing(self, arguments: list[str], tests: dict[str, float] | None = None) -> str | None:
        """Return the first test that fails with the fault and passes without it."""
        while self._left() > 5:
            self._copy.write(self._fault.file, Source(self._text).planted(self._fault))
            try:
                failed = self._first_failure(arguments, tests)
            finally:
                self._copy.write(self._fault.file, self._text)
            if not failed:
                return None
            alone = {failed: self._reach.seconds.get(failed, 10.0)} if "::" in failed else tests
            if not self._first_failure([] if alone else arguments, alone):
                return failed
            arguments = [*arguments, "--deselect", failed]
        return None

    def caught_by(self) -> tuple[str, str] | None:
        """Return (tier, test): of the fast tier what reaches the line, of the full tier the package's folder."""
        for batch in _batches(self._reach.ordered(self._fault), self._reach.seconds):
            if test := self._noticing([], batch):
                return "fast", test
        folders = [f"tests/{name}" for name in self._fault.where or self._fault.file.split("/")[:1]]
        folders = [folder for folder in folders if (self._copy.project / folder).exists()]
        if folders and (test := self._noticing(["--tier", "full", "--strict-tier", *folders])):
            return "full", test
        return None

    @property
    def whole(self) -> bool:
        """Return whether there was time for all tests."""
        return self._left() > 5
