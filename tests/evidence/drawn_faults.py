"""Faults that a seed draws from the code: a negated condition, an off-by-one, a dropped statement.

Each package has at least one, and large packages more. What no test could notice isn't drawn: the text of errors and
logs, `__repr__`, what only a type checker reads, time limits.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from deliberate_faults import Fault

Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = tuple[str, int, int, str]
"""Kind, and the offsets between which another text replaces the one there."""

KINDS = ("negated condition", "off by one", "dropped statement")
TEXTS = {"__repr__", "__str__", "__format__"}
LOGS = re.compile(r"^(_?logger|logging|log|warnings)\.")
LIMITS = {"timeout", "stacklevel", "indent", "width", "min_width", "maxsize", "max_workers"}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Continue, ast.Break, ast.Raise, ast.Return)
OTHER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
PLAIN = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


class Source:
    """The text of a module, its tree, and where nodes stand in the text."""

    def __init__(self, text: str):
        self.text = text
        self.tree = ast.parse(text)
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a place of the tree, whose columns count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def holds(self, node: ast.AST, offset: int) -> bool:
        start, end = self.span(node)
        return start <= offset < end

    def line_start(self, offset: int) -> int:
        return self.text.rfind("\n", 0, offset) + 1

    def functions(self, node: ast.AST | None = None, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Function]]:
        """Yield every function with its qualified name, such as `Store.save` or `outer.inner`."""
        for child in ast.iter_child_nodes(node or self.tree):
            named = isinstance(child, (ast.ClassDef, *Function.__args__))
            inside = (*names, child.name) if named else names
            if isinstance(child, Function):
                yield ".".join(inside), child
            yield from self.functions(child, inside)

    def scope(self, function: str) -> tuple[int, int]:
        """Return where a function begins and ends; an empty name is the whole text."""
        spans = [self.span(node) for name, node in self.functions() if name == function]
        if not function:
            spans = [(0, len(self.text))]
        if len(spans) != 1:
            raise LookupError(f"{len(spans)} functions are named {function}")
        return spans[0]

    def place(self, fault: Fault) -> int:
        """Return the offset of the text that a fault replaces."""
        start, end = self.scope(fault.function)
        if (times := self.text.count(fault.old, start, end)) != 1:
            raise LookupError(f"{fault.file} has {times} times {fault.old!r} in {fault.function or 'it'}")
        return self.text.index(fault.old, start, end)

    def changed_place(self, fault: Fault) -> int:
        """Return the offset of the first character that a fault changes."""
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(fault.old, fault.new, strict=False))
        return self.place(fault) + len(list(same))

    def planted(self, fault: Fault) -> str:
        at = self.place(fault)
        return self.text[:at] + fault.new + self.text[at + len(fault.old) :]


def _is_unnoticed(node: ast.AST) -> bool:
    """Return whether no test could notice a fault in this node: texts of logs, type checking, limits, sizes."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or bool(LOGS.match(ast.unparse(node)))
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.LShift) and isinstance(node.left, ast.Constant)
    return isinstance(node, (ast.Assert, ast.JoinedStr, ast.AnnAssign)) or getattr(node, "arg", "") in LIMITS


