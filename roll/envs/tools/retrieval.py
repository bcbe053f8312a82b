"""The tool `retrieval`: passages of a local folder's texts, ranked by BM25.

score(q, d) = sum over words w of q: idf(w) * f(w, d) * (k1 + 1) / (f(w, d) + k1 * (1 - b + b * |d| / mean |d|))
idf(w) = ln(1 + (N - n(w) + 0.5) / (n(w) + 0.5))

(Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; idf as Lucene has it, which is
never negative.)
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.envs.tools.base import Tool

_K1, _B = 1.2, 0.75
_WORD = re.compile(r"\w+")
_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
_MAX_BYTES = 512 << 20
_MAX_QUERY_WORDS = 64


class Retrieval(Tool):
    """Finds the passages of a folder that say most about a query.

    Args:
        folder: with files .txt, .md, .rst, or .jsonl whose rows have `contents` or `text` (and perhaps `title`), also
            in folders of its own. Relative to the working directory.
        top_k: passages that a call returns, where it doesn't say.
        passage_words: words of a passage, at most; texts are cut between lines where that is possible.

    Raises `ValueError` if there is nothing to read, or more than 512 MiB.
    """

    description = "Search a collection of texts; returns the passages that match a query best."

    def __init__(self, folder: str, top_k: int = 3, passage_words: int = 150) -> None:
        self._top_k = top_k
        self._passages = list(_passages(Path(folder).expanduser(), passage_words))
        if not self._passages:
            raise ValueError(f"retrieval: no text in {folder!r}; expected files {', '.join(_SUFFIXES)}")
        self._index: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lengths = []
        for number, (title, text) in enumerate(self._passages):
            words = Counter(_words(f"{title} {text}"))
            self._lengths.append(words.total())
            for word, count in words.items():
                self._index[word].append((number, count))
        self._mean_length = sum(self._lengths) / len(self._lengths)
        self.parameters = {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "top_k": {"type": "integer", "minimum": 1, "maximum": 20, "description": "How many passages."},
            },
            "required": ["query"],
            "additionalProperties": False,
        }

    def call(self, arguments: Mapping[str, Any], state: Any) -> str:  # noqa: ARG002
        passages = self.ranked(arguments["query"], arguments.get("top_k", self._top_k))
        if not passages:
            return "Nothing was found."
        shown = [self._passages[number] for number, _ in passages]
        return "\n\n".join(f"[{i}] {title}\n{text}" for i, (title, text) in enumerate(shown, 1))

    def ranked(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Return (number, score) of the best passages; equal scores in the order of the files."""
        scores: dict[int, float] = defaultdict(float)
        total = len(self._passages)
        for word in list(dict.fromkeys(_words(query)))[:_MAX_QUERY_WORDS]:
            holding = self._index.get(word, [])
            idf = math.log(1 + (total - len(holding) + 0.5) / (len(holding) + 0.5))
            for number, count in holding:
                length = self._lengths[number] / self._mean_length
                scores[number] += idf * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * length))
        return heapq.nsmallest(top_k, scores.items(), key=lambda item: (-item[1], item[0]))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _passages(folder: Path, passage_words: int) -> Iterator[tuple[str, str]]:
    """Yield (title, text), in the order of the files' names."""
    if not folder.is_dir():
        raise ValueError(f"retrieval: there is no folder {str(folder)!r}, seen from {Path.cwd()}")
    files = sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    size = sum(file.stat().st_size for file in files)
    if size > _MAX_BYTES:
        raise ValueError(
            f"retrieval: {folder} has {size >> 20} MiB of text, more than the {_MAX_BYTES >> 20} it can hold"
        )
    for file in files:
        name = file.relative_to(folder).as_posix()
        if file.suffix != ".jsonl":
            yield from _cut(name, file.read_text("utf-8", "replace"), passage_words)
            continue
        for line, row in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
            if row.strip():
                yield from _cut_row(f"{name}:{line}", row, passage_words)


def _cut_row(where: str, row: str, passage_words: int) -> Iterator[tuple[str, str]]:
    try:
        read = json.loads(row)
        text = read.get("contents", read.get("text"))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"retrieval: {where} isn't a JSON object: {error}") from error
    if not isinstance(text, str):
        raise ValueError(f"retrieval: {where} has neither contents nor text")
    yield from _cut(str(read.get("title") or where), text, passage_words)


def _cut(title: str, text: str, passage_words: int) -> Iterator[tuple[str, str]]:
    lines: list[str] = []
    count = 0
    for line in text.splitlines():
        words = line.split()
        pieces = [words[i : i + passage_words] for i in range(0, len(words), passage_words)] or [[]]
        for piece in pieces:
            if count and count + len(piece) > passage_words:
                yield title, "\n".join(lines).strip()
                lines, count = [], 0
            lines.append(line if len(pieces) == 1 else " ".join(piece))
            count += len(piece)
    if count:
        yield title, "\n".join(lines).strip()
