"""The tests of a task: what public datasets, verl and ROLL write, as one of four kinds."""

from __future__ import annotations

import ast
import builtins
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.types.episode import Task

FORMS = (
    "give {'inputs': [...], 'outputs': [...]} (with 'fn_name' for calls), a list of {'input', 'output'}, "
    "{'test_list': [...], 'test_setup_code': ''} or a list of asserts, {'test': 'def check(candidate): ...', "
    "'entry_point': name}, or {'pytest': 'the text of a test file'}"
)
_COLUMNS = ("test_list", "test", "pytest", "input_output", "inputs", "tests", "test_cases", "public_test_cases")
_MODULES = ("solution", "main", "submission", "candidate", "your_module")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTests:
    """Python that calls the program."""

    setup: str = ""
    tests: tuple[str, ...] = ()
    discover: bool = False
    """The tests are those of a pytest file, which is `setup`."""
    before: str = ""
    """What the program finds defined before it starts."""
    prompt: str = ""
    """The beginning of the program, which a response may complete."""
    entry_point: str = ""
    program_names: tuple[str, ...] = ()
    """Names that mean the program's, though the tests or Python have some of this name."""
    modules: tuple[str, ...] = _MODULES
    """What `import` of these finds is the program."""


Tests = StdioTests | CallTests | SourceTests


class BrokenTask(ValueError):
    """A task whose tests can't be run, whatever the response."""


def read_tests(task: Task) -> Tests:
    """Return the tests of a task, from its `ground_truth` or its own columns; raises `BrokenTask`."""
    payload = task.payload
    truth = payload.get("ground_truth")
    if truth is None or (isinstance(truth, str) and not truth.strip()):
        truth = {name: payload[name] for name in _COLUMNS if payload.get(name) is not None}
    try:
        if not truth:
            raise BrokenTask(f"there are no tests in its columns {sorted(payload)}")
        return _read(_parsed(truth), payload)
    except (BrokenTask, SyntaxError, RecursionError, TypeError, KeyError) as error:
        raise BrokenTask(f"task {task.id!r}: its tests can't be read: {error}; {FORMS}") from error


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
        return _source(truth, payload)
    if isinstance(truth, Mapping):
        if len(truth) == 1 and (inner := next(iter(truth))) in ("input_output", "tests", "test_cases", "ground_truth"):
            return _read(_parsed(truth[inner]), payload)
        return _mapping({key: _parsed(value) for key, value in truth.items()}, {**payload, **truth})
    rows = list(truth)
    if not rows:
        raise BrokenTask("the list of tests is empty")
    if all(isinstance(row, str) for row in rows):
        return _asserts(rows, payload)
    if all(isinstance(row, Mapping) for row in rows):
        return _rows(rows, payload)
    raise BrokenTask("a list of tests holds texts, or pairs of input and output")


def _mapping(truth: Mapping[str, Any], payload: Mapping[str, Any]) -> Tests:
    if truth.get("inputs") is not None and truth.get("outputs") is not None:
        name = truth.get("fn_name") or truth.get("func_name")
        return _pairs(truth["inputs"], truth["outputs"], name)
    if truth.get("pytest"):
        return _pytest(str(truth["pytest"]), truth.get("module"))
    for key in ("test_list", "asserts", "assert"):
        if truth.get(key) is not None:
            tests = truth[key]
            return _asserts([tests] if isinstance(tests, str) else list(tests), payload)
    if truth.get("test"):
        return _source(str(truth["test"]), payload)
    for key in ("input_output", "tests", "test_cases", "public_test_cases"):
        if truth.get(key):
            return _read(truth[key], payload)
    raise BrokenTask(f"nothing is known of {sorted(truth)}")


def _rows(rows: Sequence[Mapping[str, Any]], payload: Mapping[str, Any]) -> Tests:
    if all("assert_code" in row for row in rows):
        return _asserts([str(row["assert_code"]) for row in rows], payload)
    inputs = [row.get("input", row.get("stdin", "")) for row in rows]
    outputs = [row.get("output", row.get("expected_output", row.get("stdout"))) for row in rows]
    if any(output is None for output in outputs):
        raise BrokenTask("a pair has no 'output'")
    name = payload.get("fn_name") or payload.get("func_name") if rows[0].get("testtype") == "functional" else None
    if rows[0].get("testtype") == "functional" and not name:
        name = (_parsed(payload.get("metadata")) or {}).get("func_name")
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


