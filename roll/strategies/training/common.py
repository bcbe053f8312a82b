"""What the training backends share: the parts that they are made of, and the course of an optimizer step.

The parts, by subject: `MicroBatches` (micro.py) cuts and lays out rows, `StepLosses` (here) makes a step's losses,
`TrainingProgress` (optim.py) counts steps, `Shelves` (state_offload.py) hold what sleeps, `ModelFolder`
(model_folder.py) exports.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.configs.rules.layout_rules import shape_rules
from roll.configs.schema.model_shape import shape_of
from roll.distributed.layout import RankLayout
from roll.distributed.worker import WorkerInfo
from roll.strategies.base import STATE_PARTS, LossFn, StatePart, TrainSpec, TrainStrategy
from roll.strategies.state_files import StateFiles
from roll.strategies.training.micro import MicroBatches, Peers, denominators, nonfinite_rows, rows_to_compute
from roll.strategies.training.model_folder import ModelFolder
from roll.strategies.training.optim import TrainingProgress
from roll.strategies.training.pretrained import load_config, load_tokenizer
from roll.strategies.training.state_offload import Shelves
from roll.types.batch import Denominators, TokenBatch, TokenOutputs
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_NONFINITE_SHARE = 0.1
"""Of the rows of a mini-batch that a step may leave out because the model gave no finite number for one of their loss
tokens; a single one is always left out, unless no other row remains."""


class CommonStrategy(TrainStrategy):
    """A backend's state that doesn't depend on the backend. Subclasses set `_folder` once they have a model, and call
    `_share_rows` unless every rank has rows of its own."""

    _folder: ModelFolder

    def __init__(self, spec: TrainSpec, info: WorkerInfo) -> None:
        self._spec = spec
        self._info = info
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._share_rows(RankLayout(dp_rank=info.rank, dp_size=info.world_size))
        self._shelves = Shelves(spec.role)
        args = spec.worker.model_args
        self._tokenizer, self._config = load_tokenizer(args), load_config(args)
        # The configuration's own check sees only folders and models in the hub's cache.
        shape = shape_of(self._config.get_text_config().to_dict())
        wrong = next(shape_rules(spec.role, spec.worker, str(args.model_name_or_path), shape), None)
        if wrong is not None:
            raise ValueError(str(wrong))
        self._progress = TrainingProgress(spec)

    def _share_rows(self, layout: RankLayout, group: ProcessGroup | None = None) -> None:
        """Set which rows this rank gets, and the process group that its results are summed over; None: all ranks."""
        self.layout = layout
        self._peers = Peers(layout.dp_size, group, self._device)
        self._micros = MicroBatches(self._spec, self._peers)
        self._losses = StepLosses(self._spec.role, self._peers)

    @property
    def _backend(self) -> str:
        """Return the backend of collectives: NCCL between accelerators, gloo between CPUs."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    # --- optimizer steps -------------------------------------------------------------------------------------------

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Take a step; one whose gradient isn't finite is skipped and counted.

        Rows for which the model gives an output of -inf or NaN at a loss token are counted, and the step is taken again
        without them, with the denominators of the others: the loss is the same in every layout. Raises
        `FloatingPointError` if there are too many such rows, or too many steps in a row were skipped.
        """
        assert self._spec.trains, f"{self._spec.role} was built without an optimizer"
        self._shelves.require_awake("parameters", "optimizer")
        lr = self._progress.learning_rate()
        metrics, norm, taken = self._attempt(batch, loss_fn, lr)
        left_out = 0 if taken else self._losses.count_nonfinite(batch)
        if left_out:
            nonfinite = self._losses.nonfinite
            batch = batch.select([i for i, name in enumerate(batch.row_ids) if name not in nonfinite])
            metrics, norm, taken = self._attempt(batch, loss_fn, lr)
            metrics.add_sum(f"{self._spec.metric_prefix}/nonfinite_rows", float(len(nonfinite)))
        self._progress.record(metrics, norm, lr, finite=taken, reports=self._info.rank == 0)
        return metrics

    @abstractmethod
    def _attempt(self, batch: TokenBatch, loss_fn: LossFn, lr: float) -> tuple[Metrics, float, bool]:
        """Return (metrics, gradient norm before clipping, whether the optimizer took the step) of a mini-batch.

        All ranks agree on whether it was taken: it isn't if the gradient of any rank isn't finite.
        """

    # --- sleep -----------------------------------------------------------------------------------------------------

    def _resident(self, part: StatePart) -> Iterable[Tensor]:
        """Return the tensors of the parameters, or of the optimizer, that can leave the device."""
        del part
        return ()

    def _drop_gradients(self) -> int:
        """Give up the gradients; bytes freed on the device."""
        return 0

    def sleep(self, parts: Sequence[StatePart] = STATE_PARTS) -> int:
        """Sleep; without an accelerator only gradients can go."""
        freed = self._drop_gradients() if "gradients" in parts else 0
        if self._device.type == "cuda":
            for part in ("parameters", "optimizer"):
                if part in parts and not self._shelves[part]:
                    freed += self._shelves[part].store(self._resident(part), self._device)
            torch.cuda.empty_cache()  # for the other processes on this device
        return freed

    def wake(self, parts: Sequence[StatePart] = STATE_PARTS) -> None:
        for part in parts:
            self._shelves[part].restore()

    # --- exports ---------------------------------------------------------------------------------------------------

    def export(self, path: Path, files: StateFiles | None = None) -> None:
        self._folder.export(self.named_weights(), path, files or StateFiles())


class StepLosses:
    """The losses of an optimizer step's micro-batches, and the rows that have none."""

    def __init__(self, role: str, peers: Peers) -> None:
        self._role = role
        self._peers = peers
        self.nonfinite: set[str] = set()
        """Rows of this rank that had an output of -inf or NaN at a loss token in the step's last attempt."""

    def begin(self, batch: TokenBatch, loss_fn: LossFn) -> tuple[TokenBatch, Denominators]:
        """Return (this rank's rows that the step must run, sizes of the whole mini-batch with all its rows)."""
        self.nonfinite = set()
        mine = denominators(batch)
        batch = batch.select(rows_to_compute(batch, loss_fn))
        mine = replace(mine, computed_tokens=denominators(batch).tokens)
        return batch, Denominators(*self._peers.sums(*astuple(mine)))

    def of(
        self, outputs: TokenOutputs, micro: TokenBatch, loss_fn: LossFn, totals: Denominators, *, is_padding: bool
    ) -> tuple[Tensor, Metrics]:
        """Return (this rank's share of the loss, its metrics) of one micro-batch.

        A padding row gives 0 that depends on every output: its backward pass takes part in collectives. A row without a
        finite output gives NaN: no rank takes a step then, and `train_step` leaves the row out.
        """
        nonfinite = set() if is_padding else nonfinite_rows(outputs, micro)
        self.nonfinite |= nonfinite
        if is_padding or nonfinite:
            factor = math.nan if nonfinite else 0.0
            return torch.stack([column.sum() for column in outputs.columns().values()]).sum() * factor, Metrics()
        terms = loss_fn.compute(outputs, micro.to(self._peers.device), totals)
        return terms.loss, terms.metrics

    def count_nonfinite(self, batch: TokenBatch) -> int:
        """Return the rows of all ranks that the step must leave out; raise `FloatingPointError` if too many."""
        bad, rows = self._peers.sums(float(len(self.nonfinite)), denominators(batch).sequences)
        if bad == 0:
            return 0
        text = f"{self._role}: {bad:g} of the {rows:g} rows of a mini-batch have a loss token"
        text += " for which the model gives -inf or NaN"
        if bad == rows or bad > max(1.0, MAX_NONFINITE_SHARE * rows):
            raise FloatingPointError(
                f"{text}, more than a share of {MAX_NONFINITE_SHARE:g}. The weights have diverged, or the model can't "
                "produce what was sampled: look at grad_norm and mismatch/kl of the steps before, lower learning_rate, "
                "and go on from an earlier checkpoint"
            )
        logger.warning("%s; they leave this optimizer step", text)
        return int(bad)
