"""Answers of a judge by what they depend on, in memory and in a file: the same request isn't paid for twice."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO


@dataclass(frozen=True)
class JudgeVerdict:
    """A judge's answer, and what it cost."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


def cache_key(*parts: Any) -> str:
    """Return the hash of model, messages and sampling."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class JudgeCache:
    """Keeps the last `size` answers, and appends new ones to `file`. Safe to use from several threads."""

    def __init__(self, size: int, file: str | None = None) -> None:
        """Read what the file has; raises `ValueError` where it can't be written."""
        self._size = size
        self._entries: OrderedDict[str, JudgeVerdict] = OrderedDict()
        self._lock = threading.Lock()
        self._out: TextIO | None = None
        if file is None or size == 0:
            return
        path = Path(file).expanduser()
        try:
            if path.exists():
                self._load(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"judge.cache_file: {path} can't be used: {error.strerror}; name another file") from error
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._out.write("\n")  # a run was killed in the middle of a line

    def _load(self, path: Path) -> None:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                    verdict = JudgeVerdict(str(row["text"]), int(row["prompt_tokens"]), int(row["completion_tokens"]))
                    self._keep(str(row["key"]), verdict)
                except (ValueError, KeyError, TypeError):
                    continue  # the line that a killed run was writing

    def get(self, key: str) -> JudgeVerdict | None:
        """Return the answer to a request, if it is there."""
        with self._lock:
            verdict = self._entries.get(key)
            if verdict is not None:
                self._entries.move_to_end(key)
            return verdict

    def put(self, key: str, verdict: JudgeVerdict) -> None:
        """Keep an answer."""
        with self._lock:
            if self._size == 0 or key in self._entries:
                return
            self._keep(key, verdict)
            if self._out is not None:
                self._out.write(json.dumps({"key": key, **asdict(verdict)}) + "\n")
                self._out.flush()

    def _keep(self, key: str, verdict: JudgeVerdict) -> None:
        self._entries[key] = verdict
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def __enter__(self) -> JudgeCache:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._out is not None:
            self._out.close()
