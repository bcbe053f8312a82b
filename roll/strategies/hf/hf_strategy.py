"""Training a Hugging Face module: everything that FSDP2 and DeepSpeed do alike.

A backend wraps the module (sharding, engine) and says how gradients are computed and applied; the rest is here.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from roll.distributed.weights import WeightPart
from roll.distributed.worker import WorkerInfo
from roll.strategies.base import LossFn, NamedWeights, Output, TrainSpec
from roll.strategies.hf.gather import Travelling, sent_types
from roll.strategies.hf.hf_build import RoleModule, build_module, hf_module, reads_beside
from roll.strategies.hf.hf_expert_replay import NO_ROUTERS, HfExpertReplay
from roll.strategies.hf.hf_packing import SequenceGroup
from roll.strategies.hf.lora import Adapters
from roll.strategies.hf.streamed import StreamedWeights
from roll.strategies.state_files import StateFiles
from roll.strategies.training.activation_offload import ActivationOffload
from roll.strategies.training.common import CommonStrategy
from roll.strategies.training.logits import HeadOutputs, blank_outputs, head_request, token_outputs
from roll.strategies.training.micro import padding_row
from roll.strategies.training.model_folder import ModelFolder
from roll.strategies.training.pretrained import named_tensors
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.metrics import Metrics


class HfTrainStrategy(CommonStrategy):
    """A policy or value model on this rank, wrapped by the backend."""

    sends_from_every_rank = True
    _in_pass = False
    """Whether passes are under way, or an exception has ended them."""

    def __init__(self, spec: TrainSpec, info: WorkerInfo) -> None:
        super().__init__(spec, info)
        self._connect()
        self._sequence: SequenceGroup | None = None  # the ranks that share this rank's rows
        args = spec.worker.model_args
        if args.sequence_ranks > 1:
            self._sequence = SequenceGroup.join(info, args.ulysses_size, args.ring_attention_size, self._device)
            self._share_rows(self._sequence.layout, self._sequence.peers)
        weights = StreamedWeights.open(spec, self._stored) if self._streams else None
        self._model: RoleModule
        self._model, self._micros.shares_prefixes = build_module(
            spec, self._stored, self._computed, self._loaded_on, self._sequence, weights
        )
        self._micros.beside = reads_beside(self._model, spec, info.world_size, shares_rows=self._sequence is not None)
        self._adapters = Adapters(hf_module(self._model), args) if args.uses_lora else None
        self._module: nn.Module = self._wrap(self._model, weights)
        """What is called: the model itself or the backend's wrapper of it."""
        offloads = args.activation_offload and spec.trains
        self._activations = ActivationOffload(self._device) if offloads else None
        self._replay = HfExpertReplay.of(self._model)
        model = partial(hf_module, self._model)
        self._folder = ModelFolder(spec, self._tokenizer, model, self._adapters, writes=info.rank == 0)

    # --- what a backend fills in -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Join the process groups that the backend needs."""

    @property
    @abstractmethod
    def _computed(self) -> torch.dtype:
        """Return the type of the forward pass."""

    @property
    def _stored(self) -> torch.dtype:
        """Return the type that weights are loaded in: trained ones are kept in float32, which adapters are anyway."""
        trained = self._spec.trains and not self._spec.worker.model_args.uses_lora
        return torch.float32 if trained else self._computed

    @property
    def _loaded_on(self) -> torch.device:
        """Return where the whole module is put before `_wrap`."""
        return self._device

    @property
    def _streams(self) -> bool:
        """Return whether `_wrap` shards an empty module and fills it."""
        return False

    @abstractmethod
    def _wrap(self, model: RoleModule, weights: StreamedWeights | None) -> nn.Module:
        """Return shard the module, fill it with `weights` if there are any, build the optimizer."""

    @abstractmethod
    def _zero_grad(self) -> None:
        """Forget the gradients of the last step."""

    def _abandon(self) -> None:
        """Forget passes that an exception has ended: their gradients, wherever the backend has them, and how far they
        were. Without collectives: other ranks may not have come as far."""
        if self._spec.trains:
            self._zero_grad()

    def _settle(self) -> None:
        """Make the parameters of the module those that are trained; whoever reads them calls this first.

        A pass without gradients may leave copies in their place, in the type that computes and freed at any moment.
        """
        if self._in_pass:
            self._abandon()
            self._in_pass = False

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """Hold the state of passes, so that the next ones find nothing of those that an exception ends."""
        if self._in_pass:
            self._abandon()
        self._in_pass = True
        yield
        self._in_pass = False

    @abstractmethod
    def _accumulate(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients. `loss` is this rank's share: gradients are summed over ranks, not averaged.
        `last`: no more micro-batches come before the optimizer step."""

    @abstractmethod
    def _apply(self, lr: float) -> tuple[float, bool]:
        """Clip and take the optimizer step unless the gradient isn't finite: (norm before clipping, taken)."""

    @abstractmethod
    def _full(self, tensor: Tensor) -> Tensor:
        """Return the whole of a sharded tensor; every rank calls it for the same tensors in the same order."""

    @abstractmethod
    def _gathered(self, stream: Iterable[Travelling]) -> NamedWeights:
        """Return whole tensors, as `roll.strategies.hf.gather.Gather`."""

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return what goes around forward passes, where the wrapper itself doesn't cast."""
        return contextlib.nullcontext()

    # --- computing -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: TokenBatch, outputs: Sequence[Output], *, adapters: bool = True) -> TokenOutputs:
        self._shelves.require_awake("parameters")
        assert adapters or self._adapters is not None, f"{self._spec.role} has no adapters to leave out"
        scored = []
        off = contextlib.nullcontext() if adapters or self._adapters is None else self._adapters.off()
        with off, self._passes():
            parts, shared = self._micros.parts(batch, training=False)
            for rows in parts:
                micro = batch.select(rows) if rows else padding_row(batch)
                rounding = self._spec.worker.sequence_length_round_in_infer
                result = self._score(micro, outputs, rounding, shared=shared)
                if rows:
                    scored.append(result.to("cpu"))
        return TokenOutputs.concat(scored).reorder(batch.row_ids) if scored else blank_outputs(batch, outputs)

    def _attempt(self, batch: TokenBatch, loss_fn: LossFn, lr: float) -> tuple[Metrics, float, bool]:
        batch, totals = self._losses.begin(batch, loss_fn)
        metrics = Metrics()
        self._micros.shared_tokens = 0
        rounding = self._spec.training.sequence_length_round_in_train
        parts, shared = self._micros.parts(batch, training=True)
        with self._passes():
            self._zero_grad()
            with self._dropout():
                for i, rows in enumerate(parts):
                    micro = batch.select(rows) if rows else padding_row(batch)
                    outputs = self._score(micro, loss_fn.needs, rounding, shared=shared)
                    loss, loss_metrics = self._losses.of(outputs, micro, loss_fn, totals, is_padding=not rows)
                    metrics.merge(loss_metrics)
                    self._accumulate(loss, last=i == len(parts) - 1)
            if shared:
                shared_tokens = float(self._micros.shared_tokens)
                metrics.add_sum(f"{self._spec.metric_prefix}/shared_tokens", shared_tokens)
            return metrics, *self._apply(lr)

    def _dropout(self) -> contextlib.AbstractContextManager[None]:
        """Return what goes around the passes of an optimizer step: a base model never drops anything, adapters may."""
        if self._adapters is None:
            return contextlib.nullcontext()
        spec = self._spec
        return self._adapters.dropout(
            self._device, spec.seed, "dropout", spec.role, self._progress.steps, self._info.rank
        )

    def _score(
        self, micro: TokenBatch, outputs: Sequence[Output], multiple: int, *, shared: bool = False
    ) -> TokenOutputs:
        sequence = self._sequence
        packed = self._spec.worker.use_sequence_packing or sequence is not None
        multiple = math.lcm(multiple, 1 if sequence is None else sequence.multiple)
        layout = self._micros.laid_out(micro, outputs, packed=packed, multiple=multiple, shared=shared)
        mine, positions, group = layout, None, None
        if sequence is not None:
            group = sequence.group
            mine, positions = sequence.shard(layout)
        if self._replay is not None:
            self._replay.tell(mine.experts)
        elif mine.experts is not None:
            raise ValueError(NO_ROUTERS)
        saving = contextlib.nullcontext() if self._activations is None else self._activations.saving()
        with self._autocast(), saving:
            scored: HeadOutputs = self._module(mine, head_request(outputs))
        return token_outputs(self._spec.kind, micro, layout, scored, outputs, positions, group)

    # --- weights ---------------------------------------------------------------------------------------------------

    def named_weights(self, part: WeightPart = "merged", dtype: torch.dtype | None = None) -> NamedWeights:
        """Yield full tensors; every rank must walk it to the end: gathering a sharded tensor is a collective."""
        self._shelves.require_awake("parameters")
        self._settle()
        model = hf_module(self._model)
        if self._adapters is not None:
            yield from self._adapters.weights(model, self._gathered, part, dtype)
            return
        assert part == "merged", f"{self._spec.role} has no adapters"
        sent = sent_types(model, dtype)
        yield from self._gathered((name, tensor, sent(name, tensor)) for name, tensor in named_tensors(model))

    def resident_weights(self, dtype: torch.dtype | None = None) -> Iterable[Tensor]:
        if self._info.world_size > 1 or self._device.type != "cpu" or self._adapters is not None:
            return ()
        model = hf_module(self._model)
        sent = sent_types(model, dtype)
        named = ((name, tensor) for name, tensor in named_tensors(model) if isinstance(tensor, nn.Parameter))
        return [tensor for name, tensor in named if sent(name, tensor) in (None, tensor.dtype)]

    def export(self, path: Path, files: StateFiles | None = None) -> None:
        super().export(path, files)
        if self._adapters is not None and self._spec.kind == "policy":  # a score needs its head, too
            folder, files = path / "adapter", files or StateFiles()
            self._settle()
            self._adapters.export(folder, self._full, writes=self._info.rank == 0, files=files)
