"""A memory plan as text with two bars, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from roll.workbench.planning.changes import Change
from roll.workbench.planning.items import PARTS
from roll.workbench.planning.machines import GIB
from roll.workbench.planning.plan import MemoryLocation, MemoryPlan, MemoryUse, device_name
from roll.workbench.planning.weight_sync import ENGINE

WIDTH = 48
"""Characters of a bar."""
TRAIN, GENERATE = ("train", "score"), ("generate", "sync")
"""Phases of the two bars."""
_WORDS = {
    "start": "is built",
    "generate": "generates",
    "score": "computes log-probs or scores",
    "train": "trains",
    "sync": "passes weights on",
    "take": "takes new weights",
}


def gib(nbytes: int) -> str:
    """Return bytes as `12.3 GiB`; as MiB where that is less than a tenth of one."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 or not nbytes else f"{nbytes / 2**20:.0f} MiB"


def as_text(plan: MemoryPlan, fixes: Sequence[Change] = ()) -> str:
    """Return the plan in words: bars of every kind of device and of the host, what they consist of, and the verdict."""
    lines = [f"memory on {plan.machines} (by {plan.machines.source})"]
    if not plan.machines.count and plan.machines.device:
        lines[0] = f"memory on {plan.machines.device} ({gib(plan.machines.device_bytes)})"
    models: dict[str, list[str]] = {}
    for role, arch in plan.models.items():
        models.setdefault(f"{arch.model_type}, {_count(arch.count())} parameters", []).append(role)
    lines += [f"  {', '.join(roles)}: {model}" for model, roles in models.items()]
    for memory in _distinct(plan.devices):
        lines += _memory_lines(memory, detailed=True)
    for memory in plan.hosts:
        lines += _memory_lines(memory, detailed=not plan.devices)
    if plan.shared:
        lines.append(f"  of the host's memory, shared by processes during a sync: {gib(plan.shared)}")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join([*lines, *verdict(plan, fixes)])


def _distinct(devices: Sequence[MemoryLocation]) -> list[MemoryLocation]:
    """Return those whose description differs: of ranks that differ by a few bytes only the fullest."""
    alike: dict[tuple[str, ...], list[MemoryLocation]] = {}
    for memory in devices:
        alike.setdefault(tuple(_memory_lines(replace(memory, name=""), detailed=True)), []).append(memory)
    return [
        replace(
            max(group, key=lambda memory: memory.worst.nbytes),
            name=device_name([slot for memory in group for slot in memory.slots]),
        )
        for group in alike.values()
    ]


def _memory_lines(memory: MemoryLocation, *, detailed: bool) -> Iterator[str]:
    room = f", {gib(memory.capacity)} to use" if memory.capacity is not None else ""
    yield f"{memory.name}{room}   # lasting, + worst moment, . free"
    for label, phases in (("generate", GENERATE), ("train", TRAIN), ("start", ("start",))):
        use = memory.worst_of(phases)
        if use is None or (label == "start" and use is not memory.worst):
            continue
        yield f"  {label:<9}{bar(use, memory.capacity)} {gib(use.lasting)} + {gib(use.nbytes - use.lasting)}"
        yield f"  {'':<9}when {_moment(use)}"
        if detailed:
            yield from (f"  {'':<9}  {line}" for line in _contents(use))


def bar(use: MemoryUse, capacity: int | None) -> str:
    """Return `[####++....]`; a bar that is too long ends in `!`."""
    total = capacity or use.nbytes or 1
    lasting, worst = (min(WIDTH, round(WIDTH * part / total)) for part in (use.lasting, use.nbytes))
    text = "#" * lasting + "+" * (worst - lasting) + "." * (WIDTH - worst)
    return f"[{text[:-1]}!]" if capacity is not None and use.nbytes > capacity else f"[{text}]"