def _own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield these nodes and those below in which a fault may be; inner functions are functions of their own."""
    for node in nodes:
        if not isinstance(node, (*Function.__args__, ast.ClassDef, ast.Lambda)) and not _is_unnoticed(node):
            yield node
            if not isinstance(node, ast.Raise):
                yield from _own_nodes(ast.iter_child_nodes(node))


def _bounds(node: ast.AST) -> list[ast.expr]:
    """Return the ends of a slice or a range that are more than numbers, which change by themselves."""
    if isinstance(node, ast.Slice):
        bounds = [node.lower, node.upper]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = node.args[:2][-1:]
    else:
        bounds = []
    numbers = (ast.Constant, ast.UnaryOp, ast.Starred)
    return [bound for bound in bounds if bound is not None and not isinstance(bound, numbers)]


def _changes(source: Source, function: Function) -> Iterator[Change]:
    named = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    for node in _own_nodes(function.body):
        if isinstance(node, (ast.If, ast.While)):
            start, end = source.span(node.test)
            bare = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            operand = source.text[slice(*source.span(node.test.operand))] if bare else ""
            yield KINDS[0], start, end, operand or f"not ({source.text[start:end]})"
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield KINDS[1], *source.span(node), str(node.value + 1)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
            start, end = source.span(node.left)[1], source.span(node.comparators[0])[0]
            sign = re.search(r"[<>]=?", source.text[start:end])
            yield KINDS[1], start + sign.start(), start + sign.end(), OTHER[type(node.ops[0])]
        for bound in _bounds(node):
            start, end = source.span(bound)
            inner = source.text[start:end]
            yield KINDS[1], start, end, f"{inner if isinstance(bound, PLAIN) else f'({inner})'} + 1"
        if isinstance(node, DROPPED):
            targets = getattr(node, "targets", [])
            # A name that is bound nowhere else would be missed by whatever test comes first.
            once = any(name.id for t in targets for name in ast.walk(t) if named.count(getattr(name, "id", None)) == 1)
            if not once:
                yield KINDS[2], *source.span(node), "pass"


def _fault(source: Source, file: str, function: str, change: Change) -> Fault | None:
    """Return a fault with as much before the change as makes its text the only such one in the function."""
    kind, start, end, new = change
    begin = source.line_start(start)
    begin += len(source.text[begin:start]) - len(source.text[begin:start].lstrip())
    scope = source.scope(function)
    while source.text.count(source.text[begin:end], *scope) != 1:
        begin = source.line_start(source.line_start(begin) - 1)
        if begin < scope[0]:
            return None
    before, old = source.text[begin:start], source.text[start:end]
    shown = " ".join(old.split())
    name = f"{kind} in {file}, {function}: {shown if len(shown) <= 60 else shown[:57] + '...'}"
    return Fault(name=name, file=file, old=before + old, new=before + new, where=(), function=function)


def candidates(roll: Path, package: str, rng: random.Random) -> Iterator[Fault]:
    """Yield faults of a package in the order in which they are drawn: each kind as likely, one in a function."""
    pools: dict[str, list[tuple[Source, str, str, Change]]] = {}
    for path in sorted((roll / package).rglob("*.py")):
        source = Source(path.read_text("utf-8"))
        names = [name for name, _ in source.functions()]
        for name, function in source.functions():
            if function.name not in TEXTS and names.count(name) == 1:
                for change in _changes(source, function):
                    pools.setdefault(change[0], []).append((source, path.relative_to(roll).as_posix(), name, change))
    for pool in pools.values():
        rng.shuffle(pool)
    drawn = set()
    while pools:
        kind = rng.choice(sorted(pools))
        source, file, name, change = pools[kind].pop()
        if not pools[kind]:
            del pools[kind]
        if (file, name) not in drawn and (fault := _fault(source, file, name, change)):
            drawn.add((file, name))
            yield fault


def seats(roll: Path, number: int) -> dict[str, int]:
    """Return how many faults each package gets: one, and the rest by lines as parliaments deal out seats."""
    lines = {
        folder.name: sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))
        for folder in sorted(roll.iterdir())
        if (folder / "__init__.py").exists()
    }
    given = dict.fromkeys(lines, 1)
    for _ in range(number - len(lines)):
        given[max(lines, key=lambda name: lines[name] / (given[name] + 1))] += 1
    return given


def draw(roll: Path, number: int, seed: int, spare: int = 1) -> dict[str, list[Fault]]:
    """Return each package's faults, `spare` times as many as it gets."""
    return {
        package: list(itertools.islice(candidates(roll, package, random.Random(f"{seed} {package}")), spare * given))
        for package, given in seats(roll, number).items()
    }
