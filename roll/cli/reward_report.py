"""What `roll reward test` prints: a line per kind of response, and the rows that weren't scored as they should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from roll.utils.console import Console
from roll.utils.terminal import printable

_ALIKE = 6
"""Failures with the same words that are listed."""
_EXAMPLES = 3
_SHOWN = 60
"""Characters of a response in an example; its end, where the answer is."""


@dataclass(frozen=True)
class Mismatch:
    """A response that isn't scored as it should be."""

    where: str
    check: str
    why: str
    failed: bool = False
    """The reward gave no score."""
    got: float | None = None
    """The score, if it gave one."""


@dataclass
class Kind:
    """What became of the responses of one kind: references, empty ones, perturbed ones."""

    responses: int = 0
    as_expected: int = 0
    scores: list[float] = field(default_factory=list)
    _good: list[tuple[str, float]] = field(default_factory=list)
    _bad: list[tuple[str, float]] = field(default_factory=list)

    def add(self, response: str, score: float | None, *, as_expected: bool) -> None:
        """Count a response; None: it got no score."""
        self.responses += 1
        self.as_expected += as_expected
        if score is not None:
            self.scores.append(score)
            some = self._good if as_expected else self._bad
            if len(some) < _EXAMPLES:
                some.append((response, score))

    @property
    def examples(self) -> list[tuple[str, float]]:
        """Return three responses with their scores, those first that aren't scored as they should be."""
        return [*self._bad, *self._good][:_EXAMPLES]


def report(
    title: str, kinds: Mapping[str, Kind], counts: Mapping[str, int], mismatches: Sequence[Mismatch], show: int
) -> None:
    """Print all of it; `show` rows of the table of mismatches at most."""
    console = Console(highlight=False)
    if any(kind.responses for kind in kinds.values()):
        console.print(_kinds(title, kinds))
    lines = _lines(mismatches)
    if lines:
        table = Table("row", "response", "what happened", title="not as expected")
        for where, check, why in lines[:show]:
            table.add_row(Text(printable(where)), check, Text(printable(why)))
        console.print(table)
    hidden = f" ({len(lines) - show} not shown, see --show)" if len(lines) > show else ""
    counted = ", ".join(f"{number} {what}" for what, number in counts.items())
    console.print(
        f"{counted}, {len(mismatches)} not as expected{hidden}" if mismatches else f"{counted}, all as expected"
    )


def _kinds(title: str, kinds: Mapping[str, Kind]) -> Table:
    table = Table("response", title=Text(printable(title)))
    for name in ("n", "mean", "as expected"):
        table.add_column(name, justify="right")
    table.add_column("examples: score, response")
    for name, kind in kinds.items():
        if kind.responses:
            mean = f"{sum(kind.scores) / len(kind.scores):.3g}" if kind.scores else "-"
            share = f"{100 * kind.as_expected / kind.responses:.3g} %"
            examples = "\n".join(f"{score:g}  {response[-_SHOWN:]!r}" for response, score in kind.examples)
            table.add_row(name, str(kind.responses), mean, share, Text(examples))
    return table


def _lines(mismatches: Sequence[Mismatch]) -> list[tuple[str, str, str]]:
    """Return the rows of the table; of a failure that is the same for many rows it has `_ALIKE`."""
    alike = Counter(_same(one) for one in mismatches if one.failed)
    shown: Counter[str] = Counter()
    lines = []
    for one in mismatches:
        why = one.why
        if one.failed:
            shown[_same(one)] += 1
            more = alike[_same(one)] - _ALIKE
            if shown[_same(one)] > _ALIKE:
                continue
            if shown[_same(one)] == _ALIKE and more > 0:
                why = f"{why} (and {more} more times)"
        lines.append((one.where.rpartition("/")[2], one.check, why))
    return lines


def _same(one: Mismatch) -> str:
    """Return the failure without the name of its row."""
    return one.why.replace(one.where, "")
