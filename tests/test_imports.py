"""Imports point down: the table of `roll` packages and what each may import, and what stays light."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "roll"

MIDDLE = {"utils", "types", "catalog", "configs"}
BELOW_WORKERS = MIDDLE | {
    "algorithms", "data", "sandbox", "rewards", "envs", "distributed", "strategies", "rollout",
    "tracking", "checkpoint", "profiling", "tools",
}  # fmt: skip

ALLOWED: dict[str, set[str]] = {
    "utils": set(),
    "types": {"utils"},
    "catalog": {"utils"},
    "sandbox": {"utils"},
    "configs": {"utils", "catalog", "sandbox"},
    "processes": {"utils"},
    "algorithms": {"types", "catalog"},
    "data": MIDDLE,
    "rewards": MIDDLE | {"processes", "sandbox"},
    "envs": MIDDLE | {"processes", "data", "rewards", "tools"},
    "profiling": {"utils"},
    "tools": MIDDLE | {"processes", "sandbox"},
    "distributed": MIDDLE | {"profiling"},
    "tracking": MIDDLE,
    "checkpoint": MIDDLE,
    "strategies": MIDDLE | {"distributed"},
    "rollout": MIDDLE | {"data", "rewards", "envs", "tools", "distributed", "strategies.base"},
    "gateway": MIDDLE | {"processes", "sandbox", "data", "rewards", "envs", "tools", "rollout", "strategies.base"},
    "simulation": {"utils", "types", "envs.base", "rollout", "strategies.base"},
    "workers": BELOW_WORKERS,
    "pipelines": BELOW_WORKERS | {"workers", "gateway"},
    "doctor": {"utils", "configs", "distributed"},
    "workbench": {"utils", "catalog", "configs"},
    "planning": {"utils", "catalog", "configs"},
    "view": {"utils", "tracking"},
    "cli": BELOW_WORKERS | {"processes", "workers", "gateway", "pipelines", "doctor", "workbench", "planning", "view"},
    "api": BELOW_WORKERS | {"workers", "gateway", "pipelines", "doctor", "workbench", "planning", "view", "cli"},
}
"""Package -> what it may import from `roll`, besides itself. `a.b` allows that one module of package a."""

ROOMS: dict[str, set[str]] = {
    "schema": {"errors"},
    "rules": {"errors", "schema", "stand_in"},
    "checks": {"errors", "schema", "rules", "stand_in"},
    "parsing": {"errors", "schema", "rules", "stand_in"},
}
"""Room of `roll/configs` -> what it may import from `roll.configs`, besides itself."""

HEAVY = ("torch", "ray", "transformers", "datasets", "vllm", "sglang", "deepspeed", "megatron")


def imported_modules(source: str, path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import anywhere in a file; a relative one fails."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            # `from roll import x` and `from roll.a import b` may name a module: judge the longest name.
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def violation(package: str, module: str) -> str | None:
    """What is wrong with `module` being imported inside `roll/<package>`, or None."""
    parts = module.split(".")
    if parts[0] != "roll" or len(parts) == 1:
        return None
    target = parts[1]
    if target == package or target == "__version__":
        return None
    if target not in ALLOWED:
        return f"imports {module}: roll has no package {target!r} in the table of tests/test_imports.py"
    allowed = ALLOWED[package]
    if target in allowed or ".".join(parts[1:3]) in allowed:
        return None
    return f"imports {module}; roll/{package} may import {sorted(allowed) or 'nothing of roll'}"


def violations_of(path: Path) -> list[str]:
    package = path.relative_to(PACKAGE).parts[0]
    assert package in ALLOWED, f"roll/{package} isn't in the table of tests/test_imports.py"
    problems = [(line, violation(package, module)) for line, module in imported_modules(path.read_text("utf-8"), path)]
    return [f"{path.relative_to(ROOT)}:{line}: {problem}" for line, problem in problems if problem]


def test_every_import_inside_roll_points_down():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]
    problems = [problem for path in files for problem in violations_of(path)]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("room", ROOMS)
def test_the_rooms_of_the_configuration_import_downwards(room: str):
    imports = [
        (path.name, module.split(".")[2])
        for path in sorted((PACKAGE / "configs" / room).glob("*.py"))
        for _, module in imported_modules(path.read_text("utf-8"), path)
        if module.startswith("roll.configs.")
    ]
    assert not [(file, target) for file, target in imports if target not in ROOMS[room] | {room}]


def test_the_allowed_arrows_have_no_cycle():
    # Peeling off packages whose targets are all gone empties an acyclic table and only that.
    left = {name: {target.split(".")[0] for target in targets} for name, targets in ALLOWED.items()}
    while left:
        free = [name for name, targets in left.items() if not targets & left.keys()]
        assert free, f"cycle among {sorted(left)}"
        left = {name: targets for name, targets in left.items() if name not in free}


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> those of `sources` (module -> its text) that it imports anywhere, in functions and type checks too."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for _, imported in imported_modules(source, Path(module)):
            # `from a.b import c` may name a module or something inside one.
            candidates = [imported, imported.rpartition(".")[0]]
            graph[module] |= set([name for name in candidates if name in sources][:1]) - {module}
    return graph


def circle_of(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty if there is no circle."""
    try:
        graphlib.TopologicalSorter(import_graph(sources)).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    sources = {name.removesuffix(".__init__"): path.read_text("utf-8") for path, name in names.items()}
    circle = circle_of(sources)
    assert not circle, "these files import each other in a circle: " + " -> ".join(reversed(circle))


