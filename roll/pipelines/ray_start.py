"""What a run on several processes of this machine starts before it imports torch itself: Ray, and the warm parent that
its ranks are forked from (`roll/distributed/rank_parent.py`)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roll.configs.catalog.strategy_table import STRATEGIES
from roll.configs.checks.machine_checks import this_machine
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.run_config import RunConfig
from roll.distributed.placement import RolePlacement, num_slots
from roll.distributed.rank_parent import THREADS, rank_threads
from roll.distributed.ray_session import begun_session
from roll.pipelines import load_pipeline, set_compute_variables
from roll.utils.importing import long_imports
from roll.utils.signals import ending_at_once

_FORKED = ("fsdp2_train", "fsdp2_infer", "hf_infer")
"""Backends whose libraries start no threads when they are imported."""
_WORKERS = ("roll.pipelines.workers.train_worker", "roll.pipelines.workers.infer_worker")


@contextlib.contextmanager
def loaded(config: RunConfig) -> Iterator[None]:
    """Import what a run needs; meanwhile start both, for one that computes on the CPU with a Ray of its own and whose
    ranks import nothing of the user's. The run's executor takes them; what nobody takes ends with the block."""
    with contextlib.ExitStack() as stack:
        with ending_at_once(), long_imports():
            if not _begins_early(config):
                load_pipeline(config)
            else:
                set_compute_variables(config)
                session = stack.enter_context(
                    begun_session(config.ray_init.options, _modules(config), _variables(config))
                )
                # In the other thread: Ray's processes end with the thread that has started them.
                with ThreadPoolExecutor(1) as thread:
                    importing = thread.submit(_import, config)
                    session.connect()
                    importing.result()
        yield


def _import(config: RunConfig) -> None:
    load_pipeline(config)
    importlib.import_module("transformers").PreTrainedTokenizerFast  # noqa: B018 - it is imported when it is asked for


def _begins_early(config: RunConfig) -> bool:
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    own_ray = config.executor == "ray" and not config.joins_ray and not connected
    if not own_ray or sys.platform != "linux" or importlib.util.find_spec("ray") is None:
        return False
    return _forks(config) and not this_machine().accelerators


def _variables(config: RunConfig) -> dict[str, str]:
    """Return the variables that all ranks have, if they have none of their own."""
    variables = dict(config.system_envs)
    if THREADS not in os.environ:
        slots = num_slots(RolePlacement(role, ranks) for role, ranks in config.placement.roles.items())
        variables.setdefault(THREADS, str(rank_threads(1, slots)))
    return variables


def _forks(config: RunConfig) -> bool:
    own = [*config.external_lib, *(name for worker in config.roles.values() for name in worker.model_args.external_lib)]
    remote = any(worker.model_args.trust_remote_code for worker in config.roles.values())
    names = {worker.strategy_args.strategy_name for worker in config.roles.values()}
    return not own and not remote and names <= set(_FORKED)


def _modules(config: RunConfig) -> list[str]:
    """Return what ranks import: their workers, their backends and the classes of their models."""
    backends = {STRATEGIES[worker.strategy_args.strategy_name].path for worker in config.roles.values()}
    shapes = [read_shape(config.model_path(role), {}) for role in config.roles]
    kinds = {shape.model_type for shape in shapes if shape is not None and shape.model_type}
    models = [f"transformers.models.{kind}.modeling_{kind}" for kind in kinds if _has_module(kind)]
    return [*_WORKERS, *sorted(path.partition(":")[0] for path in backends), *sorted(models)]


def _has_module(kind: str) -> bool:
    """Return whether transformers has a module of this name: `gemma3_text` is in that of `gemma3`. Imports nothing."""
    spec = importlib.util.find_spec("transformers")
    return (
        spec is not None
        and spec.origin is not None
        and (Path(spec.origin).parent / "models" / kind / f"modeling_{kind}.py").is_file()
    )
