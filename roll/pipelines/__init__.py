"""Pipelines by name. `run_pipeline` is what `examples/start_pipeline.py` calls with a checked configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.configs.rlvr import RLVRConfig


def run_pipeline(config: RLVRConfig) -> None:
    """Run a configuration to its end."""
    from roll.pipelines.start import run_rlvr

    run_rlvr(config)
