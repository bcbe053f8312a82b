"""`tensorboard`: event files under `<folder>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.tracking.base import Destination, Sample, Tracker


class TensorboardTracker(Tracker):
    """Scalars by metric name, samples as text.

    The writer starts with `purge_step`, which makes TensorBoard forget what an earlier process logged at
    steps that this run plays again (all of them, for a run that starts from nothing).
    """

    def __init__(self, destination: Destination, *, log_dir: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first_step = 0 if destination.resume_step is None else destination.resume_step + 1
        folder = log_dir or str(destination.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and flush, so that a kill loses no step and a full disk shows at the step it happens."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        by_domain: dict[str, list[Sample]] = {}
        for sample in samples:
            by_domain.setdefault(sample.domain, []).append(sample)
        for domain, group in by_domain.items():
            text = "\n\n---\n\n".join(_markdown(sample) for sample in group)
            self._writer.add_text(f"samples/{domain}", text, global_step=step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, float]) -> None:
        if summary:
            rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in summary.items())
            self._writer.add_text("summary", f"| | |\n|---|---|\n{rows}")
        self._writer.close()


def _markdown(sample: Sample) -> str:
    """Indent as code, so that what a model wrote is shown and never rendered."""
    text = f"{sample.prompt}\n>>> {sample.response}"
    code = "\n".join(f"    {line}" for line in text.splitlines())
    return f"reward {sample.reward:.3g}\n\n{code}"