def _contents(use: MemoryUse) -> Iterator[str]:
    """Yield one line for each role: what it holds."""
    for role in dict.fromkeys(role for role, _ in use.items):
        sizes: dict[str, int] = {}
        for other, item in use.items:
            if other == role:
                sizes[item.what] = sizes.get(item.what, 0) + item.nbytes
        named = sorted(sizes, key=lambda what: PARTS.index(what) if what in PARTS else len(PARTS))
        yield f"{role}: " + ", ".join(f"{what} {gib(sizes[what])}" for what in named if sizes[what])


def verdict(plan: MemoryPlan, fixes: Sequence[Change] = ()) -> Iterator[str]:
    """Yield `fits`, or by how much it doesn't, with what to change."""
    if plan.fits:
        tightest = plan.tightest
        if tightest.capacity is None:
            yield f"fits if the host has {gib(tightest.worst.nbytes)}"
            return
        left = tightest.capacity - tightest.worst.nbytes
        alike = [other for other in _distinct(plan.devices) if tightest.slots and {*tightest.slots} <= {*other.slots}]
        tightest = alike[0] if alike else tightest
        have = "have" if len(tightest.slots) > 1 else "has"
        yield f"fits: {tightest.name} {have} {gib(left)} left in the worst moment, when {_moment(tightest.worst)}"
        return
    for tightest in (*_distinct(plan.devices), *plan.hosts):
        if tightest.missing:
            yield f"doesn't fit by {gib(tightest.missing)}: {tightest.name}, when {_moment(tightest.worst)}"
    for role, share in plan.too_small.items():
        yield f"doesn't fit: the {gib(share)} that {role} may take aren't enough for its weights and one response"
    if fixes:
        for change in fixes:
            yield f"  change this: {change}"
    elif any(tightest.missing and _too_full(tightest, "start") for tightest in plan.devices):
        reason = "which don't hold it whole on a device"
        yield f"  take fsdp2_train, deepspeed_train with ZeRO 3 or megatron_train there, {reason}"
    else:
        yield "  no single key helps; roll plan --suggest looks for several, else it needs more or larger devices"


def _too_full(memory: MemoryLocation, phase: str) -> bool:
    use = memory.worst_of((phase,))
    return use is not None and memory.capacity is not None and use.nbytes > memory.capacity


def _moment(use: MemoryUse) -> str:
    """Return who does what; of a sync the trainer is one end, the engine the other."""
    phase = "take" if use.phase == "sync" and use.role == ENGINE else use.phase
    return f"{use.role} {_WORDS[phase]}"


def as_json(plan: MemoryPlan, fixes: Sequence[Change] = ()) -> dict[str, Any]:
    """Return the plan as numbers, in bytes."""

    def use_fields(use: MemoryUse) -> dict[str, Any]:
        items = [
            {"role": role, "what": item.what, "bytes": item.nbytes, "lasting": item.lasting} for role, item in use.items
        ]
        return {"phase": use.phase, "role": use.role, "lasting": use.lasting, "worst": use.nbytes, "items": items}

    def memory_fields(memory: MemoryLocation) -> dict[str, Any]:
        uses = [use_fields(use) for use in memory.uses]
        return {"name": memory.name, "capacity": memory.capacity, "missing": memory.missing, "phases": uses}

    return {
        "fits": plan.fits,
        "missing": plan.missing,
        "machines": {
            "device": plan.machines.device,
            "device_bytes": plan.machines.device_bytes,
            "count": plan.machines.count,
            "host_bytes": plan.machines.host_bytes,
        },
        "models": {role: {"type": a.model_type, "parameters": a.count()} for role, a in plan.models.items()},
        "devices": [memory_fields(memory) for memory in plan.devices],
        "hosts": [memory_fields(memory) for memory in plan.hosts],
        "shared_memory": plan.shared,
        "too_small": dict(plan.too_small),
        "notes": list(plan.notes),
        "changes": [change.keys for change in fixes],
    }


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"
