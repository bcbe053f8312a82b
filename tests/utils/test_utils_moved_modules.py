"""Names of modules that the documentation of an earlier release gives lead to the modules."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from roll.utils.moved_modules import new_name

FORMER = (
    "roll.configs.catalog.pipeline_table",
    "roll.cli.signals",
    "roll.pipelines.run.clusters",
    "roll.pipelines.offline.sft",
    "roll.rollout.chat_format",
    "roll.isolation.sandbox.base",
    "roll.isolation.sandbox.remote",
    "roll.strategies.engines.hf.hf_infer",
    "roll.strategies.training.micro",
    "roll.envs.tools.base",
    "roll.envs.tools.interactions",
    "roll.envs.tools.parsing.base",
    "roll.types.trajectory",
    "roll.pipelines.workers.train_worker",
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
    code = "from roll.envs.tools.base import Tool; from roll.types.trajectory import Task\n"
    code += "from roll.configs.catalog.pipeline_table import Pipeline\n"
    code += "import roll.envs.tools.base, pickle\n"
    code += "assert Tool is roll.envs.tools.base.Tool and Task.__module__ == 'roll.types.trajectory'\n"
    code += "print(pickle.loads(pickle.dumps(Task)) is Task)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "True"
    assert "roll.envs.tools.base has moved to roll.envs.tools.base" in shown.stderr


def test_objects_that_were_pickled_under_a_former_name_are_read():
    from roll.types.trajectory import Task

    written = pickle.dumps(Task, protocol=0).replace(b"roll.types.trajectory", b"roll.types.trajectory")
    sys.modules.pop("roll.types.trajectory", None)
    with pytest.warns(FutureWarning):
        assert pickle.loads(written) is Task


def test_a_module_that_never_was_is_still_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("roll.tools_of_others")
