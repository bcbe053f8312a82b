"""Data sets of reasoning-gym: made with options as YAML writes them, and what their verifiers are worth."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import re
import sys
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from datetime import time as time_of_day
from enum import Enum
from fractions import Fraction
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

FULL_MARKS = 1.0 - 1e-9
"""From here on a verifier's score is that of a right answer; its sums may be off by rounding."""
NO_ANSWERS = ("I can't answer this question.", "zzqx")
"""Texts that answer no question of any data set."""
_TRIVIAL = ("0", "1", "True", "Yes", "A", "[]", "{}")
_ENTRIES = 8
"""Questions that a text is tried on before a verifier is refused for it."""
_LIMIT_S = 3.0
"""Some questions take seconds to make: no further ones are after this time."""
_DEGENERATE = re.compile(r"(?i)(?<![a-z])(?:nan|inf|infinity)(?![a-z])|(?<=[\d.])e[-+]?\d{4,}")
_REFERENCES = ("example_answer", "example_correct_answer")
_NAMES = re.compile(r"""(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)["'](\w+)["']""")
_importing = threading.Lock()


class UselessVerifier(ValueError):
    """A verifier that tells no right answer from a wrong one."""


@cache
def dataset_files() -> dict[str, Path]:
    """Return the file of each data set, by its name; empty where reasoning-gym isn't installed. Imports nothing."""
    spec = importlib.util.find_spec("reasoning_gym")
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.rglob("*.py"))
    return {name: file for file in files for name in _NAMES.findall(file.read_text(encoding="utf-8"))}