def _arguments(given: Any) -> tuple[Any, ...]:
    """Return the arguments of a call: a list, or a text with one JSON value a line."""
    if isinstance(given, str):
        return tuple(_value(line) for line in given.split("\n") if line.strip())
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _source(text: str, payload: Mapping[str, Any]) -> Tests:
    tree = ast.parse(text)
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if "check" in names and not any(name.startswith("test") for name in names):
        return _check(text, tree, payload)
    if any(name.startswith(("test", "Test")) or name.endswith("Test") for name in names) or _has_cases(tree):
        return _pytest(text, payload.get("module"))
    asserts = [node for node in tree.body if isinstance(node, ast.Assert)]
    if not asserts:
        raise BrokenTask("the text has no assert, no check function and no test function")
    others = [ast.unparse(node) for node in tree.body if not isinstance(node, ast.Assert)]
    found = _asserts([ast.unparse(node) for node in asserts], {**payload, "test_setup_code": "\n".join(others)})
    return replace(found, before=_types_alone(found.before))


def _types_alone(source: str) -> str:
    """Return imports and classes, with the functions that these use: another function may be the reference solution,
    which the program could call."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    used = {name.id for node in classes for name in ast.walk(node) if isinstance(name, ast.Name)}
    kept = (node for node in tree.body if not isinstance(node, ast.FunctionDef) or node.name in used)
    return "\n".join(map(ast.unparse, kept))


def _has_cases(tree: ast.Module) -> bool:
    bases = [ast.unparse(base) for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(base.endswith("TestCase") for base in bases)


def _pytest(text: str, module: Any) -> SourceTests:
    ast.parse(text)
    return SourceTests(setup=text, discover=True, modules=(str(module),) if module else _MODULES)


def _asserts(tests: Sequence[str], payload: Mapping[str, Any]) -> SourceTests:
    setup = str(payload.get("test_setup_code") or "")
    imports = payload.get("test_imports") or ()
    setup = "\n".join([*([imports] if isinstance(imports, str) else imports), setup])
    if not tests:
        raise BrokenTask("the list of tests is empty")
    for text in tests:
        if not ast.parse(text).body:
            raise BrokenTask(f"an empty test {text!r}")
    tree = ast.parse(setup)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return SourceTests(
        setup="\n".join(ast.unparse(node) for node in tree.body if node not in classes),
        tests=tuple(tests),
        before="\n".join(ast.unparse(node) for node in tree.body if isinstance(node, definitions)),
        program_names=tuple(_shadowed(tests, payload)),
        entry_point=str(payload.get("entry_point") or ""),
    )


def _shadowed(tests: Sequence[str], payload: Mapping[str, Any]) -> Iterator[str]:
    """Give the names of Python, such as `sum`, that mean the program's function in these tests.

    The task says so: its entry point, or its own solution defines it. Without, it is the function that every test
    calls first, if no test uses a name of the program otherwise. Never because the program defines it: it could then
    bring a `len` of its own.
    """
    stated = {str(payload["entry_point"])} if payload.get("entry_point") else set()
    for column in ("code", "canonical_solution", "solution"):
        stated |= _defined(payload.get(column))
    if stated:
        yield from sorted(name for name in stated if hasattr(builtins, name))
        return
    calls = [_calls(text) for text in tests]
    only_builtins = all(names and all(hasattr(builtins, name) for name in names) for names in calls)
    if only_builtins and len({names[0] for names in calls}) == 1:
        yield calls[0][0]


def _defined(code: Any) -> set[str]:
    try:
        tree = ast.parse(code) if isinstance(code, str) else ast.Module([], [])
    except (SyntaxError, ValueError):
        return set()
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def _calls(text: str) -> list[str]:
    return [n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def _check(text: str, tree: ast.Module, payload: Mapping[str, Any]) -> SourceTests:
    entry = str(payload.get("entry_point") or "")
    if not entry.isidentifier():
        raise BrokenTask("a check function needs 'entry_point', the name of the function that it checks")
    prompt = payload.get("prompt_code") or payload.get("prompt") or ""
    if not isinstance(prompt, str) or entry not in _defined(prompt):
        prompt = ""
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check")
    parts = _split(function)
    return SourceTests(
        setup="\n".join([prompt, text, *(ast.unparse(part) for part in parts)]),
        tests=tuple(f"{part.name}({entry})" for part in parts) or (f"check({entry})",),
        prompt=prompt,
        entry_point=entry,
        program_names=(entry,),
    )


def _split(function: ast.FunctionDef) -> list[ast.FunctionDef]:
    """Return a function for each `assert` of a check function, if it has them in its body alone."""
    every = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
    every = [node for node in every if not isinstance(node.test, ast.Constant)]  # assert True, "well done"
    top = [node for node in function.body if node in every]
    if len(top) != len(every) or len(top) < 2:
        return []
    parts = []
    for i, wanted in enumerate(top):
        body = [node for node in function.body[: function.body.index(wanted)] if not isinstance(node, ast.Assert)]
        part = copy.copy(function)
        part.name, part.body = f"__roll_check_{i}", [*body, wanted]
        parts.append(part)
    return [ast.fix_missing_locations(part) for part in parts]
