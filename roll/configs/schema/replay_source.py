"""The notation of `replay_from`: a run, and which of its recorded steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STEPS = re.compile(r"(.+):(\d{1,9})(?:-(\d{1,9}))?", re.ASCII | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ReplaySource:
    """What is replayed."""

    run: str
    """Folder of the run, or of its rollouts."""
    first: int = 1
    last: int | None = None
    """Last step; None: of those that are recorded."""

    @property
    def chosen(self) -> bool:
        """Return whether steps were named."""
        return self.last is not None


def parse_replay_from(text: str) -> ReplaySource:
    """Return what `RUN`, `RUN:STEP` or `RUN:FIRST-LAST` names.

    Raises:
        ValueError: no run is named, or steps that there can't be.
    """
    match = _STEPS.fullmatch(text)
    if match is None:
        if not text.strip():
            raise ValueError("it names no run")
        return ReplaySource(run=text)
    run, first, last = match.group(1), int(match.group(2)), int(match.group(3) or match.group(2))
    if first < 1:
        raise ValueError("steps are numbered from 1")
    if last < first:
        raise ValueError(f"the steps {first}-{last} run backwards")
    return ReplaySource(run=run, first=first, last=last)
