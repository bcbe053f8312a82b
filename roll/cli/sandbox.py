"""`roll sandbox test`: does what contains model output do so on this machine?"""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

from rich.table import Table

from roll.cli.exits import Exit
from roll.isolation.sandbox.base import Limits, Outcome, Program, SandboxError
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.utils.console import Console

_LIMITS = Limits(wall_s=2.0, cpu_s=1.0, memory_mb=128, processes=8, file_mb=4, output_bytes=10_000)
_SLACK_S = 5.0

ATTACKS = {
    "read the list of users": "print('BREACH', open('/etc/passwd').read(9))",
    "list the user's home": "import os; print('BREACH', os.listdir(@HOME@))",
    "read the caller's environment": "print('BREACH', open('/proc/@CALLER@/environ').read(9))",
    "list processes": "import os; print('BREACH', os.listdir('/proc')[:3])",
    "write into /tmp": "import tempfile; print('BREACH', tempfile.TemporaryFile(dir='/tmp'))",
    "connect by TCP": "import socket; socket.create_connection(('127.0.0.1', @PORT@), 1); print('BREACH')",
    "send by UDP": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', @PORT@)); print('BREACH')",
    "signal the caller": "import os; os.kill(@CALLER@, 0); print('BREACH')",
    "trace its parent": (
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(0x4206, os.getppid(), None, None) == 0: print('BREACH')"
    ),
    "new namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('BREACH')",
    "fork without end": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "memory without end": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "output without end": "while True: print('x' * 1000)",
    "never end": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
}
"""The red-team suite in tests/isolation has many more; these take a few seconds."""


def test_sandbox(options: argparse.Namespace) -> int:
    """Print what came of each attack; the exit code is 1 if one succeeded."""
    with open_sandbox(options.name) as sandbox, socket.create_server(("127.0.0.1", 0)) as listener:
        values = {"CALLER": str(os.getpid()), "PORT": str(listener.getsockname()[1]), "HOME": repr(str(Path.home()))}
        table = Table("attack", "", "how it ended", title=f"sandbox {sandbox.name}", title_justify="left")
        failed = 0
        for name, source in ATTACKS.items():
            for variable, value in values.items():
                source = source.replace(f"@{variable}@", value)
            began = time.monotonic()
            try:
                outcome = sandbox.run(Program(source=source), _LIMITS)
            except SandboxError as error:
                verdict, how = "failed", str(error)
            else:
                late = time.monotonic() - began > _LIMITS.wall_s + _SLACK_S
                verdict = "NOT CONTAINED" if b"BREACH" in outcome.stdout or late else "contained"
                how = _how(outcome)
            failed += verdict != "contained"
            table.add_row(name, verdict, how)
        began, runs = time.monotonic(), 50
        for _ in range(runs):
            sandbox.run(Program(source="print(1)"), _LIMITS)
        speed = runs / (time.monotonic() - began)
    console = Console(highlight=False, markup=False, width=110)
    console.print(table)
    console.print(f"{len(ATTACKS) - failed} of {len(ATTACKS)} contained; {speed:.0f} small programs a second")
    return Exit.FAILED if failed else Exit.DONE


def _how(outcome: Outcome) -> str:
    if outcome.ending != "exited":
        return f"{outcome.ending}: {outcome.note}"
    message = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return message[:60] or f"exit code {outcome.exit_code}"
