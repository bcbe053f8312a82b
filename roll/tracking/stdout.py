"""`stdout`: a live table on a terminal; elsewhere (a pipe, a file, CI) one plain line a step."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.live import Live
from rich.table import Table

from roll.tracking.base import Destination, Sample, Tracker
from roll.utils.console import Console
from roll.utils.terminal import printable

_logger = logging.getLogger(__name__)
_SAMPLE_CHARS = 160
_MISSING = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    """One number of the table."""

    title: str
    metrics: tuple[str, ...]
    """Names it may have; the first that is there counts."""
    format: Callable[[float], str]

    def cell(self, metrics: Mapping[str, float]) -> str:
        """Return the cell of a row of the table."""
        name = next((name for name in self.metrics if name in metrics), None)
        return _MISSING if name is None else self.format(metrics[name])


COLUMNS = (
    _Column("reward", ("reward/mean",), "{:.3f}".format),
    _Column("accuracy", ("val/accuracy", "val/token_accuracy", "preference/accuracy"), "{:.1%}".format),
    _Column("length", ("response/length_mean", "sft/row_length_mean", "preference/row_length_mean"), "{:.1f}".format),
    _Column("mismatch", ("mismatch/kl",), "{:.1e}".format),
    _Column("loss", ("actor/loss", "sft/loss", "preference/loss"), "{:+.4f}".format),
    _Column("grad norm", ("actor/grad_norm",), "{:.3f}".format),
    _Column("tokens/s", ("throughput/tokens_per_second",), "{:,.0f}".format),
    _Column("time", ("time/step",), "{:.1f}s".format),
)


class StdoutTracker(Tracker):
    """What a person watches. Missing numbers (no validation at this step, say) show as `-`."""

    def __init__(
        self, destination: Destination, *, live: bool | None = None, rows: int = 20, file: TextIO | None = None
    ) -> None:
        """Show a table (`live`) of the latest `rows` steps, or lines; None: as the output is a terminal or not."""
        self._file = sys.stdout if file is None else file
        self._rows: deque[tuple[str, ...]] = deque(maxlen=rows)
        self._live: Live | None = None
        if _can_redraw(self._file) if live is None else live:
            console = Console(file=self._file, force_terminal=True)
            self._live = Live(self._table(), console=console, auto_refresh=False)
            self._live.start()
        if destination.resume_step is not None:
            self._line(f"resumed after step {destination.resume_step}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        cells = tuple(column.cell(metrics) for column in COLUMNS)
        failed, held_out = metrics.get("rollout/failed_episodes", 0), metrics.get("val/reward")
        if self._live is None:
            pairs = zip((column.title for column in COLUMNS), cells, strict=True)
            named = [f"{title} {cell}" for title, cell in pairs if cell != _MISSING]
            named += [f"val reward {held_out:.3f}"] if held_out is not None else []
            self._line("  ".join([f"step {step}", *named, *([f"failed {failed:.0f}"] if failed else [])]))
            return
        if held_out is not None:  # no column: the table would be wider than 80 columns
            self._line(f"step {step}: held-out reward {held_out:.3f}")
        if failed:  # no column: there are none in a good run
            self._line(f"step {step}: {failed:.0f} episodes failed, see dropped.jsonl")
        self._rows.append((str(step), *cells))
        self._live.update(self._table(), refresh=True)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            prompt, response = sample.prompt[-_SAMPLE_CHARS:], sample.response[:_SAMPLE_CHARS]
            about = f"sample  step {step}  {sample.domain}  reward {sample.reward:.3g}"
            self._line(f"{about}  {prompt!r} -> {response!r}")

    def finish(self, summary: Mapping[str, float]) -> None:
        """Leave the table as it stands. The closing summary is the pipeline's to print."""
        del summary
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        # Frameless: the table fits a terminal of 80 columns.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("step", justify="right", no_wrap=True)
        for column in COLUMNS:
            table.add_column(column.title, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
            return
        text = printable(text)
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        try:
            self._file.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._file.flush()
        except BrokenPipeError:
            self._reader_left()

    def _reader_left(self) -> None:
        """Stop writing when a reader such as `head` is done; training goes on, and other trackers keep the record."""
        _logger.warning("standard output was closed by its reader; the run goes on without the table")
        if self._file is sys.stdout:
            # Whatever else writes there, the flush at exit included, would fail too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the tracker


def _can_redraw(file: TextIO) -> bool:
    """Return True for a terminal that moves its cursor; an editor's shell often doesn't, and says so in TERM."""
    return file.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
