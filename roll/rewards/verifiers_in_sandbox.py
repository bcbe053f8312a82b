"""Scoring with the verifiers of reasoning-gym in a sandbox, for those that execute the answer."""

from __future__ import annotations

import base64
import importlib.util
import json
import pickle
import weakref
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll.isolation.sandbox.base import Limits, Program, Sandbox, SandboxError
from roll.utils.reasoning_gym_sets import dataset_options

_LIMITS = Limits(wall_s=20.0, cpu_s=10.0, memory_mb=1024)
_EXTENDED: weakref.WeakKeyDictionary[Sandbox, Sandbox] = weakref.WeakKeyDictionary()


class VerifierRaised(Exception):
    """The verifier raised on an answer."""


class SandboxedVerifier:
    """The verifier of one data set, where the answer can do no harm.

    A verifier that takes too long, or that dies, has raised on the answer.
    """

    def __init__(self, sandbox: Sandbox, name: str, config: Mapping[str, Any]) -> None:
        self._sandbox, self._name, self._config = with_packages(sandbox), name, _pickled(dataset_options(name, config))
        self._gold: tuple[str, dict[str, Any]] | None = None

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Return the verifier's score.

        Raises:
            VerifierRaised: the verifier raises on this answer.
            SandboxError: the sandbox failed, or the verifier doesn't get as far as the answer.
        """
        pickled = _pickled(entry)
        if self._gold is not None and self._gold[0] == pickled and answer == entry["answer"]:
            return _score(self._gold[1])
        asked = {"dataset": self._name, "config": self._config, "entry": pickled, "answer": answer}
        program = Program(source=_source(), stdin=json.dumps(asked).encode())
        outcome = self._sandbox.run(program, _LIMITS)
        lines = outcome.stdout.splitlines()
        if not lines:
            end = outcome.stderr[-1000:].decode("utf-8", "replace")
            raise SandboxError(f"the verifier of {self._name!r} scored nothing: {outcome.ending} {outcome.note} {end}")
        self._gold = pickled, json.loads(lines[0])
        if len(lines) < 2:
            raise VerifierRaised(f"it ended without a score: {outcome.ending}")
        return _score(json.loads(lines[1]))


def _score(reply: dict[str, Any]) -> float:
    if reply["score"] is None:
        raise VerifierRaised(reply["error"])
    return float(reply["score"])


def _pickled(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def with_packages(sandbox: Sandbox) -> Sandbox:
    """Return the sandbox whose programs may import reasoning-gym, which its warm parent has imported; one for each."""
    if sandbox not in _EXTENDED:
        _EXTENDED[sandbox] = sandbox.extended(_folders(), ["reasoning_gym", "sympy"])
    return _EXTENDED[sandbox]


@lru_cache(maxsize=1)
def _folders() -> list[str]:
    """Return where reasoning-gym and what it imports are installed."""
    folders = []
    for name in ("reasoning_gym", "sympy", "mpmath", "numpy"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))


@lru_cache(maxsize=1)
def _source() -> str:
    return Path(__file__).with_name("verifier_program.py").read_text("utf-8")
