"""The trackers that a run names, and the one object a pipeline logs to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.signatures import signature_of
from roll.configs.catalog.tracker_table import TRACKERS
from roll.tracking.base import Destination, Sample, Tracker, TrackingError
from roll.tracking.names import check_names
from roll.utils.secrets import redacted, redacted_tree

_logger = logging.getLogger(__name__)


class MultiTracker(Tracker):
    """Several trackers as one. Refuses undocumented names.

    A tracker that fails is named in a warning and left out from then on: what is shown of a run must not end it. Only
    the failure of an essential one is raised, as `TrackingError`.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._last_step: int | None = None
        self.failed: dict[str, str] = {}
        """What happened to those that are left out, by name."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to each tracker; undocumented names and steps out of order are refused by `AssertionError`."""
        check_names(metrics)
        assert self._last_step is None or step > self._last_step, (
            f"step {step} logged after step {self._last_step}; a step is logged once, with all its metrics"
        )
        self._last_step = step
        self._each(f"logging step {step}", lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._each(f"logging the samples of step {step}", lambda tracker: tracker.log_samples(step, samples))

    def finish(self, summary: Mapping[str, float]) -> None:
        """Close every tracker, also after one has failed. Again: nothing."""
        self._each("closing", lambda tracker: tracker.finish(summary))
        self._trackers = {}

    def _each(self, doing: str, do: Callable[[Tracker], None]) -> None:
        failure: TrackingError | None = None
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001 - anything, from code that isn't ours and from the network
                problem = redacted(f"{doing}: {type(error).__name__}: {error}")
                self.failed[name] = problem
                del self._trackers[name]
                if tracker.essential:  # raised below, once the others have had their turn
                    failure = failure or TrackingError(f"tracker {name!r} failed while {problem}")
                    failure.__cause__ = error
                    continue
                _logger.warning("tracker %r failed while %s; the run goes on without it", name, problem)
        if failure is not None:
            raise failure


def _tracker_class(name: str, options: Mapping[str, Any]) -> Callable[..., Tracker]:
    """Return the class that a name of `track_with` stands for; it takes these options."""
    tracker: Callable[..., Tracker] = implementation(TRACKERS, name, key="track_with")
    if name in TRACKERS:
        return tracker
    if not isinstance(tracker, type) or not issubclass(tracker, Tracker):
        raise ValueError(f"track_with: {name} isn't a tracker; derive its class from roll.tracking.base.Tracker")
    for option, problem in signature_of(tracker, skip=1).problems(options):
        raise ValueError(f"tracker_kwargs.{name}.{option}: {problem}")
    return tracker


def build_trackers(
    names: Sequence[str],
    kwargs: Mapping[str, Mapping[str, Any]],
    folder: Path,
    resume_step: int | None,
    *,
    run_name: str = "",
    settings: Mapping[str, Any] | None = None,
) -> MultiTracker:
    """Open the trackers of a run (`track_with`, `tracker_kwargs`), which write to `folder` (made if absent).

    `run_name` and `settings` (the configuration) are for trackers that show several runs.

    The configuration has checked the names and the options of built-in ones. Raises `ValueError` for one of the user's
    own that is no tracker or doesn't have these options, before anything is opened, and `TrackingError` for a tracker
    that can't be opened.
    """
    classes = {name: _tracker_class(name, kwargs.get(name, {})) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    destination = Destination(folder, resume_step, run_name, redacted_tree(settings or {}))
    trackers: dict[str, Tracker] = {}
    try:
        for name, tracker_class in classes.items():
            with _opening(name, folder):
                trackers[name] = tracker_class(destination, **kwargs.get(name, {}))
    except BaseException:
        MultiTracker(trackers).finish({})
        raise
    return MultiTracker(trackers)


@contextlib.contextmanager
def _opening(name: str, folder: Path) -> Iterator[None]:
    """Say which tracker failed. At the start that ends the run: nothing is lost yet, and a login may be missing."""
    try:
        yield
    except Exception as error:
        problem = redacted(f"{type(error).__name__}: {error}")
        raise TrackingError(f"tracker {name!r} failed while opening {folder}: {problem}") from error
