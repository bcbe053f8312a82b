"""The closing words of a run: did it learn, how fast, where the time went, where the files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_SMALL_SHARE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a finished run has to say."""

    exp_name: str
    steps: int
    """Done by this process: not those before it was resumed."""
    wall_seconds: float
    """Of the loop: validation and checkpoints included, loading not."""
    accuracy_before: Mapping[str, float]
    """By domain, fractions; empty without `val_before_train`."""
    accuracy_after: Mapping[str, float]
    tokens: int
    """Response tokens trained on."""
    step_seconds: float
    """Seconds inside training steps."""
    spans: Mapping[str, float]
    """Seconds by what they went to, over the whole run, without overlap. What is left is `other`."""
    files: Mapping[str, Path]
    """Where things are, by what they are."""
    reward_before: Mapping[str, float] = field(default_factory=dict)
    """Mean reward of the same responses, by domain."""
    reward_after: Mapping[str, float] = field(default_factory=dict)
    notices: Sequence[str] = ()
    """What was wrong, in words."""
    hazards: tuple[str, ...] = ()
    """What the configuration put at risk."""

    def metrics(self) -> dict[str, float]:
        """Return the final numbers, for `Tracker.finish`."""
        values = {f"accuracy_before/{domain}": value for domain, value in self.accuracy_before.items()}
        values.update({f"accuracy_after/{domain}": value for domain, value in self.accuracy_after.items()})
        values.update({f"reward_before/{domain}": value for domain, value in self.reward_before.items()})
        values.update({f"reward_after/{domain}": value for domain, value in self.reward_after.items()})
        values.update(steps=self.steps, wall_seconds=self.wall_seconds)
        values["tokens_per_second"] = self.tokens_per_second
        return values

    @property
    def tokens_per_second(self) -> float:
        """Response tokens trained on per second of training steps."""
        return self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0


def render(summary: RunSummary) -> RenderableType:
    """Return an object for `rich` to print."""
    only_validated = not summary.steps and summary.accuracy_after
    did = "validation, no training," if only_validated else f"{summary.steps} steps"
    parts: list[RenderableType] = [Text(f"{summary.exp_name}: {did} in {_duration(summary.wall_seconds)}", "bold")]
    if summary.steps:
        parts.append(Text(f"{summary.tokens_per_second:,.0f} tokens/s ({summary.tokens:,} response tokens)"))
    if summary.accuracy_before or summary.accuracy_after:
        parts += [Text(), _accuracy(summary)]
    if summary.reward_after and not _is_accuracy(summary):
        parts += [Text(), _rewards(summary)]
    if summary.spans:
        parts += [Text(), _times(summary)]
    if summary.notices:
        parts += [Text(), Text("what to look at", "bold"), *(Text(f"- {notice}") for notice in summary.notices)]
    if summary.files:
        parts += [Text(), _files(summary)]
    if summary.hazards:
        parts += [Text(), *(Text(hazard, "bold red") for hazard in summary.hazards)]
    return Group(*parts)


def _accuracy(summary: RunSummary) -> Table:
    title = "held-out accuracy" if summary.accuracy_before else "held-out" if summary.steps else "validation"
    table = Table(title, title_justify="left")
    if not summary.accuracy_before:
        table.add_column("accuracy", justify="right")
        for domain, accuracy in sorted(summary.accuracy_after.items()):
            table.add_row(domain, _percent(accuracy))
        return table
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right")
    for domain in sorted({*summary.accuracy_before, *summary.accuracy_after}):
        before, after = summary.accuracy_before.get(domain), summary.accuracy_after.get(domain)
        change = "-" if before is None or after is None else f"{100 * (after - before):+.1f} points"
        table.add_row(domain, _percent(before), _percent(after), change)
    return table


def _is_accuracy(summary: RunSummary) -> bool:
    """Return whether the rewards say nothing beyond the accuracy: right or wrong."""
    return all(
        abs(value - accuracy.get(domain, value)) < 1e-9
        for rewards, accuracy in (
            (summary.reward_before, summary.accuracy_before),
            (summary.reward_after, summary.accuracy_after),
        )
        for domain, value in rewards.items()
    )


def _rewards(summary: RunSummary) -> Table:
    table = Table("held-out reward", title_justify="left")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right")
    for domain in sorted({*summary.reward_before, *summary.reward_after}):
        before, after = summary.reward_before.get(domain), summary.reward_after.get(domain)
        change = "-" if before is None or after is None else f"{after - before:+.3f}"
        table.add_row(domain, _number(before), _number(after), change)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _times(summary: RunSummary) -> Table:
    table = Table("where the time went")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    rows = sorted(summary.spans.items(), key=lambda item: -item[1])
    other = summary.wall_seconds - sum(summary.spans.values())
    if summary.wall_seconds > 0 and other / summary.wall_seconds >= _SMALL_SHARE:
        rows.append(("other", other))
    for name, seconds in rows:
        share = seconds / summary.wall_seconds if summary.wall_seconds > 0 else 0.0
        table.add_row(name, _duration(seconds), f"{share:.1%}")
    return table


def _files(summary: RunSummary) -> Table:
    """List the files without a frame and folded: a path must survive a narrow terminal and be easy to copy."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for what, path in summary.files.items():
        table.add_row(what, Text(str(path)))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
