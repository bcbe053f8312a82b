"""Imports point down: the table of `roll` packages and what each may import, and what stays light."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import structure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "roll"

MIDDLE = {"utils", "types", "configs"}
BELOW_PIPELINES = MIDDLE | {
    "isolation", "algorithms", "data", "rewards", "envs", "distributed", "strategies", "rollout", "tracking",
    "checkpoint", "gateway",
}  # fmt: skip

ALLOWED: dict[str, set[str]] = {
    "utils": set(),
    "types": {"utils"},
    "isolation": {"utils"},
    "configs": {"utils", "isolation"},
    "algorithms": {"types", "configs.catalog"},
    "tracking": MIDDLE,
    "checkpoint": MIDDLE,
    "data": MIDDLE,
    "rewards": MIDDLE | {"isolation"},
    "envs": MIDDLE | {"isolation", "data", "rewards"},
    "distributed": MIDDLE | {"tracking.profiling", "tracking.spans"},
    "strategies": MIDDLE | {"distributed"},
    "rollout": MIDDLE | {"data", "rewards", "envs", "tracking.spans", "strategies.base"},
    "gateway": MIDDLE | {"isolation", "data", "rewards", "envs", "rollout", "strategies.base"},
    "pipelines": BELOW_PIPELINES,
    "workbench": {"utils", "configs", "tracking", "distributed"},
    "api": BELOW_PIPELINES | {"pipelines"},
    "cli": BELOW_PIPELINES | {"pipelines", "api", "workbench"},
}
"""Package -> what it may import from `roll`, besides itself. `a.b` allows that one module or package of a."""

ROOMS: dict[str, dict[str, set[str]]] = {
    "configs": {
        "catalog": set(),
        "schema": {"errors", "catalog"},
        "rules": {"errors", "catalog", "schema", "stand_in"},
        "checks": {"errors", "catalog", "schema", "rules", "stand_in"},
        "parsing": {"errors", "catalog", "schema", "rules", "stand_in"},
    },
    "envs": {"tools": set()},
    "isolation": {"processes": set(), "sandbox": set()},
    "pipelines": {
        "workers": set(),
        "rollouts": {"workers"},
        "credit": {"workers", "rollouts", "run"},
        "run": {"workers", "rollouts"},
        "offline": {"workers", "credit", "run"},
        "rl": {"workers", "rollouts", "credit", "run"},
    },
    "strategies": {
        "attention": set(),
        "training": {"base", "state_files", "attention"},
        "hf": {"base", "state_files", "attention", "training"},
        "deepspeed": {"base", "state_files", "training", "hf"},
        "megatron": {"base", "state_files", "attention", "training", "hf"},
        "merging": {"training", "hf", "megatron"},
        "engines": {"base", "state_files", "training", "hf"},
    },
    "tracking": {"profiling": {"spans"}},
    "workbench": {"doctor": set(), "migrate": set(), "planning": set(), "view": set()},
}
"""Package -> its rooms -> what a room may import from its own package, besides itself."""

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


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_of_a_package_import_downwards(package: str):
    problems = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for room, allowed in ROOMS[package].items()
        for path in sorted((PACKAGE / package / room).rglob("*.py"))
        for line, module in imported_modules(path.read_text("utf-8"), path)
        if module.startswith(f"roll.{package}.") and module.split(".")[2] not in allowed | {room}
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_every_folder_of_a_divided_package_is_a_room():
    folders = {(package, path.parent.name) for package in ROOMS for path in (PACKAGE / package).glob("*/__init__.py")}
    assert folders - {("envs", "adapters")} == {(package, room) for package, rooms in ROOMS.items() for room in rooms}


def test_the_house_has_few_rooms_and_arrows():
    assert len(structure.folders()) <= 22
    assert len(structure.arrows()) <= 110


@pytest.mark.parametrize("wing", ["engine", "workbench"])
def test_a_file_name_stands_once_in_a_wing(wing: str):
    assert structure.repeated_names(wing) == {}


def test_a_public_class_name_stands_once():
    assert structure.repeated_classes() == {}


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
        ("rollout", "roll.strategies.engines.hf.hf_infer"),
        ("rollout", "roll.tracking.live"),
        ("algorithms", "roll.configs.schema.fields"),
        ("rollout", "roll.tracking.base"),
        ("pipelines", "roll.api.launch"),
        ("api", "roll.cli.exits"),
        ("configs", "roll.workbench.migrate.table"),
        ("pipelines", "roll.workbench.planning.plan"),
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
        ("rollout", "roll.tracking.spans"),
        ("algorithms", "roll.configs.catalog.entries"),
        ("cli", "roll.workbench.view.server"),
        ("tracking", "roll.__version__"),
    ],
)
def test_a_downward_import_is_accepted(package: str, module: str):
    assert violation(package, module) is None


def test_imports_hidden_in_functions_and_type_checking_blocks_count():
    source = "if TYPE_CHECKING:\n    import roll.pipelines.workers.base\ndef f():\n    from roll import pipelines\n"
    assert imported_modules(source, Path("x.py")) == [(2, "roll.pipelines.workers.base"), (4, "roll.pipelines")]


@pytest.mark.parametrize(
    "statement",
    [
        "import roll",
        "import roll.configs",
        "import roll.utils.models, roll.tracking.timing",
        "import roll.workbench.planning.plan, roll.workbench.planning.plan_report, roll.workbench.planning.changes",
        "import roll.tracking.tracker_registry, roll.tracking.run_summary, roll.tracking.rollouts, roll.tracking.drops",
    ],
)
def test_light_packages_load_nothing_heavy(statement: str):
    code = f"{statement}\nimport sys\nprint(*sorted({set(HEAVY)} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{statement} loads {done.stdout}"


def test_a_run_of_prompts_imports_torch_alone_and_nothing_of_other_runs():
    rooms = ("rl.agentic", "rl.replay_pipeline", "offline")
    others = ("roll.gateway", *(f"roll.pipelines.{room}" for room in rooms))
    heavy = (*(name for name in HEAVY if name != "torch"), "torch._dynamo", "sympy", "pandas", "pyarrow", "tensorboard")
    code = f"import roll.pipelines.start\nimport sys\nprint(*sorted({{*{others}, *{heavy}}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
