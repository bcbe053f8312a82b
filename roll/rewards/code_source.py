"""Tests in Python: asserts, check functions and test files, as what the checker runs (`code_checker.py`)."""

from __future__ import annotations

import ast
import builtins
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

_MODULES = ("solution", "main", "submission", "candidate", "your_module")


class BrokenTask(ValueError):
    """A task whose tests can't be run, whatever the response."""


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


_BESIDE = (
    "entry_point", "prompt_code", "prompt", "module", "test_setup_code", "test_imports", "code", "canonical_solution",
    "solution", "test_list",
)  # fmt: skip
"""Columns that say something about tests in a text."""


def source_tests(text: str, payload: Mapping[str, Any]) -> SourceTests:
    """Return the tests in a text: a check function, a test file, or statements that assert."""
    beside = {name: payload[name] for name in _BESIDE if payload.get(name) is not None}
    return _source_tests(text, json.dumps(beside, default=str))


@lru_cache(maxsize=32)
def _source_tests(text: str, beside: str) -> SourceTests:
    """Do so once for the responses of a group: a text with all inputs and results may have megabytes."""
    payload, tree = json.loads(beside), ast.parse(text)
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if "check" in names and not any(name.startswith("test") for name in names):
        return _check(text, tree, payload)
    if any(name.startswith(("test", "Test")) or name.endswith("Test") for name in names) or _has_cases(tree):
        return pytest_tests(text, payload.get("module"))
    return _statements(tree, payload)


def merged(one: SourceTests, other: SourceTests) -> SourceTests:
    """Return the tests of both; raises `BrokenTask` for those of a test file, which is a module of its own."""
    if one.discover or other.discover:
        raise BrokenTask("a test file beside other tests: name the one that counts in data_args.ground_truth")
    return replace(
        one,
        setup=f"{one.setup}\n{other.setup}",
        tests=(*one.tests, *other.tests),
        before=f"{one.before}\n{other.before}",
        prompt=one.prompt or other.prompt,
        entry_point=one.entry_point or other.entry_point,
        program_names=tuple(dict.fromkeys((*one.program_names, *other.program_names))),
    )


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_MAX_REPEATED = 1_000


def _statements(tree: ast.Module, payload: Mapping[str, Any]) -> SourceTests:
    """Return the tests of a text without a check function: an `assert`, a loop or a call that comes to one.

    What stands before the first test is the setup. Other statements between tests, such as `x = f(1)`, belong to all
    tests behind them.
    """
    body = [inner for node in tree.body for inner in _unguarded(node)]
    asserting = _asserting_functions(body)
    positions = [
        i for i, node in enumerate(body) if not isinstance(node, _DEFINITIONS) and _asserts_in(node, asserting)
    ]
    if not positions:
        raise BrokenTask("the text has no assert, no check function and no test function")
    definitions = [node for node in body[positions[0] :] if isinstance(node, _DEFINITIONS)]
    setup = [*body[: positions[0]], *definitions]
    between = [
        i for i in range(positions[0], positions[-1]) if i not in positions and not isinstance(body[i], _DEFINITIONS)
    ]
    if len(between) * len(positions) > _MAX_REPEATED:
        tests = ["\n".join(ast.unparse(body[i]) for i in sorted([*positions, *between]))]
    else:
        tests = ["\n".join(ast.unparse(body[i]) for i in [*(j for j in between if j < at), at]) for at in positions]
    entry = _entry_point(payload)
    if entry and _reads(tree, "candidate"):  # as EvalPlus calls the function that is tested
        tests = [f"candidate = {entry}\n{test}" for test in tests]
    parsed = assert_tests(tests, {**payload, "test_setup_code": "\n".join(map(ast.unparse, setup))})
    return replace(parsed, before=_types_alone(parsed.before))


def _unguarded(node: ast.stmt) -> list[ast.stmt]:
    """Return the statements under `if __name__ == "__main__"`, which a test file would run."""
    main = isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"
    return node.body if main and isinstance(node, ast.If) else [node]


def _asserting_functions(body: Sequence[ast.stmt]) -> set[str]:
    """Return the functions that assert something, themselves or by calling another of them."""
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    asserting: set[str] = set()
    while new := {node.name for node in functions if node.name not in asserting and _asserts_in(node, asserting)}:
        asserting |= new
    return asserting


