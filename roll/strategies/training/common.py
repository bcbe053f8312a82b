"""What the training backends share: micro-batches, global sizes, losses, schedule, bad gradients, exports."""

from __future__ import annotations

import json
import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.configs.rules.layout_rules import shape_rules
from roll.configs.schema.checkpoint_config import CheckpointContent
from roll.configs.schema.model_shape import shape_of
from roll.configs.schema.worker_config import TrainConfig
from roll.distributed.layout import RankLayout
from roll.distributed.worker import WorkerInfo
from roll.strategies.attention.attention import join_shards
from roll.strategies.attention.prefix_tree import plan_shared_batches
from roll.strategies.base import STATE_PARTS, LossFn, Output, StatePart, TopK, TrainSpec, TrainStrategy
from roll.strategies.state_files import StateFiles
from roll.strategies.training.logits import HeadOutputs, HeadRequest
from roll.strategies.training.micro import (
    MicroLayout,
    denominators,
    lay_out,
    lay_out_tree,
    nonfinite_rows,
    plan_micro_batches,
    rows_to_compute,
)
from roll.strategies.training.optim import schedule_from, weight_decay_from
from roll.strategies.training.pretrained import load_config, load_tokenizer, quiet_transformers
from roll.strategies.training.state_offload import Shelf
from roll.types.batch import Denominators, TokenBatch, TokenOutputs
from roll.types.metrics import Metrics
from roll.utils.response_ends import response_ends, with_ends

logger = logging.getLogger(__name__)

MAX_NONFINITE_SHARE = 0.1
"""Of the rows of a mini-batch that a step may leave out because the model gave no finite number for one of their loss
tokens; a single one is always left out, unless no other row remains."""

TOP_K_COLUMNS = ("top_logprobs", "top_ids")

MAX_CONSECUTIVE_SKIPS = 5
"""Non-finite gradients in a row: one is an accident of a batch, this many are a diverged model."""


