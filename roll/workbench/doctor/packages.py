"""Python and its packages: versions against this project's ranges, what can be imported, what stands in the way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import Requirement

from roll.workbench.doctor.findings import Finding, ProbeFailed, ask_python

DISTRIBUTION = "roll-rl"
_IMPORT_S = 90.0
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "deepspeed": "deepspeed", "megatron-core": "megatron.core"}
"""What takes long to import and breaks most often, by its distribution."""
_CORE = {"torch": "torch", "transformers": "transformers", "ray": "ray", "datasets": "datasets"}
_SHADOWED = ("roll", "torch", "ray", "transformers", "datasets", "numpy", "vllm", "sglang", "deepspeed", "megatron")


def python() -> Iterator[Finding]:
    """Check the interpreter, and look for files that are imported in place of packages."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = _metadata("Requires-Python")
    if wanted and not Requirement(f"python{wanted}").specifier.contains(version):
        yield Finding(
            "problem", "Python", f"{version}; roll needs {wanted}", "make an environment with python3.11 -m venv"
        )
    else:
        isolated = "" if sys.prefix != sys.base_prefix else ", not in a virtual environment"
        yield Finding("note" if isolated else "ok", "Python", f"{version}{isolated}")
    yield from _shadows()
    yield from _other_roll()


def _shadows() -> Iterator[Finding]:
    """Check for files and folders of the working directory and PYTHONPATH with a package's name."""
    folders = {Path.cwd(), *(Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)}
    for folder in sorted(folders):
        for name in _SHADOWED:
            for module in (folder / f"{name}.py", folder / name / "__init__.py"):
                if module.is_file() and not _is_ours(module):
                    what = module if module.name != "__init__.py" else module.parent
                    message = f"{what} is imported in place of the package {name}"
                    yield Finding("problem", name, message, f"rename {what}, or start from another folder")


def _is_ours(file: Path) -> bool:
    import roll

    return file.resolve() == Path(roll.__file__ or "").resolve()


def _other_roll() -> Iterator[Finding]:
    """Check for another distribution whose modules are called `roll`."""
    owners = importlib.metadata.packages_distributions().get("roll", [])
    others = sorted({name for name in owners if _normal(name) != DISTRIBUTION})
    if others:
        message = f"{', '.join(others)} installs a package roll, too: which one is imported depends on the folder"
        yield Finding("problem", "roll", message, f"pip uninstall {' '.join(others)}, or use another environment")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _metadata(key: str) -> str:
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(metadata[key]) if key in metadata else ""


def versions() -> Iterator[Finding]:
    """Check every requirement of roll and of its installed extras against what is installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        message = "isn't installed as a package, so versions can't be compared"
        yield Finding("warning", DISTRIBUTION, message, "pip install -e . in the checkout")
        return
    wrong = 0
    shown: list[str] = []
    for line in lines:
        requirement = Requirement(line)
        extra = _extra_of(requirement)
        if extra in ("test", "docs") or (not extra and requirement.marker and not requirement.marker.evaluate()):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if not extra:
                wrong += 1
                fix = f"pip install '{requirement.name}{requirement.specifier}'"
                yield Finding("problem", requirement.name, "is not installed", fix)
            continue
        if requirement.name in ("torch", "transformers", "ray"):
            shown.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong += 1
            message = f"{version}; tried with {requirement.specifier}"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            # An engine pins its own torch; an extra that is out of range may not be used at all.
            yield Finding("warning" if extra else "problem", requirement.name, message, fix)
    if not wrong:
        yield Finding("ok", "versions", f"all within the tried ranges: {', '.join(shown)}")


def _extra_of(requirement: Requirement) -> str:
    if requirement.marker is None:
        return ""
    try:
        if requirement.marker.evaluate({"extra": ""}):
            return ""
    except UndefinedEnvironmentName:
        return ""
    match = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker))
    return match.group(1) if match else ""


def imports() -> Iterator[Finding]:
    """Import what is installed, each in a process of its own: a broken build ends it, not us."""
    present = {name: module for name, module in (_CORE | _ENGINES).items() if _there(module)}
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {name: pool.submit(_import_error, module) for name, module in present.items()}
        for name, future in futures.items():
            error = future.result()
            message = f"is installed but can't be imported: {error}"
            if error and name in _CORE:
                yield Finding("problem", name, message, f"pip install --force-reinstall {name}")
            elif error:
                yield Finding("warning", name, message, _rebuild(name))
            else:
                yield Finding("ok", name, "can be imported")
    for name in sorted(set(_ENGINES) - set(present)):
        yield Finding("note", name, "not installed; only configurations that name it need it", _rebuild(name))


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _import_error(module: str) -> str:
    try:
        ask_python(f"import {module}, json; print(); print(json.dumps({{}}))", timeout_s=_IMPORT_S)
    except ProbeFailed as error:
        return str(error)
    return ""


def _rebuild(name: str) -> str:
    from roll.configs.checks.machine_checks import MISSING

    advice = MISSING[_ENGINES[name]]
    return advice.partition(": ")[2]
