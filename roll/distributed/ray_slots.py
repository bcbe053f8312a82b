"""Device slots out of a Ray cluster: one bundle per machine, so that the numbers of slots follow machines.

    slots            0 ... P-1        P ... 2P-1       ...       P = num_gpus_per_node
    bundle           {GPU: P}         {GPU: P}         ...       on machines of their own, in the order of addresses

All bundles are reserved at once: two roles that wait for each other's devices can't exist.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

_BUNDLE_CPU = 0.01


@dataclass(frozen=True, slots=True)
class Slot:
    """A device of the cluster."""

    node: str
    device: str
    """What CUDA_VISIBLE_DEVICES calls it: a number, or the name of a GPU or of a part of one (MIG)."""
    bundle: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What Ray gave, to be removed with the placement group."""

    accelerated: bool
    slots: tuple[Slot, ...]
    group: Any = None


def reserve(count: int, per_machine: int | None, timeout: float) -> Reservation:
    """Reserve slots 0 to `count - 1`, `per_machine` on each machine (None: all on one).

    Raises:
        ValueError: the cluster's machines don't have them.
        TimeoutError: somebody else has them for longer than `timeout` seconds.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
    if not count:
        return Reservation(gpus > 0, ())
    sizes = machine_sizes(count, per_machine)
    kind = "GPU" if gpus else "CPU"
    _refuse_too_few(sizes, nodes, kind)
    bundles = [{"CPU": _BUNDLE_CPU * size, **({"GPU": float(size)} if gpus else {})} for size in sizes]
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK")
    try:
        if not group.wait(timeout):
            raise TimeoutError(
                f"Ray didn't give {count} slots, {sizes} on {len(sizes)} machine(s), in {timeout:g} s; it has "
                f"{dict(ray.cluster_resources())}, free now: {dict(ray.available_resources())}; is another job using "
                "it?"
            )
        homes = placement_group_table(group)["bundles_to_node_id"]
        devices = _devices(group, sizes, timeout) if gpus else [[str(i) for i in range(size)] for size in sizes]
    except BaseException:
        remove_placement_group(group)
        raise
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], *_by_address(address.get(homes[i], "")), homes[i]))
    slots = [Slot(homes[i], device, i) for i in order for device in devices[i]]
    return Reservation(gpus > 0, tuple(slots), group)


def machine_sizes(count: int, per_machine: int | None) -> list[int]:
    """Return the slots of each machine: all have `per_machine`, but the last has what is left."""
    if per_machine is None:
        return [count]
    return [min(per_machine, count - first) for first in range(0, count, per_machine)]


def run_on_each(
    reservation: Reservation,
    function: Callable[..., Any],
    args: Sequence[Any],
    timeout: float,
    slots: Collection[int] | None = None,
) -> dict[str, Any]:
    """Return what `function` says on each machine of the reservation, by its address; waits `timeout` seconds.

    `slots`: only on machines with one of these. Raises `TimeoutError` with the machines that didn't answer.
    """
    import ray

    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = {slot.bundle: slot.node for i, slot in enumerate(reservation.slots) if slots is None or i in slots}
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    refs = {
        bundle: remote.options(scheduling_strategy=in_bundle(reservation.group, bundle)).remote(*args)
        for bundle in nodes
    }
    _, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout) if refs else ([], [])
    if late:
        silent = sorted(address.get(nodes[bundle], "?") for bundle, ref in refs.items() if ref in late)
        raise TimeoutError(f"no answer from {', '.join(silent)} to {function.__name__} in {timeout:g} s")
    # Nodes of one address are told apart by their ids: several on one machine, in tests.
    names = {bundle: address.get(node, node) for bundle, node in nodes.items()}
    if len(set(names.values())) < len(names):
        names = {bundle: f"{name} ({nodes[bundle][:8]})" for bundle, name in names.items()}
    return {names[bundle]: _answer(ref, names[bundle]) for bundle, ref in refs.items()}


def _answer(ref: Any, machine: str) -> Any:
    """Return what a machine's task gave; raises `ValueError` where its environment isn't that of this process."""
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines()
        reason = f"{type(cause).__name__}: {lines[-1].strip() if lines else ''}"
        raise ValueError(
            f"{machine} can't run a function of roll ({reason}): all machines need the same environment, with roll "
            "installed in the Python that ran `ray start` there; see docs/cluster.md"
        ) from error


def in_bundle(group: Any, bundle: int) -> Any:
    """Return where a task or actor is to run."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def _refuse_too_few(sizes: Sequence[int], nodes: Sequence[Any], kind: str) -> None:
    """Raise `ValueError` if the machines, all of them free, couldn't hold the bundles."""
    if kind == "CPU":
        if len(nodes) >= len(sizes):
            return
        have = f"{len(nodes)} machine(s)"
    else:
        present = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)
        if len(present) >= len(sizes) and all(a >= b for a, b in zip(present, sizes, strict=False)):
            return
        listed = ", ".join(f"{n['NodeManagerAddress']}: {int(n['Resources'].get('GPU', 0))}" for n in nodes)
        have = f"{sum(present)} GPU(s)" + (f" ({listed})" if len(nodes) > 1 or len(sizes) > 1 else "")
    machines = "" if len(sizes) == 1 else f" on {len(sizes)} machines of {sizes[0]} (num_gpus_per_node)"
    hide = ", or hide the GPUs (CUDA_VISIBLE_DEVICES='') for CPU slots" if kind == "GPU" else ""
    raise ValueError(
        f"the placements name device slots 0 to {sum(sizes) - 1}{machines}, but the cluster has {have}; name fewer in "
        f"the roles' device_mapping{hide}"
    )


def _devices(group: Any, sizes: Sequence[int], timeout: float) -> list[list[str]]:
    """Return the accelerators that Ray gave each bundle; only a task inside the bundle can tell."""
    import ray

    def which() -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    refs = [
        ray.remote(num_cpus=0, num_gpus=size, max_retries=0)(which)
        .options(scheduling_strategy=in_bundle(group, i))
        .remote()
        for i, size in enumerate(sizes)
    ]
    devices = ray.get(refs, timeout=timeout)
    for names, size in zip(devices, sizes, strict=True):
        if len(names) != size:
            raise RuntimeError(f"Ray gave a bundle of {size} GPU(s) the devices {names}")
    return [sorted(names, key=_by_number) for names in devices]


def _by_address(text: str) -> tuple[int, int, str]:
    """Sort addresses as numbers, 10.0.0.9 before 10.0.0.10; names after them."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return 9, 0, text
    return address.version, int(address), ""


def _by_number(device: str) -> tuple[bool, int]:
    """Sort numbers of devices as such; names keep the order in which Ray gave them."""
    return (False, int(device)) if device.isdecimal() else (True, 0)
