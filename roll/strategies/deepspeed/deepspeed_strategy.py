"""`deepspeed_train` and `deepspeed_infer`: DeepSpeed's ZeRO around the Hugging Face module, one process upwards.

Stage 0 replicates float32 weights and computes `dtype: bf16` under autocast. Stages 1 to 3 compute in that type and
shard the float32 weights and the optimizer's states (1), gradients (2), the weights that compute (3). A role that
doesn't train has something to shard at stage 3 only; below it runs the plain module.
"""

from __future__ import annotations

import contextlib
import io
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roll.configs.schema.checkpoint_config import STATE_CONTENTS, CheckpointContent
from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.strategies.base import STATE_PARTS, NamedWeights, StatePart
from roll.strategies.deepspeed.build_lock import reported_locks
from roll.strategies.deepspeed.deepspeed_engine import Engine, HookableModule, adamw, connect, engine_json
from roll.strategies.deepspeed.deepspeed_files import COUNTS, DeepSpeedCheckpoint, write
from roll.strategies.deepspeed.deepspeed_start import exact_weights, fill_exact, fill_shares, make_room, shard_weights
from roll.strategies.deepspeed.state import (
    Anchor,
    full_tensor,
    gathered,
    link_moments,
    make_moments,
    moves_states,
    offload,
    publish,
    set_whole,
)
from roll.strategies.deepspeed.windows import abandon, finish_gathers, forget_gradients
from roll.strategies.hf.gather import Travelling
from roll.strategies.hf.hf_build import RoleModule, hf_module
from roll.strategies.hf.hf_strategy import HfTrainStrategy
from roll.strategies.hf.streamed import StreamedWeights
from roll.strategies.state_files import StateFiles
from roll.strategies.training.optim import MOMENTS, decaying, set_rates
from roll.strategies.training.pretrained import DTYPES, named_tensors


