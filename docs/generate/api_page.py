"""The site's page of what code of yours calls or implements, written from signatures and docstrings.

`site_pages.py` adds it. Nothing is imported: the sources are read as text.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

MODULES = {
    "roll.api.run": "What `import roll` offers",
    "roll.pipelines.run.run_result": "What a run returns",
    "roll.rewards.base": "Rewards",
    "roll.types.trajectory": "Tasks and episodes",
    "roll.envs.base": "Environments",
    "roll.isolation.sandbox.base": "The sandbox",
    "roll.tracking.base": "Trackers",
    "roll.strategies.base": "Training backends and engines",
    "roll.algorithms.advantages": "Advantages",
    "roll.algorithms.losses": "Losses",
}

_OFFERED = {"roll.api.run": ("train", "check", "resume", "load_run")}
"""Modules of which only these names are for users."""


def page(root: Path) -> str:
    """Return the whole page, as Markdown."""
    parts = ["# API\n\nFrom the signatures and docstrings of the modules that code of yours calls or implements.\n"]
    for module, title in MODULES.items():
        tree = ast.parse((root / f"{module.replace('.', '/')}.py").read_text("utf-8"))
        parts.append(f"## {title}\n\n`{module}`\n\n{text_of(tree)}")
        for node in tree.body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if node.name in _OFFERED.get(module, (node.name,)) and _public(node.name):
                parts.extend(_entry(node))
    return "\n".join(parts)


def _entry(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if not isinstance(node, ast.ClassDef):
        yield f"### {_name(node.name)}\n\n~~~~~~python\n{signature(node)}\n~~~~~~\n\n{text_of(node)}"
        return
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    fields = [ast.unparse(line) for line in node.body if isinstance(line, ast.AnnAssign) and _public(ast.unparse(line))]
    lines = [f"class {node.name}{f'({bases})' if bases else ''}:", *(f"    {field}" for field in fields)]
    yield f"### {_name(node.name)}\n\n~~~~~~python\n" + "\n".join(lines) + f"\n~~~~~~\n\n{text_of(node)}"
    for method in node.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or not ast.get_docstring(method):
            continue
        if _public(method.name) or method.name == "__init__":
            title = _name(f"{node.name}.{method.name}")
            yield f"#### {title}\n\n~~~~~~python\n{signature(method)}\n~~~~~~\n\n{text_of(method)}"


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the head of a function, on one line where it is short, else with one parameter per line."""
    head = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}def {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{head}({ast.unparse(node.args)}){returns}"
    if len(line) <= 100:
        return line
    depth, parameters, start, text = 0, [], 0, ast.unparse(node.args)
    for position, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            parameters.append(text[start : position + 1].strip())
            start = position + 1
    return "\n".join(
        [f"{head}(", *(f"    {parameter}" for parameter in [*parameters, text[start:].strip()]), f"){returns}"]
    )


def text_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a docstring as Markdown: its list of parameters as a list, signs that Markdown reads escaped."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    text = re.sub(r"^ +(\w+): ", r"* `\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"^(Args|Returns|Raises):$", r"\1:\n", text, flags=re.MULTILINE)
    outside = re.split(r"(`[^`]+`)", text)
    return "".join(piece if odd % 2 else piece.replace("<", "&lt;") for odd, piece in enumerate(outside)) + "\n"


def _public(name: str) -> bool:
    return not name.startswith("_")


def _name(name: str) -> str:
    return f"`{name}`"
