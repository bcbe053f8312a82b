"""The fine-tuning that makes the starting model of an agentic run: its configuration, for the run and for its check."""

from __future__ import annotations

import json
from pathlib import Path

from roll.configs.full_check import load_checked
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.sft_config import SFTConfig


def pending_warm_start(config: AgenticConfig) -> SFTConfig | None:
    """Return the checked configuration of a warm start; None where there is none, or its model is there already.

    Raises `ValueError` with all that is wrong with it.
    """
    if config.warm_start is None or (config.warm_model_path / "config.json").is_file():
        return None
    folders = {"output_dir": config.warm_start_path, "export_dir": config.warm_model_path}
    settings = [f"{key}={json.dumps(str(folder))}" for key, folder in folders.items()]
    settings += [f"seed={config.seed}", "export_model=true"]
    file = Path(config.warm_start)
    first = load_checked(file, settings)
    if not isinstance(first, SFTConfig):
        raise ValueError(f"warm_start: {file} is a file of pipeline {first.pipeline}, expected one of pipeline sft")
    return first
