"""Reinforcement learning for language models. Importing this package loads neither torch nor Ray.

`roll.train(config)` runs a pipeline, `roll.check(config)` only checks it, `roll.resume(folder)` goes on with a run, and
`roll.load_run(folder)` reads what one has left: docs/python.md. `roll.rollouts(folder)` reads the recorded responses.
`@roll.stage(...)` and `@roll.needs(...)` declare what an algorithm of your own needs: docs/your_own_algorithm.md.
"""

import importlib
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip refuses it, but not a checkout on PYTHONPATH
    raise ImportError(
        f"roll needs Python 3.11 or later, and {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}; "
        "make an environment with python3.11 -m venv"
    )

from roll.utils.moved_modules import MovedModules

__version__ = "0.2.0"
__all__ = [
    "RecordedRollouts",
    "RunResult",
    "__version__",
    "check",
    "load_run",
    "needs",
    "resume",
    "rollouts",
    "stage",
    "train",
]

# By name and not by import, so that what is light stays light; their types are in __init__.pyi.
_HOMES = dict.fromkeys(("check", "load_run", "resume", "train"), "roll.api.run")
_HOMES["RunResult"] = "roll.pipelines.run.run_result"
_HOMES |= dict.fromkeys(("needs", "stage"), "roll.configs.catalog.stage_table")
_HOMES |= dict.fromkeys(("RecordedRollouts", "rollouts"), "roll.tracking.recorded_responses")

sys.meta_path.insert(0, MovedModules())


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'roll' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
