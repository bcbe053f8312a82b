"""The tests of a task: what public datasets, verl and ROLL write, as one of four kinds."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from roll.rewards.code_source import BrokenTask, SourceTests, assert_tests, merged, pytest_tests, source_tests
from roll.types.trajectory import Task

MAX_BYTES = 256 * 2**20
"""Of what is packed, unpacked."""
_MAX_OPERATIONS = 64
"""Of a pickle; Python writes one text with five. A few packed bytes can be millions."""
_TEXT = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_BESIDE = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"})


@lru_cache(maxsize=8)
def unpacked(packed: str) -> str:
    """Return the text in a packed column; raises `ValueError` for anything else."""
    try:
        compressed = base64.b64decode(packed, validate=True)
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(compressed, MAX_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ValueError(f"neither JSON nor the base64 of a compressed text: {error}") from None
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {MAX_BYTES // 2**20} MiB when it is unpacked")
    if not unpacker.eof:
        raise ValueError("a compressed text that is cut off")
    if pickled[:1] in (b"[", b"{"):
        return pickled.decode()
    return _only_text(pickled)


def _only_text(pickled: bytes) -> str:
    texts: list[str] = []
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(pickled)):
            if number == _MAX_OPERATIONS:
                raise ValueError(f"a pickle of more than {_MAX_OPERATIONS} operations, which isn't loaded")
            if operation.name in _TEXT and not texts:
                texts.append(str(argument))
            elif operation.name not in _BESIDE:
                raise ValueError(f"a pickle of more than one text ({operation.name}), which isn't loaded")
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"no pickle of a text: {error}") from None
    if not texts:
        raise ValueError("no pickle of a text: it is empty")
    return texts[0]


FORMS = (
    "give {'inputs': [...], 'outputs': [...]} (with 'fn_name' for calls), a list of {'input', 'output'}, "
    "{'test_list': [...], 'test_setup_code': ''} or a list of asserts, {'test': 'def check(candidate): ...', "
    "'entry_point': name}, or {'pytest': 'the text of a test file'}"
)
_PUBLIC = ("public_test_cases", "public_tests")
_PAIR_COLUMNS = (
    "input_output", "tests", "test_cases", *_PUBLIC, "private_test_cases", "private_tests", "generated_tests",
    "official_tests", "hidden_tests", "hidden_test_cases", "verification_info",
)  # fmt: skip
_COLUMNS = (
    "test_list", "challenge_test_list", "test", "pytest", "inputs", "outputs", "fn_name", *_PAIR_COLUMNS,
)  # fmt: skip
_CHOOSE = "data_args.ground_truth names a column whose tests alone shall count"
_UNREAD = {
    "plus_input": "inputs without their results; the column `test` of evalplus/humanevalplus and mbppplus has both",
    "generated_checker": "several outputs may be right, and a program says which",
    "checker": "several outputs may be right, and a program says which",
    "interaction_format": "the program has to talk with another one",
    "input_mode": "programs read standard input here",
}
_BY_ITS_NAME = "by its name it holds further tests, in a form that isn't known; as private_test_cases it is read"
_TEST_NAMES = re.compile(
    r"(?i)(?:private|hidden|secret|held_?out)\w*(?:test|case)|(?:test|case)\w*(?:private|hidden)"
    r"|^(?:unit|extra|additional|more|other|full|all|plus|eval\w*|final|system|judge|large)_?(?:tests?|(?:test_?)?cases)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTests:
    """A whole program: what it reads, and what it must print."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTests:
    """A function, or a method of a class `Solution`: its arguments, and what it must return."""

    function: str
    inputs: tuple[tuple[Any, ...], ...]
    outputs: tuple[Any, ...]


Tests = StdioTests | CallTests | SourceTests


def read_tests(task: Task) -> Tests:
    """Return all tests of a task, from its `ground_truth` or its own columns; raises `BrokenTask`.

    A task with tests that aren't read is a broken one: what passes the others alone isn't right.
    """
    payload = task.payload
    truth = payload.get("ground_truth")
    if truth is None or (isinstance(truth, str) and not truth.strip()) or _is_public(truth, payload):
        truth = {name: payload[name] for name in _COLUMNS if _holds_something(payload.get(name))}
        _refuse_unread(task)
    try:
        if not truth:
            raise BrokenTask(f"there are no tests in its columns {sorted(payload)}")
        return _read(_parsed(truth), payload)
    except (BrokenTask, SyntaxError, RecursionError, TypeError, KeyError) as error:
        raise BrokenTask(f"task {task.id!r}: its tests can't be read: {error}; {FORMS}") from error


def _holds_something(value: Any) -> bool:
    """Return whether a column may hold tests: a text, a list, or a struct with one that isn't empty."""
    if isinstance(value, Mapping):
        return any(map(_holds_something, value.values()))
    return isinstance(value, (str, list, tuple)) and bool(value)


def _is_public(truth: Any, payload: Mapping[str, Any]) -> bool:
    """Return whether the ground truth is a column of public tests, beside which there are others."""
    return any(name in payload and payload[name] == truth for name in _PUBLIC)


def _refuse_unread(task: Task) -> None:
    """Raise `BrokenTask` for tests that stand in other files, in a form that isn't read, or need a program to judge."""
    for name, value in task.payload.items():
        why = ""
        if name == "generated_tests" and isinstance(value, (int, float)) and value:
            why = f"{value} tests in other files"
        elif name == "official_tests_complete" and value is False:
            why = "it is false: some tests are in other files"
        elif _holds_something(value) and name not in _COLUMNS and (name, value) != ("input_mode", "stdio"):
            why = _UNREAD.get(name, _BY_ITS_NAME if _TEST_NAMES.search(name) else "")
        if why:
            raise BrokenTask(f"task {task.id!r}: its column {name!r} isn't read: {why}. {_CHOOSE}")


