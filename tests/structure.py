"""Count what the size limits of the code are about. `python tests/structure.py` prints the table of docs/design.md."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "roll"
SHORT = 60
"""Lines; a shorter file had better be part of another."""
REPEATABLE = {"__init__.py", "__main__.py", "base.py"}


def folders() -> list[str]:
    """Return the packages directly below `roll/`."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def files(wing: str | None = None) -> list[Path]:
    """Return the modules of `roll/`: all, those of the `engine` or those of the `workbench`."""
    every = sorted(PACKAGE.rglob("*.py"))
    return [path for path in every if wing is None or (_package(path) == "workbench") == (wing == "workbench")]


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of packages directly below `roll/` of which one imports the other, anywhere in a file."""
    known = set(folders())
    return {
        (_package(path), module.split(".")[1])
        for path in files()
        if path.parent != PACKAGE
        for module in _imports(path)
        if module.startswith("roll.") and module.split(".")[1] in known - {_package(path)}
    }


def short_files() -> list[str]:
    """Return the modules that have fewer than 60 lines, those that only describe a package aside."""
    return [_shown(path) for path in files() if path.name != "__init__.py" and len(_lines(path)) < SHORT]


def repeated_names(wing: str) -> dict[str, list[str]]:
    """Return the file names that stand more than once in a wing, with where."""
    names = Counter(path.name for path in files(wing))
    twice = sorted(name for name, number in names.items() if number > 1 and name not in REPEATABLE)
    return {name: [_shown(path) for path in files(wing) if path.name == name] for name in twice}


def repeated_classes() -> dict[str, list[str]]:
    """Return the names of public classes that are defined in more than one file, with where."""
    places: dict[str, list[str]] = {}
    for path in files():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(_shown(path))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def _package(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def _shown(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> None:
    """Print the table."""
    rows = {
        "folders directly below roll/": len(folders()),
        "pairs of them of which one imports the other": len(arrows()),
        "modules": len(files()),
        f"modules below {SHORT} lines, without __init__": len(short_files()),
        "file names that stand twice in a wing": len(repeated_names("engine")) + len(repeated_names("workbench")),
        "public class names that stand twice": len(repeated_classes()),
    }
    sys.stdout.writelines(f"{number:6}  {name}\n" for name, number in rows.items())


if __name__ == "__main__":
    main()
