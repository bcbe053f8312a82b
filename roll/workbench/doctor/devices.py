"""Accelerators, as the driver and as torch see them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from roll.configs.checks.machine_checks import Machine
from roll.workbench.doctor.findings import Finding, ProbeFailed, ask_python

_BUSY = 0.1
_ASK = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": [], "error": ""}
try:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            free, total = torch.cuda.mem_get_info()
            x = torch.arange(16, dtype=torch.float32, device="cuda").reshape(4, 4)
            right = bool((x @ x).sum().item() == 1880.0)
        found["devices"].append(dict(
            name=properties.name, free=free, total=total, right=right, bf16=torch.cuda.is_bf16_supported(),
            peers=all(index == j or torch.cuda.can_device_access_peer(index, j)
                      for j in range(torch.cuda.device_count())),
        ))
    if not found["devices"]:
        torch.cuda.init()
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(found))
"""


def devices(machine: Machine, *, timeout_s: float = 120.0) -> Iterator[Finding]:
    """Check what the driver names, what torch can compute on, and memory that others hold."""
    driver = len(machine.accelerators)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        answer = ask_python(_ASK, timeout_s=timeout_s)
    except ProbeFailed as error:
        yield Finding("problem", "accelerators", f"torch didn't look for them: {error}", "see torch above")
        return
    listed = answer["devices"]
    if not listed:
        yield _none(driver, machine.amd, visible, answer)
        return
    for index, device in enumerate(listed):
        used = 1 - device["free"] / device["total"]
        message = f"{device['name']}, {device['free'] / (1 << 30):.0f} of {device['total'] / (1 << 30):.0f} GiB free"
        name = f"cuda:{index}"
        if not device["right"]:
            yield Finding("problem", name, f"{message}: it computes wrong numbers", "take it out of use")
        elif used > _BUSY:
            yield Finding(
                "warning", name, f"{message}: others use it", "nvidia-smi names them; or CUDA_VISIBLE_DEVICES"
            )
        else:
            yield Finding("ok", name, message)
        if not device["bf16"]:
            yield Finding("warning", name, "has no bf16 arithmetic", "model_args.dtype: fp32 for every role")
    if len(listed) > 1 and not all(device["peers"] for device in listed):
        message = "not all can read each other's memory: tensor parallelism goes through the host"
        yield Finding(
            "warning", "accelerators", message, "tensor_model_parallel_size 1, or NCCL_P2P_DISABLE=1 if it hangs"
        )
    if driver > len(listed):
        message = f"the driver has {driver}, torch sees {len(listed)} (CUDA_VISIBLE_DEVICES={visible})"
        yield Finding("note", "accelerators", message, "unset CUDA_VISIBLE_DEVICES to use all")


def _none(driver: int, amd: bool, visible: str | None, answer: dict[str, object]) -> Finding:
    if not driver and not amd:
        return Finding("note", "accelerators", "none: a slot of device_mapping is a process on the CPU")
    built = answer["cuda"] or answer["hip"]
    if not built:
        message = f"there are {driver or 'some'}, but torch {answer['version']} is built for the CPU"
        return Finding("problem", "accelerators", message, "install torch's build for your driver, see pytorch.org")
    if visible is not None and not visible.strip(" "):
        message = f"there are {driver or 'some'}, but CUDA_VISIBLE_DEVICES is empty"
        return Finding("problem", "accelerators", message, "unset CUDA_VISIBLE_DEVICES")
    message = (
        f"the driver has {driver or 'some'}, torch (for {built}) sees none: {answer['error'] or 'no reason given'}"
    )
    return Finding(
        "problem", "accelerators", message, "compare nvidia-smi's CUDA version with torch's; restart the driver"
    )
