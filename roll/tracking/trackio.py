"""`trackio`: Hugging Face's local tracker; `trackio show` opens its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.tracking.base import Destination, Sample, Tracker, persistent_run_id


class TrackioTracker(Tracker):
    """Metrics by step, samples as a table. Its files lie where TRACKIO_DIR says, else in the user's cache.

    trackio takes nothing back: of steps that a resumed run plays again the first record stays.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        project: str = "roll",
        name: str | None = None,
        space_id: str | None = None,
        group: str | None = None,
    ) -> None:
        """Open the run; a name is given an id of this run, since names are what trackio tells runs by."""
        import trackio

        self._trackio = trackio
        label = name or destination.run_name or "run"
        self._run = trackio.init(
            project=project,
            name=f"{label}-{persistent_run_id(destination, 'trackio')[:6]}",
            space_id=space_id,
            group=group,
            config=dict(destination.settings),
            resume="allow",
            embed=False,
        )
        self._first_step = 0 if destination.resume_step is None else self._run._next_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self._first_step:
            self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if step < self._first_step:
            return
        columns = ["domain", "prompt", "response", "reward"]
        rows: list[list[object]] = [[s.domain, s.prompt, s.response, s.reward] for s in samples]
        self._run.log({"samples": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self, summary: Mapping[str, float]) -> None:
        del summary
        self._run.finish()
