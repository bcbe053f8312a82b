"""Responses that were recorded, for `roll envs test --responses`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EXPECTED = (
    'expected a list of texts, or an object with "responses" (a list of texts) or "messages" (as in the rows of '
    '`roll demos`), and perhaps "seed"'
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The responses of one episode."""

    line: int
    responses: tuple[str, ...]
    seed: int | None = None


def read_responses(file: Path) -> list[Recorded]:
    """Read one episode per line of a `.jsonl` file; any other file is one episode, with a response per line.

    Raises:
        ValueError: there is no such file, a line can't be read, or there is no response.
    """
    if not file.is_file():
        raise ValueError(f"--responses: there is no file {str(file)!r}")
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--responses: {file} is not text in UTF-8: {error}") from None
    if file.suffix == ".jsonl":
        episodes = [_episode(line, f"{file}:{n}", n) for n, line in enumerate(lines, 1) if line.strip()]
    else:
        episodes = [Recorded(1, tuple(line for line in lines if line.strip()))]
    if not any(episode.responses for episode in episodes):
        raise ValueError(f"--responses: {file} has no response")
    return episodes


def _episode(line: str, where: str, number: int) -> Recorded:
    try:
        row: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--responses: {where} is no JSON: {error}") from None
    seed = row.get("seed") if isinstance(row, Mapping) else None
    if isinstance(row, Mapping):
        texts = row.get("responses")
        if texts is None and isinstance(messages := row.get("messages"), list):
            texts = [m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") == "assistant"]
    else:
        texts = row
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"--responses: {where}: {_EXPECTED}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise ValueError(f"--responses: {where}: seed is {seed!r}, expected a whole number from 0 to 2**63 - 1")
    return Recorded(number, tuple(texts), seed)