def test_a_circle_through_a_function_and_a_type_check_is_found():
    sources = {
        "roll.a": "if TYPE_CHECKING:\n    from roll.b import B",
        "roll.b": "def f():\n    from roll import c",
        "roll.c": "import roll.a",
        "roll.d": "import roll.a",
    }
    assert sorted(set(circle_of(sources))) == ["roll.a", "roll.b", "roll.c"]
    assert circle_of({**sources, "roll.c": "import roll"}) == []


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("utils", "roll.types.batch"),
        ("types", "roll.configs"),
        ("algorithms", "roll.configs.schema.worker_config"),
        ("algorithms", "roll.utils.seeding"),
        ("strategies", "roll.rewards.base"),
        ("envs", "roll.rollout.episode"),
        ("data", "roll.envs.base"),
        ("rollout", "roll.strategies.hf_infer.engine"),
        ("rollout", "roll.tracking.base"),
        ("workers", "roll.pipelines.loop"),
        ("tracking", "roll.checkpoint.store"),
        ("data", "roll.functionals"),
    ],
)
def test_an_upward_import_is_found(package: str, module: str):
    assert violation(package, module) is not None


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("utils", "json"),
        ("utils", "rollout_of_another_project.x"),
        ("algorithms", "roll.types.batch"),
        ("algorithms", "roll.algorithms.kl"),
        ("rollout", "roll.strategies.base.InferEngine"),
        ("pipelines", "roll.workers.actor"),
        ("tracking", "roll.__version__"),
    ],
)
def test_a_downward_import_is_accepted(package: str, module: str):
    assert violation(package, module) is None


def test_imports_hidden_in_functions_and_type_checking_blocks_count():
    source = "if TYPE_CHECKING:\n    import roll.workers.base\ndef f():\n    from roll import pipelines\n"
    assert imported_modules(source, Path("x.py")) == [(2, "roll.workers.base"), (4, "roll.pipelines")]


@pytest.mark.parametrize(
    "statement",
    [
        "import roll",
        "import roll.configs",
        "import roll.utils.models, roll.utils.timing",
        "import roll.planning.plan, roll.planning.report, roll.planning.changes",
        "import roll.tracking.registry, roll.tracking.summary, roll.tracking.rollouts, roll.tracking.drops",
    ],
)
def test_light_packages_load_nothing_heavy(statement: str):
    code = f"{statement}\nimport sys\nprint(*sorted({set(HEAVY)} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{statement} loads {done.stdout}"
