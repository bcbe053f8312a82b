"""The trackers that a run names, and the one object a pipeline logs to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.catalog.entries import implementation
from roll.catalog.trackers import TRACKERS
from roll.tracking.base import Destination, Sample, Tracker, TrackingError
from roll.tracking.names import check_names
from roll.utils.signatures import signature_of


class MultiTracker(Tracker):
    """Several trackers as one. Refuses undocumented names, and names the tracker that fails."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._last_step: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to each tracker; undocumented names and steps out of order are refused by `AssertionError`."""
        check_names(metrics)
        assert self._last_step is None or step > self._last_step, (
            f"step {step} logged after step {self._last_step}; a step is logged once, with all its metrics"
        )
        self._last_step = step
        for name, tracker in self._trackers.items():
            with _named(name, f"logging step {step}"):
                tracker.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for name, tracker in self._trackers.items():
            with _named(name, f"logging the samples of step {step}"):
                tracker.log_samples(step, samples)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Close every tracker, also after one has failed; then raise the first failure. Again: nothing."""
        failure: TrackingError | None = None
        open_trackers, self._trackers = self._trackers, {}
        for name, tracker in open_trackers.items():
            try:
                with _named(name, "closing"):
                    tracker.finish(summary)
            except TrackingError as error:  # raised below, once the others are closed
                failure = failure or error
        if failure is not None:
            raise failure


def _tracker_class(name: str, options: Mapping[str, Any]) -> Callable[..., Tracker]:
    """The class that a name of `track_with` stands for; it takes these options."""
    found: Callable[..., Tracker] = implementation(TRACKERS, name, key="track_with")
    if name in TRACKERS:
        return found
    if not isinstance(found, type) or not issubclass(found, Tracker):
        raise ValueError(f"track_with: {name} isn't a tracker; derive its class from roll.tracking.base.Tracker")
    for option, problem in signature_of(found, skip=1).problems(options):
        raise ValueError(f"tracker_kwargs.{name}.{option}: {problem}")
    return found


def build_trackers(
    names: Sequence[str], kwargs: Mapping[str, Mapping[str, Any]], folder: Path, resume_step: int | None
) -> MultiTracker:
    """Open the trackers of a run (`track_with`, `tracker_kwargs`), which write to `folder` (made if absent).

    The configuration has checked the names and the options of built-in ones. Raises `ValueError` for one of the user's
    own that is no tracker or doesn't have these options, before anything is opened, and `TrackingError` for a tracker
    that can't be opened.
    """
    classes = {name: _tracker_class(name, kwargs.get(name, {})) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    destination, trackers = Destination(folder, resume_step), {}
    for name, tracker_class in classes.items():
        with _named(name, f"opening {folder}", (OSError, ImportError)):
            trackers[name] = tracker_class(destination, **kwargs.get(name, {}))
    return MultiTracker(trackers)


@contextlib.contextmanager
def _named(name: str, doing: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Say which tracker failed at what."""
    try:
        yield
    except kinds as error:
        raise TrackingError(f"tracker {name!r} failed while {doing}: {type(error).__name__}: {error}") from error
