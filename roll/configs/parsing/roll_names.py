"""Presets that jobs of Alibaba's ROLL name in their defaults lists, by those that come with this package."""

from __future__ import annotations

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
