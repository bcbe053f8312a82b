"""What Ray starts in place of a rank's Python: it asks the warm parent (`rank_parent.py`) to fork the rank, and waits.

Run as a plain script, `rank_launcher.py SOCKET WORKER_SCRIPT ARGUMENTS...`, in the environment that Ray gives the rank.
Where the warm parent doesn't answer, it becomes the Python that Ray would have started.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence

_PATIENCE_S = 30.0
"""How long the warm parent may still import. Ray waits a minute for a worker, and one that starts by itself needs some
of it."""


def forked(address: str, arguments: Sequence[str]) -> socket.socket | None:
    """Return the connection that a forked rank holds open while it lives; None: there is no such rank."""
    about = {"arguments": list(arguments), "environment": dict(os.environ), "folder": os.getcwd()}
    message = json.dumps(about, ensure_ascii=True).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_PATIENCE_S)
        connection.connect(address)
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(message)
        if connection.recv(1):
            connection.settimeout(None)
            return connection
    except OSError:  # it has ended, never came, or takes too long; it forks for nobody who has gone away
        pass
    connection.close()
    return None


def main() -> None:
    """Wait for the end of the forked rank, or become it."""
    address, arguments = sys.argv[1], sys.argv[2:]
    rank = forked(address, arguments)
    if rank is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    rank.recv(1)


if __name__ == "__main__":
    main()
