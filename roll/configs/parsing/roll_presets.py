"""Presets as jobs of Alibaba's ROLL name them, `../config/deepspeed_zero2@_here_`, where the job's own folders don't
have them: those that come with this package stand in."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.utils.shipped import shipped

PRESETS: dict[str, str] = {
    **{name: name for name in ("deepspeed_zero", "deepspeed_zero2", "deepspeed_zero2_cpuoffload", "deepspeed_zero3",
                               "deepspeed_zero3_cpuoffload", "fsdp2", "fsdp2_cpuoffload")},
    "deepspeed_zero1": "deepspeed_zero",
    **dict.fromkeys(("envs", "traj_envs", "step_envs", "vl_traj_envs"), "roll/traj_envs"),
}  # fmt: skip
"""Name of a file there, without .yaml, by the name of one in `configs`."""

SCORING = {
    "hf_infer": "fsdp2_infer", "deepspeed_train": "deepspeed_infer", "megatron_train": "megatron_infer",
    "fsdp2_train": "fsdp2_infer",
}  # fmt: skip
"""Backends by those that do the work of a role that only scores."""


_LEVELS = "a/b/c/d/e/f"
"""As many folders as a path may lead outwards."""


@contextlib.contextmanager
def preset_overrides(file: Path, own: Mapping[Any, Any]) -> Iterator[list[str]]:
    """Give the override with which Hydra also finds such presets, while the context is open; none where none is
    needed."""
    wanted = list(_wanted(file, own))
    if not wanted:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="roll-presets-") as name:
        job = Path(name).resolve() / _LEVELS
        job.mkdir(parents=True)
        for path in wanted:
            target = Path(_normal(job, path)).with_suffix(".yaml")
            if not target.is_relative_to(Path(name).resolve()):
                continue  # Hydra says that it isn't there
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                source = shipped("configs") / f"{PRESETS[target.stem]}.yaml"
                target.write_text(source.read_text("utf-8"), "utf-8")
        yield [f"hydra.searchpath=['file://{job}']"]


def _wanted(file: Path, own: Mapping[Any, Any]) -> Iterator[str]:
    """Paths of such presets that the job's own folders don't have."""
    defaults = own.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        path = entry.partition("@")[0].removesuffix(".yaml") if isinstance(entry, str) else ""
        if Path(path).name not in PRESETS or path.startswith("/"):
            continue
        if not Path(_normal(file.parent, path)).with_suffix(".yaml").is_file():
            yield path


def _normal(folder: Path, path: str) -> str:
    return os.path.normpath(folder / path)
