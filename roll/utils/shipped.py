"""The presets and examples that come with the package.

In a checkout they are its folders `configs` and `examples`; a wheel has copies of both in `roll/shipped`, which
`setup.py` makes when it builds one.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

FOLDERS = ("configs", "examples")
"""What is shipped, by its name in the repository."""
SINGLE_FILES = ("start_pipeline.py",)
"""Python files right in `examples` that no example needs."""
_OTHER_EXAMPLE = re.compile(r"(?:\.\./|\bexamples/)(\w+)")
_PACKAGE = Path(__file__).parents[1]
_UNWANTED = shutil.ignore_patterns("__pycache__", "output", "*.pyc", ".*")


def shipped(name: str) -> Path:
    """Return the folder `configs` or `examples`; raise `ValueError` where this installation has none."""
    for root in (_PACKAGE / "shipped", _PACKAGE.parent):
        if (root / "examples" / "quickstart").is_dir() and (root / name).is_dir():
            return root / name
    raise ValueError(
        f"this installation has no {name}: neither {_PACKAGE / 'shipped'} nor {_PACKAGE.parent} holds them; install "
        "the wheel again, or work in a checkout"
    )


def example_names() -> list[str]:
    """Return the names of the examples, each a folder."""
    return sorted(path.name for path in shipped("examples").iterdir() if _is_example(path))


def example_files(name: str) -> list[Path]:
    """Return the configurations and notebooks of an example."""
    folder = shipped("examples") / name
    return sorted([*folder.rglob("*.yaml"), *folder.rglob("*.ipynb")])


def copy_example(name: str, target: Path) -> list[Path]:
    """Copy an example into `target`, with what it refers to, so that its paths hold from there; return its files.

    The files lie at `target/examples/<name>`, presets at `target/configs`. Raises `ValueError` rather than replace a
    file that says something else.
    """
    source = shipped("examples")
    if name not in example_names():
        raise ValueError(f"there is no example {name!r}; there are {', '.join(example_names())}")
    helpers = [path for path in source.glob("*.py") if path.name not in SINGLE_FILES]
    folders = [path for needed in _with_needed(name) for path in _files(source / needed)]
    wanted = [(path, target / "examples" / path.relative_to(source)) for path in [*folders, *helpers]]
    presets = shipped("configs")
    wanted += [(path, target / "configs" / path.relative_to(presets)) for path in _files(presets)]
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file, expected a folder")
    changed = [str(to) for path, to in wanted if to.exists() and to.read_bytes() != path.read_bytes()]
    if changed:
        raise ValueError(f"{changed[0]} is there already, with other contents; name another folder, or move it away")
    for path, to in wanted:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
    return [target / "examples" / path.relative_to(source) for path in example_files(name)]


def copy_all(root: Path, target: Path) -> None:
    """Copy what is shipped from the repository at `root` to `target`: a step of building a wheel."""
    shutil.rmtree(target, ignore_errors=True)
    for name in FOLDERS:
        shutil.copytree(root / name, target / name, ignore=_UNWANTED)


def _with_needed(name: str) -> list[str]:
    """Return this example and those that its configurations build on or say to run first, and so on."""
    needed, names = [name], set(example_names())
    for example in needed:
        for file in (shipped("examples") / example).rglob("*.yaml"):
            named = _OTHER_EXAMPLE.findall(file.read_text("utf-8"))
            needed += sorted((set(named) & names) - set(needed))
    return needed


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def _is_example(path: Path) -> bool:
    return (path.is_dir() and any(path.glob("*.yaml"))) or path.name == "notebooks"
