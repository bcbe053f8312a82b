"""Which checkpoint is the best one so far, by a metric of validations: `save_best`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from roll.checkpoint.best import Best
from roll.configs.catalog.validation_metrics import best_by

logger = logging.getLogger(__name__)


class BestCheckpoint:
    """Compares validations with the best one so far, which stands in every checkpoint from then on."""

    def __init__(self, save_best: str | None) -> None:
        self._by = None if save_best is None else best_by(save_best)
        self.record: Best | None = None
        """The best so far; of an earlier run that this one goes on from, where this one compares nothing."""
        self._warned = False

    def improves(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether a validation is better than every one before it, which makes it the best so far.

        As in transformers, an equal one isn't. What is no finite number is never the best.
        """
        if self._by is None:
            return False
        metric, value = self._by.metric, values.get(self._by.metric)
        if value is None or not math.isfinite(value):
            self._warn(step, metric, value, values)
            return False
        best = self.record
        if best is not None and (best.metric, best.better) != (metric, self._by.better):
            logger.warning("save_best is %s now: the best by %s so far isn't compared with it", metric, best.metric)
            best = None
        if best is not None and (value <= best.value if best.better == "higher" else value >= best.value):
            return False
        assert self._by.better is not None, "the configuration's rules ask for it"
        self.record = Best(metric=metric, better=self._by.better, value=float(value), step=step)
        before = "" if best is None else f" (before: {best.value:.6g} at step {best.step})"
        logger.info("step %d is the best so far: %s is %.6g%s", step, metric, value, before)
        return True

    def _warn(self, step: int, metric: str, value: float | None, values: Mapping[str, float]) -> None:
        if self._warned:
            return
        self._warned = True
        measured = ", ".join(name for name in values if name.startswith("val/"))
        what = f"the validation at step {step} gave no {metric}" if value is None else f"{metric} is {value}"
        logger.warning("save_best: %s, so that it is no candidate; it gave %s", what, measured or "nothing")