def create_dataset(name: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """Return a data set of reasoning-gym; raises what it raises for options that it refuses, and `ValueError`."""
    _import_dataset(name)
    from reasoning_gym.factory import create_dataset as create

    return create(name, **dataset_options(name, options), seed=seed, size=size)


def _import_dataset(name: str) -> None:
    """Import the module of a data set, and the package alone where that isn't enough.

    The package imports all hundred data sets, one of which draws with matplotlib, another calculates with sympy: more
    than a second, and 80 MB of every process. So a bare package stands in for it meanwhile; a later import of the
    package finds the modules that are there.
    """
    file = dataset_files().get(name)
    with _importing:
        if "reasoning_gym" not in sys.modules and file is not None:
            with contextlib.suppress(ImportError, AttributeError), _bare_package() as root:
                parts = file.relative_to(root).with_suffix("").parts
                if len(parts) > 1:  # those beside the package's own modules are made of others
                    importlib.import_module(".".join(("reasoning_gym", *parts)))
                    return
        importlib.import_module("reasoning_gym")


@contextlib.contextmanager
def _bare_package() -> Iterator[Path]:
    """Have an empty package in place of reasoning-gym inside the block; yields its folder."""
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None and spec.origin is not None, "its files were found"
    sys.modules["reasoning_gym"] = importlib.util.module_from_spec(spec)
    try:
        yield Path(spec.origin).parent
    finally:
        del sys.modules["reasoning_gym"]


def dataset_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as the data set's configuration declares them: enums, dates, tuples, nested configurations.

    YAML has none of these; what already is of its type stays as it is. Raises `ValueError` for a text that is no member
    of an enum.
    """
    from reasoning_gym.factory import DATASETS

    if not options or name not in DATASETS:
        return dict(options)
    hints = typing.get_type_hints(DATASETS[name][1])
    return {key: _typed(value, hints.get(key), f"{name}: {key}") for key, value in options.items()}


def _typed(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return _typed(value, inner[0], where) if value is not None and len(inner) == 1 else value
    if isinstance(value, (list, tuple)) and (hint is tuple or origin in (list, tuple, Sequence)):
        each = arguments[0] if arguments else None
        return (tuple if hint is tuple or origin is tuple else list)(_typed(item, each, where) for item in value)
    if not isinstance(hint, type):
        return value
    if issubclass(hint, Enum) and not isinstance(value, hint):
        return _member(value, hint, where)
    if isinstance(value, str) and hint in (date, time_of_day):
        return hint.fromisoformat(value)
    if isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
        return _nested(value, hint, where)
    return value


def _nested(value: Mapping[str, Any], hint: Any, where: str) -> Any:
    """Return a configuration inside of another, such as one of the data sets of a `composite`."""
    hints = typing.get_type_hints(hint)
    fields = {key: _typed(item, hints.get(key), f"{where}.{key}") for key, item in value.items()}
    if {"name", "config"} <= fields.keys():
        fields["config"] = dataset_options(fields["name"], fields["config"])
    try:
        return hint(**fields)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _member(value: Any, kind: type[Enum], where: str) -> Enum:
    for member in kind:
        if value in (member.value, member.name) or str(value).lower() == member.name.lower():
            return member
    known = ", ".join(str(member.value) for member in kind)
    raise ValueError(f"{where}: {value!r} is none of its values; they are {known}")


def reference_answer(entry: Mapping[str, Any]) -> str | None:
    """Return the text of a right answer, where the generator gives one: as its answer, or in its metadata."""
    answer = entry["answer"]
    if answer is None:
        answer = next((entry["metadata"][key] for key in _REFERENCES if key in entry["metadata"]), None)
    return None if answer is None else str(answer)


def is_wrong(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an answer is wrong although the verifier of 0.1.25 may accept it.

    `nan` is near to every number for `complex_arithmetic`, `1e99999999` is computed for hours; `coin_flip` takes the
    first digits of the answer for the answer, `puzzle24` any four numbers that make 24.
    """
    gold = str(entry["answer"])
    if answer == gold:
        return False
    if any(match[0] not in gold for match in _DEGENERATE.finditer(answer)):
        return True
    source = entry["metadata"].get("source_dataset")
    try:
        if source == "coin_flip":
            difference = Fraction(answer.replace(",", "")) - Fraction(gold.replace(",", ""))
            return abs(difference) > Fraction(1, 10_000)
        if source == "puzzle24":
            return sorted(map(int, re.findall(r"\b\d+\b", answer))) != sorted(entry["metadata"]["numbers"])
    except (ArithmeticError, ValueError):
        return True
    return False


def check_dataset(dataset: Any, name: str) -> list[dict[str, Any]]:
    """Raise `UselessVerifier` if a verifier rejects its own answer, takes a text that is none, or one text for all.

    Looks at one question, and at others until two of them aren't paid for the same text; returns those it has made.
    """
    for inner, part in getattr(dataset, "datasets", {}).items():  # of a composite
        check_dataset(part, inner)
    entries = [dataset[0]]
    check_entry(dataset, entries[0], name)
    end = monotonic() + _LIMIT_S
    gold = entries[0]["answer"]
    for text in (*_TRIVIAL, *([] if gold is None else [gold])):
        paid: set[str] = set()
        unpaid = index = 0
        while unpaid < 2 and index < min(_ENTRIES, len(dataset)) and monotonic() < end:
            if index == len(entries):
                entries.append(dataset[index])
            expected = str(entries[index]["answer"])
            if _pays(dataset, entries[index], text):
                paid |= {expected} - {text}
            else:
                unpaid += 1
            index += 1
        if unpaid < 2 and len(paid) > _ENTRIES // 2:
            raise _useless(name, text, f"whatever the answer is, such as {min(paid)!r}")
    return entries


def check_entry(dataset: Any, entry: Mapping[str, Any], name: str) -> None:
    """Raise `UselessVerifier` if the verifier rejects the answer of this entry, or takes a text that is none."""
    gold = entry["answer"]
    if gold is not None and dataset.score_answer(gold, entry) < FULL_MARKS:
        raise UselessVerifier(f"the verifier of {name!r} rejects its own answer {gold!r}")
    for text in NO_ANSWERS:
        if _pays(dataset, entry, text):
            raise _useless(name, text, "which is no answer")


def _pays(dataset: Any, entry: Mapping[str, Any], text: str) -> bool:
    try:
        return not is_wrong(text, entry) and float(dataset.score_answer(text, entry)) >= FULL_MARKS
    except Exception:  # noqa: BLE001 - verifiers raise anything on a text that they can't read
        return False


def _useless(name: str, text: str, why: str) -> UselessVerifier:
    return UselessVerifier(
        f"the verifier of {name!r} gives full marks to {text!r}, {why}: a policy would be paid without an answer; use "
        "another data set"
    )