class DeepSpeedStrategy(HfTrainStrategy):
    """See the module docstring; `spec.trains` decides whether there is an optimizer."""

    _engine: Any = None
    _anchor: Anchor | None = None

    @property
    def _options(self) -> DeepSpeedConfig:
        options = self._spec.worker.strategy_args.strategy_config
        assert isinstance(options, DeepSpeedConfig)
        return options

    @property
    def _computed(self) -> torch.dtype:
        return DTYPES[self._spec.worker.model_args.dtype]

    @property
    def _loaded_on(self) -> torch.device:
        # ZeRO 3 brings its parts to the device one by one.
        return torch.device("cpu") if self._options.stage == 3 else self._device

    @property
    def _streams(self) -> bool:
        return self._options.fills_shares

    def _connect(self) -> None:
        with reported_locks(self._info.role):
            connect(self._info, self._device, self._backend)

    def _wrap(self, model: RoleModule, weights: StreamedWeights | None) -> nn.Module:
        with reported_locks(self._info.role):
            return self._opened(model, weights)

    def _opened(self, model: RoleModule, weights: StreamedWeights | None) -> nn.Module:
        self._offloaded: set[StatePart] = set()
        options = self._options
        if weights is not None:
            make_room(model, weights, self._computed if options.stage else self._stored, self._loaded_on)
            if options.stage < 3:
                weights.fill(hf_module(model))
        if not self._spec.trains and options.stage < 3:
            return model
        import deepspeed

        opened = HookableModule(model)
        made = engine_json(self._spec, options, self._device)
        empty = [] if weights is None else [tensor for _, tensor in weights.waiting(hf_module(model))]
        rounded = self._rounded(model, empty) if self._spec.trains and options.stage else {}
        optimizer = None
        if self._spec.trains:  # before the shapes are gone, which decide what decays
            optimizer = adamw(model, self._spec.training.training_args, options, self._device)
            self._decays = decaying(optimizer.param_groups)
        if options.stage == 3:
            shard_weights(opened, made, self._computed, self._device, empty)
            if weights is not None:
                fill_shares(model, weights)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does; its logger isn't affected
            self._engine, *_ = deepspeed.initialize(model=opened, optimizer=optimizer, config=made)
        # Hooks on gradients hold weights and process groups in circles that Python can't collect.
        weakref.finalize(self, self._engine.destroy).atexit = False
        if options.stage == 3:
            opened.hold_head()
        for parameter, value in rounded.items():
            set_whole(self._engine, parameter, value)
        if weights is not None and self._spec.trains and options.stage:
            fill_exact(model, weights, self._computed)
        if self._spec.trains and self._spec.l2 > 0:
            self._anchor = Anchor(self._engine, self._spec.l2)
        return Engine(self._engine)

    def _rounded(self, model: RoleModule, empty: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return `exact_weights` of what no file is read for."""
        waiting = set(map(id, empty))
        return exact_weights([p for p in model.parameters() if id(p) not in waiting], self._computed)

    # --- optimizer steps -------------------------------------------------------------------------------------------

    def _zero_grad(self) -> None:
        if self._options.stage == 0:
            self._engine.zero_grad()
        else:
            forget_gradients(self._engine)

    def _abandon(self) -> None:
        if self._spec.trains:
            abandon(self._engine)

    def _settle(self) -> None:
        super()._settle()
        finish_gathers(self._engine)

    def _accumulate(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; the loss is already divided by global sizes and wants their sum.
        self._engine.backward(loss * self._info.world_size, scale_wrt_gas=False)

    def _apply(self, lr: float) -> tuple[float, bool]:
        if self._anchor is not None:
            self._anchor.pull()
        set_rates(self._engine.optimizer.param_groups, self._decays, lr, self._progress.weight_decay())
        if self._options.stage == 0:
            return self._apply_replicated()
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())

    def _apply_replicated(self) -> tuple[float, bool]:
        """Take a step; without ZeRO the engine would take it with a gradient that isn't finite."""
        limit = self._spec.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self._engine.module.parameters(), limit if limit > 0 else float("inf"))
        finite = bool(torch.isfinite(norm))
        if finite:
            self._engine.step()
        return float(norm), finite

    # --- weights ---------------------------------------------------------------------------------------------------

    def _gathered(self, stream: Iterable[Travelling]) -> NamedWeights:
        return gathered(self._engine, stream)

    def _full(self, tensor: Tensor) -> Tensor:
        return full_tensor(self._engine, tensor)

    def _kept(self) -> list[tuple[str, Tensor]]:
        """Return what a checkpoint holds: of a model with adapters, those alone."""
        named = list(named_tensors(self._model))
        return [(n, t) for n, t in named if self._adapters is None or self._adapters.keeps(n)]

    def _checkpoint(self, *, moments: bool) -> Iterator[tuple[str, Tensor]]:
        if moments:
            link_moments(self._engine)
        for name, tensor in self._kept():
            yield name, full_tensor(self._engine, tensor)
            if moments and tensor.requires_grad:
                for moment in MOMENTS:
                    yield f"{moment}:{name}", full_tensor(self._engine, tensor, moment)

    def save(
        self, path: Path, contents: Sequence[CheckpointContent] = STATE_CONTENTS, files: StateFiles | None = None
    ) -> None:
        """Save whole tensors in files that any stage and number of ranks can read; each rank writes a part of them."""
        self._settle()
        files, rank, ranks = files or StateFiles(), self._info.rank, self._info.world_size
        moments = self._spec.trains and "optimizer" in contents and self._progress.updates > 0
        write(path, self._checkpoint(moments=moments), files, rank=rank, ranks=ranks)
        self._folder.write_beside(path, COUNTS, self._progress.text(contents), files)

    def load(self, path: Path, contents: Sequence[CheckpointContent] = STATE_CONTENTS) -> None:
        """Read what `save` wrote; without an optimizer only the weights. Raises `ValueError` if it doesn't fit."""
        self._settle()
        if self._adapters is not None:
            self._adapters.check_identity(path)
        written, saved = DeepSpeedCheckpoint(path, self._spec.role), self._kept()
        # ZeRO 3 remembers the shape of the whole tensor beside its part.
        written.check({name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in saved})
        if self._spec.trains:
            self._progress.restore(written.counts, contents)
            make_moments(self._engine, self._progress.updates)
        for name, tensor in saved:
            set_whole(self._engine, tensor, written.read(name))
            if self._spec.trains and tensor.requires_grad and self._progress.updates:
                for moment in MOMENTS:
                    set_whole(self._engine, tensor, written.read(f"{moment}:{name}"), moment)
        if self._spec.trains:
            publish(self._engine)

    # --- memory ----------------------------------------------------------------------------------------------------

    def sleep(self, parts: Sequence[StatePart] = STATE_PARTS) -> int:
        """Sleep; nothing is freed where the device is the host."""
        if not moves_states(self._engine):
            return super().sleep(parts)
        before = self._allocated()
        self._offloaded.update(parts)
        offload(self._engine, self._offloaded, self._device)
        return max(0, before - self._allocated())

    def wake(self, parts: Sequence[StatePart] = STATE_PARTS) -> None:
        super().wake(parts)
        if self._offloaded & set(parts):
            self._engine.reload_states()
            self._offloaded.difference_update(parts)
            if self._offloaded:  # DeepSpeed brings back all that sleeps
                offload(self._engine, self._offloaded, self._device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _resident(self, part: StatePart) -> Iterator[Tensor]:
        """Yield tensors of a replicated module and its optimizer; ZeRO's are DeepSpeed's business."""
        optimizer = None if self._engine is None else self._engine.optimizer
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            return
        if part == "parameters":
            yield from self._model.parameters()
            yield from self._model.buffers()
        elif optimizer is not None:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
