"""Modules that extensions import and that have moved: their former names lead to them, with a warning."""

from __future__ import annotations

import importlib
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "roll.catalog": "roll.configs.catalog",
    "roll.catalog.pipelines": "roll.configs.catalog.pipeline_table",
    "roll.cli.signals": "roll.utils.signals",
    "roll.pipelines.clusters": "roll.pipelines.run.clusters",
    "roll.pipelines.sft": "roll.pipelines.offline.sft",
    "roll.rollout.chat": "roll.rollout.chat_format",
    "roll.sandbox": "roll.isolation.sandbox",
    "roll.strategies.hf_infer": "roll.strategies.engines.hf.hf_infer",
    "roll.strategies.micro": "roll.strategies.training.micro",
    "roll.tools": "roll.envs.tools",
    "roll.types.episode": "roll.types.trajectory",
    "roll.workers": "roll.pipelines.workers",
    "roll.workers.train": "roll.pipelines.workers.train_worker",
}
"""Former name -> name, of a module or a package with all in it: what the documentation of 0.2 names. CHANGELOG.md lists
what else has moved."""


def new_name(former: str) -> str | None:
    """Return the name that a module has now, or None if it has not moved."""
    if former in MOVED:
        return MOVED[former]
    package, _, name = former.rpartition(".")
    moved = new_name(package) if package.startswith("roll.") else None
    return moved and f"{moved}.{name}"


class MovedModules(MetaPathFinder, Loader):
    """Finds modules by their former names; ahead of the finder that would load a file of theirs a second time."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return where the module is now, or None if it is none that has moved."""
        if not fullname.startswith("roll.") or new_name(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, so that its classes are the same under both names."""
        now = new_name(spec.name)
        assert now is not None, "find_spec has found it"
        warnings.warn(f"{spec.name} has moved to {now}", FutureWarning, stacklevel=2)
        module = importlib.import_module(now)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has just replaced."""
        replaced = module.__spec__
        if replaced is not None and isinstance(replaced.loader, MovedModules):
            module.__spec__ = replaced.loader_state