def _parsed(value: Any) -> Any:
    """Return what a JSON text holds; another text is itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _read(truth: Any, payload: Mapping[str, Any]) -> Tests:
    if isinstance(truth, str):
        return source_tests(truth, payload)
    if isinstance(truth, Mapping):
        if len(truth) == 1 and "ground_truth" in truth:
            return _read(_parsed(truth["ground_truth"]), payload)
        return _mapping({key: _parsed(value) for key, value in truth.items()}, {**payload, **truth})
    rows = list(truth)
    if not rows:
        raise BrokenTask("the list of tests is empty")
    if all(isinstance(row, str) for row in rows):
        return assert_tests(rows, payload)
    if all(isinstance(row, Mapping) for row in rows):
        return _rows(rows, payload)
    raise BrokenTask("a list of tests holds texts, or pairs of input and output")


def _mapping(truth: Mapping[str, Any], payload: Mapping[str, Any]) -> Tests:
    by_column: dict[str, Tests] = {}
    for one, other in (("inputs", "outputs"), ("input", "output")):
        if truth.get(one) is not None and truth.get(other) is not None:
            by_column[one] = _pairs(truth[one], truth[other], truth.get("fn_name") or truth.get("func_name"))
    if truth.get("pytest"):
        by_column["pytest"] = pytest_tests(str(truth["pytest"]), truth.get("module"))
    for key in ("test_list", "challenge_test_list", "asserts", "assert"):
        if _holds_something(truth.get(key)):
            tests = truth[key]
            by_column[key] = assert_tests([tests] if isinstance(tests, str) else list(tests), payload)
    if _holds_something(truth.get("test")):
        by_column["test"] = _read(truth["test"], payload)
    for key in _PAIR_COLUMNS:
        if _holds_something(truth.get(key)):
            by_column[key] = _read(_unpacked(truth[key], key), payload)
    if not by_column:
        raise BrokenTask(f"nothing is known of {sorted(truth)}")
    return _combined(by_column)


def _unpacked(value: Any, key: str) -> Any:
    """Return what a column of pairs holds, also where it is packed as LiveCodeBench's private tests are."""
    if not isinstance(value, str) or key not in ("private_test_cases", "hidden_test_cases"):
        return value
    try:
        return _parsed(unpacked(value.strip()))
    except ValueError as error:
        raise BrokenTask(f"{key!r} can't be read: {error}") from None


def _combined(by_column: Mapping[str, Tests]) -> Tests:
    """Return all tests of one kind as one; raises `BrokenTask` for tests of two kinds."""
    (first, *others) = by_column.values()
    for other in others:
        if isinstance(first, StdioTests) and isinstance(other, StdioTests):
            first = StdioTests(inputs=first.inputs + other.inputs, outputs=first.outputs + other.outputs)
        elif isinstance(first, CallTests) and isinstance(other, CallTests) and first.function == other.function:
            inputs, outputs = first.inputs + other.inputs, first.outputs + other.outputs
            first = CallTests(function=first.function, inputs=inputs, outputs=outputs)
        elif isinstance(first, SourceTests) and isinstance(other, SourceTests):
            first = merged(first, other)
        else:
            raise BrokenTask(f"its columns {sorted(by_column)} hold tests of two kinds. {_CHOOSE}")
    return first


def _rows(rows: Sequence[Mapping[str, Any]], payload: Mapping[str, Any]) -> Tests:
    if all("assert_code" in row for row in rows):
        return assert_tests([str(row["assert_code"]) for row in rows], payload)
    inputs = [row.get("input", row.get("stdin", "")) for row in rows]
    outputs = [row.get("output", row.get("expected_output", row.get("stdout"))) for row in rows]
    if any(output is None for output in outputs):
        raise BrokenTask("a pair has no 'output'")
    kinds = {str(row.get("testtype") or row.get("type") or "stdin") for row in rows}
    if "function_call" in kinds:
        raise BrokenTask("tests of type 'function_call': nobody says how their arguments are written")
    if "functional" not in kinds:
        return _pairs(inputs, outputs, None)
    if len(kinds) > 1:
        raise BrokenTask(f"tests of several types, {sorted(kinds)}")
    metadata = _parsed(payload.get("metadata"))
    names = [payload.get("fn_name"), payload.get("func_name")]
    names.append(metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    name = next((name for name in names if name), None)
    if not name:
        raise BrokenTask("tests of testtype 'functional' need 'fn_name'")
    return _pairs(inputs, outputs, name)


def _pairs(inputs: Any, outputs: Any, name: Any) -> Tests:
    if isinstance(inputs, str) or isinstance(outputs, str) or len(inputs) != len(outputs) or not len(inputs):
        raise BrokenTask(
            f"'inputs' and 'outputs' must be lists of one length above 0, got {len(inputs)}, {len(outputs)}"
        )
    if not name:
        return StdioTests(inputs=tuple(map(_lines, inputs)), outputs=tuple(map(_lines, outputs)))
    if not str(name).isidentifier():
        raise BrokenTask(f"'fn_name' is {name!r}, which is no name")
    return CallTests(
        function=str(name), inputs=tuple(map(_arguments, inputs)), outputs=tuple(_value(item) for item in outputs)
    )


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, (list, tuple)) else str(text)


def _arguments(value: Any) -> tuple[Any, ...]:
    """Return the arguments of a call: a list, or a text with one JSON value a line."""
    if isinstance(value, str):
        return tuple(_value(line) for line in value.split("\n") if line.strip())
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
