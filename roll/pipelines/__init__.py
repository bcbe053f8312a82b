"""Pipelines by name. `run_pipeline` is what `roll train` calls with a checked configuration."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.utils.processor import AMD, CPUINFO, this_processor

if TYPE_CHECKING:
    from roll.configs.schema.run_config import RunConfig
    from roll.pipelines.run.run_result import RunResult

logger = logging.getLogger(__name__)


def log_plan(config: RunConfig) -> None:
    """Log what a run is going to do, as far as its configuration tells: before anything heavy is imported."""
    if config.only_validates:
        logger.info("validation only: nothing is trained")
    else:
        steps = f"{config.known_steps} steps of " if config.known_steps else ""
        logger.info("%s%s", steps, config.batch.explain())
    logger.info("%s", config.placement.explain())


def set_compute_variables(config: RunConfig) -> None:
    """Say how torch's threads wait for work and how MKL multiplies, here and in the processes that this one starts.

    Acts before torch starts its threads.
    """
    # Threads that spin while they wait slow each other down many times over as soon as anything else runs there.
    # 0.2 ms of it, though, brings a process that computes alone past the time to its next operator; waking a thread
    # takes longer than most operators of a decode step.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.executor == "inline":
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    choose_products()


def load_pipeline(config: RunConfig) -> Any:
    """Import the function that runs a configuration, with all that it needs: torch, for one."""
    set_compute_variables(config)
    from roll.configs.catalog.pipeline_table import pipeline_of
    from roll.utils.importing import load_object

    return load_object(pipeline_of(config.pipeline).path, key="pipeline")


def choose_products(file: Path = CPUINFO) -> None:
    """Have MKL multiply by its code for AVX2 on a processor of AMD that has no more, unless the user has chosen.

    What it takes there by itself is slower with few rows (docs/benchmarks.md). Acts before the first product of a
    process, and on processes that it starts.
    """
    processor = this_processor(file)
    if processor.maker == AMD and "avx2" in processor.features and "avx512f" not in processor.features:
        os.environ.setdefault("MKL_CBWR", "AVX2")


def run_pipeline(config: RunConfig) -> RunResult:
    """Run a configuration to its end, and return what it has left in its folder."""
    pipeline = load_pipeline(config)
    from roll.pipelines.run.run_dtype import settled
    from roll.pipelines.run.run_result import RunResult

    config = settled(config)
    pipeline(config)
    return RunResult(folder=config.output_path, config=config)