class CommonStrategy(TrainStrategy):
    """A backend's state that doesn't depend on the backend. Subclasses set `layout`, and `_group` on several ranks."""

    def __init__(self, spec: TrainSpec, info: WorkerInfo) -> None:
        self._spec = spec
        self._info = info
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.layout = RankLayout(dp_rank=info.rank, dp_size=info.world_size)
        self._group: ProcessGroup | None = None
        """Process group of the data-parallel ranks that this rank's results are summed over; None: all ranks."""
        self._nonfinite: set[str] = set()
        """Rows of this rank that had an output of -inf or NaN at a loss token in the step's last attempt."""
        self._shelves: dict[StatePart, Shelf] = {part: Shelf() for part in STATE_PARTS}
        self._steps = 0
        """Optimizer steps taken: the position in the learning-rate schedule."""
        self._updates = 0
        """Steps that the optimizer's moments have seen; fewer, if only `_steps` came from a checkpoint."""
        self._skipped = 0
        self._shares_prefixes = False
        """Whether the model computes tokens that rows have in common at their beginnings once."""
        self._shared_tokens = 0
        """Tokens that this has saved since the last optimizer step began."""
        args = spec.worker.model_args
        self._tokenizer, self._config = load_tokenizer(args), load_config(args)
        # The configuration's own check sees only folders and models in the hub's cache.
        shape = shape_of(self._config.get_text_config().to_dict())
        wrong = next(shape_rules(spec.role, spec.worker, str(args.model_name_or_path), shape), None)
        if wrong is not None:
            raise ValueError(str(wrong))
        if spec.trains:
            self._lr_factor = schedule_from(self._trained.training_args, spec.total_optimizer_steps)
            self._weight_decay_at = weight_decay_from(self._trained.training_args, spec.total_optimizer_steps)

    @property
    def _trained(self) -> TrainConfig:
        worker = self._spec.worker
        assert isinstance(worker, TrainConfig), f"{self._spec.role} has no training_args"
        return worker

    @property
    def _backend(self) -> str:
        """Return the backend of collectives: NCCL between accelerators, gloo between CPUs."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    # --- micro-batches ---------------------------------------------------------------------------------------------

    def _plan(self, batch: TokenBatch, *, training: bool) -> list[list[int]]:
        """Return the rows of each micro-batch, as many on every rank: an empty one stands for a padding row.

        Training keeps the rows of a unit in one micro-batch, where the loss sees them together.
        """
        max_rows, max_tokens = self._limits(training=training)
        units, packed = self._units(batch, training=training), self._spec.worker.use_sequence_packing
        parts = plan_micro_batches(
            batch.lengths.tolist(), units, max_rows=max_rows, max_tokens=max_tokens, packed=packed
        )
        return self._evened(parts)

    def _parts(self, batch: TokenBatch, *, training: bool) -> tuple[list[list[int]], bool]:
        """Return (rows of each micro-batch as `_plan` does, whether tokens that rows share are computed once).

        That is decided for this rank's rows alone: it changes no collective.
        """
        # The engine may have sent the same token of two rows to different experts.
        if not self._shares_prefixes or batch.routed_experts is not None:
            return self._plan(batch, training=training), False
        max_rows, max_tokens = self._limits(training=training)
        units = self._units(batch, training=training)
        parts = plan_shared_batches(batch, units, max_rows=max_rows, max_tokens=max_tokens)
        return (self._plan(batch, training=training), False) if parts is None else (self._evened(parts), True)

    def _laid_out(
        self, micro: TokenBatch, outputs: Sequence[Output], *, packed: bool, multiple: int, shared: bool
    ) -> MicroLayout:
        """Return the layout of a micro-batch for these outputs, `shared` as a tree; see `lay_out`."""
        beside, ahead = "student_logprobs" in outputs, self._spec.kind != "reward"
        if not shared:
            return lay_out(micro, self._device, packed=packed, multiple=multiple, teacher_ids=beside, ahead=ahead)
        layout = lay_out_tree(micro, self._device, multiple=multiple, teacher_ids=beside, ahead=ahead)
        self._shared_tokens += micro.num_tokens - (layout.ids.shape[1] - layout.padding)
        return layout

    def _limits(self, *, training: bool) -> tuple[int | None, int | None]:
        """Return the most rows, or the most tokens, of a micro-batch."""
        worker = self._spec.worker
        if training:
            dynamic = self._trained.use_dynamic_batching_in_train
            rows = self._trained.training_args.per_device_train_batch_size
            tokens = self._trained.max_tokens_per_microbatch_in_train
        else:
            dynamic, rows = worker.use_dynamic_batching_in_infer, worker.infer_batch_size
            tokens = worker.max_tokens_per_microbatch_in_infer
        return (None, tokens) if dynamic else (rows, None)

    @staticmethod
    def _units(batch: TokenBatch, *, training: bool) -> list[list[int]]:
        return (batch if training else batch.with_row_units()).units()

    def _evened(self, parts: list[list[int]]) -> list[list[int]]:
        """Fill up this rank's micro-batches to the number that the rank with most of them has."""
        return parts + [[] for _ in range(self._most(len(parts)) - len(parts))]

    def _most(self, mine: int) -> int:
        if self.layout.dp_size == 1:
            return mine
        most = torch.tensor(mine, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return int(most)

    def _sums(self, *mine: float) -> list[float]:
        """Return numbers added up over the data-parallel ranks."""
        if self.layout.dp_size == 1:
            return list(mine)
        sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums, group=self._group)
        return list(sums.tolist())

    # --- optimizer steps -------------------------------------------------------------------------------------------

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """Take a step; one whose gradient isn't finite is skipped and counted.

        Rows for which the model gives an output of -inf or NaN at a loss token are counted, and the step is taken again
        without them, with the denominators of the others: the loss is the same in every layout. Raises
        `FloatingPointError` if there are too many such rows, or too many steps in a row were skipped.
        """
        assert self._spec.trains, f"{self._spec.role} was built without an optimizer"
        self._require_awake("parameters", "optimizer")
        lr = self._learning_rate()
        metrics, norm, taken = self._attempt(batch, loss_fn, lr)
        left_out = 0 if taken else self._count_nonfinite(batch)
        if left_out:
            mine = len(self._nonfinite)
            batch = batch.select([i for i, name in enumerate(batch.row_ids) if name not in self._nonfinite])
            metrics, norm, taken = self._attempt(batch, loss_fn, lr)
            metrics.add_sum(f"{self._metrics_of}/nonfinite_rows", float(mine))
        self._record_step(metrics, norm, lr, finite=taken)
        return metrics

    @abstractmethod
    def _attempt(self, batch: TokenBatch, loss_fn: LossFn, lr: float) -> tuple[Metrics, float, bool]:
        """Return (metrics, gradient norm before clipping, whether the optimizer took the step) of a mini-batch.

        All ranks agree on whether it was taken: it isn't if the gradient of any rank isn't finite.
        """

    def _count_nonfinite(self, batch: TokenBatch) -> int:
        """Return the rows of all ranks that the step must leave out; raise `FloatingPointError` if too many."""
        bad, rows = self._sums(float(len(self._nonfinite)), denominators(batch).sequences)
        if bad == 0:
            return 0
        text = f"{self._spec.role}: {bad:g} of the {rows:g} rows of a mini-batch have a loss token"
        text += " for which the model gives -inf or NaN"
        if bad == rows or bad > max(1.0, MAX_NONFINITE_SHARE * rows):
            raise FloatingPointError(
                f"{text}, more than a share of {MAX_NONFINITE_SHARE:g}. The weights have diverged, or the model can't "
                "produce what was sampled: look at grad_norm and mismatch/kl of the steps before, lower learning_rate, "
                "and go on from an earlier checkpoint"
            )
        logger.warning("%s; they leave this optimizer step", text)
        return int(bad)

    @property
    def _metrics_of(self) -> str:
        return "critic" if self._spec.kind == "value" else "actor"

    def _computed_rows(self, batch: TokenBatch, loss_fn: LossFn) -> tuple[TokenBatch, Denominators]:
        """Return (this rank's rows that the step must run, sizes of the whole mini-batch with all its rows)."""
        self._nonfinite = set()
        mine = denominators(batch)
        batch = batch.select(rows_to_compute(batch, loss_fn))
        mine = replace(mine, computed_tokens=denominators(batch).tokens)
        return batch, Denominators(*self._sums(*astuple(mine)))

    def _spread(
        self,
        micro: TokenBatch,
        layout: MicroLayout,
        scored: HeadOutputs,
        outputs: Sequence[Output],
        positions: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> TokenOutputs:
        """Return `outputs` as columns of a micro-batch, 0 where no token is scored.

        Where the ranks of `group` share its rows, `place` says which of the layout's scored tokens `scored` is about.
        """
        columns = {}
        for output in outputs:
            for name in TOP_K_COLUMNS if isinstance(output, TopK) else (output,):
                value = getattr(scored, name)
                assert value is not None, f"a {self._spec.kind} model gives no {name}"
                if positions is not None:
                    value = join_shards(value, positions, len(layout.targets), group)
                if layout.copies is not None:
                    value = value[layout.copies]
                blank = value.new_zeros(micro.num_tokens, *value.shape[1:])
                columns[name] = blank.index_put((layout.flat,), value)
        return TokenOutputs(row_ids=micro.row_ids, offsets=micro.offsets, **columns)

    def _loss_of(
        self, outputs: TokenOutputs, micro: TokenBatch, loss_fn: LossFn, totals: Denominators, *, is_padding: bool
    ) -> tuple[Tensor, Metrics]:
        """Return (this rank's share of the loss, its metrics) of one micro-batch.

        A padding row gives 0 that depends on every output: its backward pass takes part in collectives. A row without a
        finite output gives NaN: no rank takes a step then, and `train_step` leaves the row out.
        """
        nonfinite = set() if is_padding else nonfinite_rows(outputs, micro)
        self._nonfinite |= nonfinite
        if is_padding or nonfinite:
            factor = math.nan if nonfinite else 0.0
            return torch.stack([column.sum() for column in outputs.columns().values()]).sum() * factor, Metrics()
        terms = loss_fn.compute(outputs, micro.to(self._device), totals)
        return terms.loss, terms.metrics

    def _learning_rate(self) -> float:
        """Return that of the coming optimizer step."""
        return self._trained.training_args.learning_rate * self._lr_factor(self._steps)

    def _weight_decay(self) -> float:
        """Return that of the coming optimizer step."""
        return self._weight_decay_at(self._steps)

    def _record_step(self, metrics: Metrics, norm: float, lr: float, *, finite: bool) -> None:
        """Count a step that was taken (`finite`) or skipped, and report it on rank 0.

        Raises `FloatingPointError` if too many steps in a row had to be skipped.
        """
        if finite:
            self._steps += 1
            self._updates += 1
        else:
            logger.warning("%s: gradient norm is %s; this optimizer step is skipped", self._spec.role, norm)
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped >= MAX_CONSECUTIVE_SKIPS:
            raise FloatingPointError(
                f"{self._spec.role}: the gradient was not finite in {self._skipped} optimizer steps in a row, after "
                f"{self._steps} good ones. The weights or the loss have diverged: lower learning_rate, clip with "
                "max_grad_norm, and go on from an earlier checkpoint"
            )
        if self._info.rank == 0:
            role = self._metrics_of
            if finite:
                metrics.add_mean(f"{role}/grad_norm", norm)
            metrics.add_mean(f"{role}/lr", lr)
            metrics.add_sum(f"{role}/optimizer_steps", float(finite))
            metrics.add_sum(f"{role}/skipped_steps", float(not finite))

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

    def _asleep(self, *parts: StatePart) -> list[StatePart]:
        """Return those of `parts` that nobody may read now."""
        return [part for part in parts if self._shelves[part]]

    def _require_awake(self, *parts: StatePart) -> None:
        """Raise `RuntimeError` while one of these parts sleeps."""
        asleep = self._asleep(*parts)
        if asleep:
            raise RuntimeError(f"{self._spec.role} sleeps without its {' and '.join(asleep)}: call wake first")

    # --- exports ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _hf_model(self) -> Any:
        """Return the role's model as transformers has it, to say how its folder looks; its weights aren't read."""

    def _exported_model(self) -> Any:
        """Return `_hf_model` with all that ends a response in its generation settings: what was taught as an end ends
        responses wherever the folder is loaded."""
        model = self._hf_model()
        if self._spec.kind == "policy" and model.can_generate():
            settings = model.generation_config
            ends = response_ends(self._tokenizer, settings.eos_token_id, self._spec.templates)
            settings.eos_token_id = with_ends(settings.eos_token_id, ends)
        return model

    def export(self, path: Path, files: StateFiles | None = None) -> None:
        assert self._spec.kind != "value", "a critic has no Hugging Face form"
        files = files or StateFiles()
        weights = {}
        for name, tensor in self.named_weights():
            if self._info.rank == 0:
                weights[name] = tensor.detach().to("cpu", copy=files.holds).contiguous()
        if self._info.rank == 0:
            files.folder(path, partial(self._write_hf_model, weights))

    def _write_hf_model(self, weights: dict[str, Tensor], path: Path) -> None:
        with quiet_transformers():
            self._exported_model().save_pretrained(path, state_dict=weights)
        self._tokenizer.save_pretrained(path)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _write_beside(self, path: Path, contents: Sequence[CheckpointContent], files: StateFiles, counts: str) -> None:
        """Write what isn't tensors, on rank 0: `counts` is the file for how far the schedule and the optimizer are.

        With a description of the model, a checkpoint can be exported without the run's configuration and its model.
        """
        if self._info.rank == 0:
            files.text(path / counts, self._counts(contents))
            files.folder(path / DESCRIPTION, self._describe)

    def _describe(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        args, model = self._spec.worker.model_args, self._exported_model()
        with quiet_transformers():
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
        about = {"kind": self._spec.kind, "base_model": args.model_name_or_path, "lora": args.uses_lora}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")

    def _counts(self, contents: Sequence[CheckpointContent]) -> str:
        """Return the text of the small file beside the tensors: how far the schedule and the optimizer are."""
        counts = {"optimizer_steps": self._steps if "extra" in contents else 0, "updates": self._updates}
        return json.dumps(counts if "optimizer" in contents else {**counts, "updates": 0})

    def _take_counts(self, text: str, contents: Sequence[CheckpointContent]) -> None:
        counts = json.loads(text)
        self._steps = counts["optimizer_steps"] if "extra" in contents else 0
        self._updates = counts.get("updates", counts["optimizer_steps"]) if "optimizer" in contents else 0


DESCRIPTION, ABOUT = "hf_config", "roll_model.json"
"""Folder beside a role's states: configuration and tokenizer as transformers has them, and a file of our own."""


def head_request(outputs: Sequence[Output]) -> HeadRequest:
    """Return what the head must compute for these outputs."""
    top_k = next((output.k for output in outputs if isinstance(output, TopK)), 0)
    names = ("entropy", "correct", "logit_gradients")
    return HeadRequest(**{name: name in outputs for name in names}, top_k=top_k)


def blank_outputs(batch: TokenBatch, outputs: Sequence[Output]) -> TokenOutputs:
    """Return zeros for each output, in its shape and type."""
    columns = {}
    for output in outputs:
        if isinstance(output, TopK):
            columns["top_logprobs"] = torch.zeros(batch.num_tokens, output.k)
            columns["top_ids"] = torch.zeros(batch.num_tokens, output.k, dtype=torch.int64)
        else:
            like = batch.require("teacher_ids") if output == "student_logprobs" else batch.token_ids
            columns[output] = torch.zeros(like.shape)
    return TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, **columns)
