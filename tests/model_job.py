"""A job around a model's folder, for what is checked of the model before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roll.configs.parsing.loader import load_config

_YAML = """
pipeline: rlvr
executor: inline
pretrain: {folder}
max_steps: 1
rollout_batch_size: 2
prompt_length: {length}
response_length: {length}
rewards: {{rule: {{name: math_rule}}}}
actor_train: {{data_args: {{file_name: {folder}/rows.jsonl}}, strategy_args: {{strategy_name: fsdp2_train}}}}
actor_infer: {{strategy_args: {{strategy_name: {engine}}}}}
"""


def model_job(folder: Path, changes: Iterable[str] = (), *, engine: str = "hf_infer", length: int = 8) -> Any:
    """Return the configuration of a job with the model in `folder`, written beside it as `job.yaml`.

    Prompts and responses have up to `length` tokens.
    """
    (folder / "job.yaml").write_text(_YAML.format(folder=folder, engine=engine, length=length))
    return load_config(folder, "job", list(changes))