def _asserts_in(node: ast.AST, asserting: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Assert) or (isinstance(part, ast.Raise) and "AssertionError" in ast.unparse(part)):
            return True
        if isinstance(part, ast.Call):
            called = part.func
            if isinstance(called, ast.Name) and called.id in asserting:
                return True
            if isinstance(called, ast.Attribute) and called.attr.startswith("assert"):
                return True
    return False


def _reads(tree: ast.AST, name: str) -> bool:
    """Return whether a name is used and never defined."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    parameters = any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(tree))
    return bool(names) and not parameters and not any(isinstance(node.ctx, ast.Store) for node in names)


def _entry_point(payload: Mapping[str, Any]) -> str:
    """Return the function that is asked for: by name, or what the reference defines and the first assert calls."""
    named = str(payload.get("entry_point") or "")
    if named.isidentifier():
        return named
    tests = payload.get("test_list")
    first = str(tests[0]) if isinstance(tests, (list, tuple)) and tests else ""
    try:
        called = _calls(first)
    except SyntaxError:
        return ""
    return next((name for name in called if name in _solution_names(payload)), "")


def _solution_names(payload: Mapping[str, Any]) -> set[str]:
    names: set[str] = set()
    for column in ("code", "canonical_solution", "solution"):
        names |= _defined(payload.get(column))
    return names


def _types_alone(source: str) -> str:
    """Return imports and classes, with the functions that these use: another function may be the reference solution,
    which the program could call."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    used = {name.id for node in classes for name in ast.walk(node) if isinstance(name, ast.Name)}
    imports = [node for node in tree.body if not _imports_numpy(node)]
    retained = (node for node in imports if not isinstance(node, ast.FunctionDef) or node.name in used)
    return "\n".join(map(ast.unparse, retained))


def _imports_numpy(node: ast.stmt) -> bool:
    """Return whether it imports numpy, for which there is a stand-in where the tests are and nothing where the program
    is."""
    if isinstance(node, ast.ImportFrom):
        return str(node.module).partition(".")[0] == "numpy"
    return isinstance(node, ast.Import) and all(one.name.partition(".")[0] == "numpy" for one in node.names)


def _has_cases(tree: ast.Module) -> bool:
    bases = [ast.unparse(base) for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(base.endswith("TestCase") for base in bases)


def pytest_tests(text: str, module: Any) -> SourceTests:
    """Return those of a test file."""
    ast.parse(text)
    return SourceTests(setup=text, discover=True, modules=(str(module),) if module else _MODULES)


def assert_tests(tests: Sequence[str], payload: Mapping[str, Any]) -> SourceTests:
    """Return those of a list of texts, each a test."""
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
    stated |= _solution_names(payload)
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
    method = re.fullmatch(r"([A-Za-z_]\w*)\(\)\.[A-Za-z_]\w*", entry)
    if not entry.isidentifier() and method is None:
        raise BrokenTask(
            "a check function needs 'entry_point', the name of the function that it checks, or Solution().its_name"
        )
    prompt = payload.get("prompt_code") or payload.get("prompt") or ""
    prelude = prompt if isinstance(prompt, str) and method is not None and _is_prelude(prompt) else ""
    if not isinstance(prompt, str) or entry not in _defined(prompt):
        prompt = ""
    calls = [node for node in tree.body if _calls_check(node)]  # some data sets call it at the end of the text
    if calls:
        text = "\n".join(ast.unparse(node) for node in tree.body if node not in calls)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check")
    parts = _split(function)
    return SourceTests(
        setup="\n".join([prompt or prelude, text, *(ast.unparse(part) for part in parts)]),
        tests=tuple(f"{part.name}({entry})" for part in parts) or (f"check({entry})",),
        before=prelude,
        prompt=prompt,
        entry_point=entry,
        program_names=(method[1] if method is not None else entry,),
    )


def _calls_check(node: ast.stmt) -> bool:
    """Return whether a statement does nothing but call `check`."""
    return isinstance(node, (ast.Expr, ast.Assert)) and "check" in _calls(ast.unparse(node))


def _is_prelude(text: str) -> bool:
    """Return whether a text is Python that only imports and defines, as LeetCode's tasks begin."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    return bool(body) and all(isinstance(node, (*_DEFINITIONS, ast.Assign)) for node in body)


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
