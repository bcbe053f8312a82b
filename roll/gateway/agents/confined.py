"""Runs an agent's program under sandlock: it reaches the endpoint and nothing else, and writes in one folder alone.

    confined.py POLICY WORD...

It runs as a plain script between `supervisor.py` and the program. POLICY is JSON: arguments of sandlock's `Sandbox`,
and `folder`, the one to write in. It ends as the program does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys


def main() -> int:
    """Run one program to its end; return its exit code."""
    import sandlock

    policy = json.loads(sys.argv[1])
    folder = policy.pop("folder")
    environment = {**os.environ, "HOME": folder, "TMPDIR": folder, "ROLL_WORKSPACE": folder}
    policy["fs_writable"] = [folder, "/dev/null"]
    box = sandlock.Sandbox(**policy, clean_env=True, env=environment)
    same = sandlock.StdioMode.INHERIT
    result = box.popen(sys.argv[2:], stdin=same, stdout=same, stderr=same).wait()
    if result.signal > 0:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(result.signal, signal.SIG_DFL)
            os.kill(os.getpid(), result.signal)
    if result.error:
        sys.stderr.write(f"sandbox: {result.error}\n")
    return result.exit_code if 0 <= result.exit_code <= 255 else 1


if __name__ == "__main__":
    sys.exit(main())
