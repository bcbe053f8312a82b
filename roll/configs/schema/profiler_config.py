"""The sections `profiler` and `tracing`: what is recorded of chosen steps, and of every episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.schema.acts_if import acting, needs
from roll.configs.schema.fields import number, one_or_many

PROFILES = needs("^profile_steps", why="no step is profiled", fix="profile_steps=[2], or remove it")
_TORCH = needs("tools", "torch", why="it is an option of torch.profiler", fix="{section}.tools=torch, or remove it")
_TRACES = needs("enabled", fix="{section}.enabled=true, or remove it")


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """What is recorded in the steps of `profile_steps`, besides the phases of the step, every call to a worker and its
    memory, which always are (docs/profiling.md)."""

    tools: tuple[Literal["torch", "memory", "nsight"], ...] = one_or_many(("torch",), acts_if=(PROFILES,))
    """`torch`: operators and kernels, a trace for each rank. `memory`: a snapshot of an accelerator's allocations for
    pytorch.org/memory_viz. `nsight`: Nsight Systems around the workers. An empty list: phases and calls alone."""
    roles: tuple[str, ...] = one_or_many(acts_if=(PROFILES,))
    """Roles whose ranks the tools look at, one or several. Empty: all."""
    ranks: tuple[int, ...] = one_or_many((0,), acts_if=(PROFILES,))
    """Their ranks, one or several. Empty: all."""
    activities: tuple[Literal["cpu", "cuda"], ...] = one_or_many(acts_if=(PROFILES, _TORCH))
    """What torch.profiler records. Empty: what there is."""
    record_shapes: bool = acting(False, PROFILES, _TORCH)
    """Keep the shapes of operators' inputs."""
    with_stack: bool = acting(False, PROFILES, _TORCH)
    """Keep the Python lines that operators are called from. Slow, and traces are several times as large."""
    max_events: int = number(500_000, ge=1000, acts_if=(PROFILES, _TORCH))
    """Operators in one trace, about 100 bytes each before compression; of more the longest are kept, and the rest is
    counted."""
    max_traces: int = number(64, ge=1, acts_if=(PROFILES,))
    """Traces of ranks that a run may write: steps x ranks. More are refused before it starts."""
    ray_timeline: bool = acting(False, needs("^executor", "ray"))
    """Write Ray's own timeline of the whole run, for Perfetto, when it ends: when each process was started and what it
    was called for. Whatever `profile_steps` is."""


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Spans in OpenTelemetry's form: a trace for each step with its phases and calls, and one for each episode, from
    its start over responses, environment and reward to the update that it is trained on. Names, ids, counts and times:
    no text, no setting (docs/profiling.md)."""

    enabled: bool = False
    """Record spans, in `<logging_dir>/spans.jsonl` (OTLP in JSON, a line for each step)."""
    endpoint: str | None = acting(None, _TRACES)
    """Also send them to a collector that takes OTLP over HTTP, such as `http://localhost:4318`; the extra `otel` brings
    what is needed. Headers come from `OTEL_EXPORTER_OTLP_HEADERS`. null: the file alone."""
    episode_share: float = number(1.0, ge=0, le=1, acts_if=(_TRACES,))
    """Share of the episodes that are traced, the same ones in every run of a seed."""
