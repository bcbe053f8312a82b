"""What an agent prints, bounded: the beginning and the end of it, in a file per episode."""

from __future__ import annotations

from collections import deque
from pathlib import Path

HEAD = TAIL = 64 << 10
_LAST = 1 << 20
"""Bytes of standard output in which its last line of JSON is looked for."""


class AgentLog:
    """Takes what one episode's agent prints. Never holds more than `HEAD` + `TAIL` bytes, however much comes."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped = 0
        self._stdout = bytearray()

    def write(self, data: bytes, *, stdout: bool) -> None:
        """Take what was printed to standard output, or to standard error."""
        if stdout:
            self._stdout += data
            del self._stdout[:-_LAST]
        room = HEAD - len(self._head)
        self._head += data[:room] if room > 0 else b""
        rest = data[room:] if room > 0 else data
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= TAIL:
            first = self._tail.popleft()
            self._tail_bytes -= len(first)
            self._dropped += len(first)

    @property
    def text(self) -> str:
        """Return all that is kept."""
        cut = f"\n[... {self._dropped} bytes ...]\n".encode() if self._dropped else b""
        return (bytes(self._head) + cut + b"".join(self._tail)).decode("utf-8", "replace")

    @property
    def stdout_lines(self) -> list[str]:
        """Return the last lines of standard output."""
        return bytes(self._stdout).decode("utf-8", "replace").splitlines()

    def end(self, characters: int = 600) -> str:
        """Return the last words, for messages."""
        return self.text.strip()[-characters:]

    def save(self, file: Path, about: str) -> None:
        """Write it below a line that says whose it is."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{about}\n\n{self.text}", encoding="utf-8", errors="replace")
