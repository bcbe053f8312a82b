"""Rules of `profile_steps` and `profiler`. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation, nearest
from roll.configs.schema.run_config import RunConfig


def profiler_rules(config: RunConfig) -> Iterator[Violation]:
    """Steps that the run has, roles and ranks that it starts, and not too many files."""
    steps, options, roles = config.profile_steps, config.profiler, config.roles
    last = config.max_steps if config.max_steps and not config.only_validates else None
    for step in steps:
        if step < 0 or (config.only_validates and step > 0) or (last is not None and step > last):
            what = "0, for nothing is trained" if config.only_validates else f"0 to {last}" if last else "0 or more"
            yield Violation("profile_steps", f"steps of the run: {what}", "", step)
    for role in options.roles:
        if role not in roles:
            yield Violation("profiler.roles", f"roles that are started: {', '.join(roles)}", nearest(role, roles), role)
    sizes = {role: len(slots) for role, slots in config.placement.roles.items()}
    chosen = [role for role in (options.roles or roles) if role in sizes]
    largest = max((sizes[role] for role in chosen), default=1)
    for rank in options.ranks:
        if not 0 <= rank < largest:
            yield Violation("profiler.ranks", f"ranks of these roles: 0 to {largest - 1}", "", rank)
    per_step = sum(sum(not options.ranks or rank in options.ranks for rank in range(sizes[role])) for role in chosen)
    total = per_step * len(set(steps))
    if "torch" in options.tools and total > options.max_traces:
        expected = f"at least the {total} traces that {len(set(steps))} steps of {per_step} ranks make"
        fix = "fewer steps, roles or ranks, or raise it"
        yield Violation("profiler.max_traces", expected, fix, options.max_traces)
    endpoint = config.tracing.endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield Violation("tracing.endpoint", "an address such as http://localhost:4318", "", endpoint)
