"""TRL: the devices of a run, as many as the processes that its launcher starts."""

from __future__ import annotations

from roll.workbench.migrate.draft import Draft

_LAUNCHER = {"all": "num_processes", "each": "nproc_per_node", "machines": "num_machines"}


def count_of(draft: Draft) -> int:
    """Return how many processes train; 1 where nothing says it."""
    machines, each = _machines(draft)
    return machines * each


def place(draft: Draft) -> str:
    """Give all roles the devices of the launcher's processes; return what the report says about the batch."""
    count = count_of(draft)
    options = ", ".join(f"{_LAUNCHER[name]} {size}" for name, size in draft.processes.items())
    if count == 1 and "all" not in draft.processes and "each" not in draft.processes:
        launcher = f"accelerate ({options})" if options else "accelerate"
        return (
            f"for one device; TRL takes its processes from {launcher}: set actor_train.device_mapping and "
            "num_gpus_per_node for yours"
        )
    machines, each = _machines(draft)
    draft.put("num_gpus_per_node", each)
    if machines > 1:
        draft.put("num_nodes", machines)
    draft.put("actor_train.device_mapping", mapping := [0] if count == 1 else f"0-{count - 1}")
    others = [role for role in ("reference", "teacher") if draft.has(role)]
    if draft.pipeline in ("rlvr", "distill"):
        others.append("actor_infer")
    for role in others:
        if not draft.has(f"{role}.device_mapping"):
            draft.put(f"{role}.device_mapping", mapping)
    return f"for {count} devices ({options}), which all roles share"


def _machines(draft: Draft) -> tuple[int, int]:
    """Return machines, and processes on each."""
    said = draft.processes
    machines = max(1, said.get("machines", 1))
    return machines, max(1, said["each"] if "each" in said else said.get("all", machines) // machines)
