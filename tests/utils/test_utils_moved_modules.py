"""Names of modules that the documentation of an earlier release gives lead to the modules."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from roll.utils.moved_modules import new_name

FORMER = (
    "roll.catalog.pipelines",
    "roll.cli.signals",
    "roll.pipelines.clusters",
    "roll.pipelines.sft",
    "roll.rollout.chat",
    "roll.sandbox.base",
    "roll.sandbox.remote",
    "roll.strategies.hf_infer",
    "roll.strategies.micro",
    "roll.tools.base",
    "roll.tools.interactions",
    "roll.tools.parsing.base",
    "roll.types.episode",
    "roll.workers.train",
)


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_is_the_same_module_and_says_where_it_is(former: str):
    sys.modules.pop(former, None)
    now = new_name(former)
    with pytest.warns(FutureWarning, match=now):
        module = importlib.import_module(former)
    assert module is importlib.import_module(now)
    assert (module.__name__, module.__spec__.name) == (now, now)


def test_an_extension_that_was_written_for_an_earlier_release_is_imported_by_a_new_process():
    code = "from roll.tools.base import Tool; from roll.types.episode import Task\n"
    code += "from roll.catalog.pipelines import Pipeline\n"
    code += "import roll.envs.tools.base, pickle\n"
    code += "assert Tool is roll.envs.tools.base.Tool and Task.__module__ == 'roll.types.trajectory'\n"
    code += "print(pickle.loads(pickle.dumps(Task)) is Task)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "True"
    assert "roll.tools.base has moved to roll.envs.tools.base" in shown.stderr


def test_objects_that_were_pickled_under_a_former_name_are_read():
    from roll.types.trajectory import Task

    written = pickle.dumps(Task, protocol=0).replace(b"roll.types.trajectory", b"roll.types.episode")
    sys.modules.pop("roll.types.episode", None)
    with pytest.warns(FutureWarning):
        assert pickle.loads(written) is Task


def test_a_module_that_never_was_is_still_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("roll.tools_of_others")
