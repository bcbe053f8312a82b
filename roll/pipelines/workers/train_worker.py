"""Workers around a training strategy: the actor, the critic, and the frozen reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from torch import Tensor

from roll.checkpoint.background import write_part
from roll.checkpoint.files import FileRecord, hash_files
from roll.configs.schema.checkpoint_config import STATE_CONTENTS, CheckpointContent
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import ForwardConfig, ModelArgs
from roll.data.templates import chat_templates_of
from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.layout import RankLayout
from roll.distributed.transports import Sent, Transport, send
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.transports.shm_places import share
from roll.distributed.worker import Worker, WorkerInfo
from roll.pipelines.workers.worker_losses import objective, with_mismatch_metrics
from roll.strategies import build_train_strategy
from roll.strategies.abilities import (
    CastsWeights,
    GathersOnHost,
    LendsWeights,
    ResidentWeights,
    SavesContents,
    SavesToFiles,
    SendsFromEveryRank,
    Sleeps,
)
from roll.strategies.base import ForwardStrategy, Output, StatePart, TrainSpec, TrainStrategy
from roll.strategies.state_files import HeldFiles, WrittenFiles
from roll.strategies.training.pretrained import DTYPES
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.metrics import Metrics

Records: TypeAlias = dict[str, FileRecord]
"""Of files, by path relative to the folder of a checkpoint."""


def _records(root: Path, files: WrittenFiles) -> Records:
    return hash_files(root, [path.relative_to(root).as_posix() for path in files.paths], flush=True)


def resolved_model_args(config: RunConfig, role: str) -> ModelArgs:
    """Return a role's `model_args` with what the role itself may leave to others: model, tokenizer, libraries."""
    args = config.sections[role].model_args
    return replace(
        args,
        model_name_or_path=config.model_path(role),
        tokenizer_name_or_path=config.tokenizer_path(role),
        external_lib=tuple(dict.fromkeys((*config.external_lib, *args.external_lib))),
    )


def train_spec(
    config: RunConfig,
    role: str,
    *,
    kind: Literal["policy", "value", "reward"],
    trains: bool,
    total_optimizer_steps: int,
) -> TrainSpec:
    """Return what a backend is told about a role: its section with the model filled in, and the run's constants."""
    worker = config.sections[role]
    assert isinstance(worker, ForwardConfig), f"{role} has no forward passes of its own"
    return TrainSpec(
        role=role,
        kind=kind,
        worker=replace(worker, model_args=resolved_model_args(config, role)),
        seed=config.seed,
        temperature=config.temperature,
        trains=trains,
        total_optimizer_steps=total_optimizer_steps,
        max_grad_norm=config.max_grad_norm or 0.0,
        max_sequence_length=config.max_sequence_length,
        templates=chat_templates_of(config.prompt_templates),
        l2=config.l2_coef if role == "actor_train" else 0.0,
    )


class ForwardWorker(Worker):
    """Scores finished responses; the reference policy is one."""

    def __init__(self, info: WorkerInfo, config: RunConfig, spec: TrainSpec) -> None:
        super().__init__(info)
        self.config = config
        self.strategy: ForwardStrategy = build_train_strategy(spec, info)

    def close(self) -> None:
        self.strategy.close()

    @dispatch(Dispatch.ONE_TO_ALL)
    def layout(self) -> RankLayout:
        return self.strategy.layout

    @dispatch(Dispatch.SPLIT_BY_DP)
    def forward(self, batch: TokenBatch, outputs: Sequence[Output], adapters: bool = True) -> TokenOutputs:
        """Return log-probs, entropy or values under the current weights, or under those of the base model."""
        return self.strategy.forward(batch, outputs, adapters=adapters)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sleep(self, parts: Sequence[StatePart]) -> int:
        """Give the memory of these parts back; bytes freed."""
        return self.strategy.sleep(parts) if isinstance(self.strategy, Sleeps) else 0

    @dispatch(Dispatch.ONE_TO_ALL)
    def wake(self, parts: Sequence[StatePart]) -> None:
        """Bring these parts back."""
        if isinstance(self.strategy, Sleeps):
            self.strategy.wake(parts)


class TrainWorker(ForwardWorker):
    """Trains on mini-batches and owns a part of every checkpoint."""

    strategy: TrainStrategy

    def __init__(self, info: WorkerInfo, config: RunConfig, spec: TrainSpec) -> None:
        super().__init__(info, config, spec)
        self._loss = objective(config, spec.kind)
        self._ahead = isinstance(config, RLConfig) and config.async_generation_ratio > 0
        self._shared = False  # whether weights were moved to where engines can read them
        self._sent = WeightCopy()

    @dispatch(Dispatch.SPLIT_BY_DP)
    def train_step(self, batch: TokenBatch, pre_update_version: int | None = None) -> Metrics:
        """Take one optimizer step over a mini-batch.

        `pre_update_version`: version of the weights as long as nothing of the batch has been trained on, for the
        mismatch between sampler and trainer. None: it isn't measured.
        """
        loss = self._loss
        if pre_update_version is not None:
            loss = with_mismatch_metrics(loss, pre_update_version, mixed_versions=self._ahead)
        return self.strategy.train_step(batch, loss)

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_weights(self, transport: Transport, delta: Delta | None = None) -> Sent:
        """Send the current weights on their way, or this rank's share of them."""
        transfer = transport.transfer
        weights = partial(self.strategy.named_weights, transfer.part)
        dtype = DTYPES[transfer.dtype] if transfer.dtype else None
        if dtype is not None and isinstance(self.strategy, CastsWeights):
            weights = partial(self.strategy.named_weights, transfer.part, dtype=dtype)
        if transport.reads_in_place and not self._shared:
            self._shared = True
            share(self.strategy.resident_weights(dtype) if isinstance(self.strategy, ResidentWeights) else ())
        return send(transport, weights, self.info.rank, delta=delta, copy=self._sent)

    @dispatch(Dispatch.ONE_TO_ALL)
    def lend_weights(self, dtype: str) -> Mapping[str, Tensor]:
        """Return tensors that an engine of this process may compute with, by their names, see `LendsWeights`."""
        if not isinstance(self.strategy, LendsWeights):
            return {}
        return self.strategy.lend_weights(DTYPES[dtype] if dtype else None)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sends_from_every_rank(self) -> bool:
        """Return whether each rank has all whole tensors when it goes through the weights."""
        return isinstance(self.strategy, SendsFromEveryRank)

    @dispatch(Dispatch.ONE_TO_ALL)
    def gathers_on_host(self) -> bool:
        """Return whether whole tensors are put together in memory of the host, whatever computes."""
        return isinstance(self.strategy, GathersOnHost)

    @dispatch(Dispatch.ONE_TO_ALL)
    def weight_copy(self) -> str:
        """Return the name of the weights that this rank has a copy of, as it sent them; empty: of none."""
        return self._sent.name

    @dispatch(Dispatch.ONE_TO_ALL)
    def save(self, folder: str, contents: Sequence[CheckpointContent] = STATE_CONTENTS) -> Records:
        """Write this rank's part of a checkpoint; returns size and hash of its files, by path below `folder`'s parent.

        Hashed here, where they were written and every rank has its own share, and not by the controller, for which all
        ranks would wait. A backend of the user's own that isn't told where to write returns none.
        """
        if isinstance(self.strategy, SavesToFiles):
            files = WrittenFiles()
            self.strategy.save(Path(folder), contents=contents, files=files)
            return _records(Path(folder).parent, files)
        if tuple(contents) == STATE_CONTENTS:
            self.strategy.save(Path(folder))
        elif isinstance(self.strategy, SavesContents):
            self.strategy.save(Path(folder), contents=contents)
        else:
            raise self._lacks("contents", "checkpoint_config.save_contents")
        return {}

    @dispatch(Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: str, contents: Sequence[CheckpointContent], exports: bool) -> str:
        """Copy this rank's part of the checkpoint in `folder` into memory; a thread writes it from there.

        Returns the name of the part, by which `BackgroundSave` waits for it.
        """
        if not isinstance(self.strategy, SavesToFiles):
            raise self._lacks("files", "checkpoint_config.async_save")
        files, role = HeldFiles(), self.info.role
        if contents:
            self.strategy.save(Path(folder, role), contents=contents, files=files)
        if exports:
            self.strategy.export(Path(folder, "hf_model"), files=files)
        name = f"{role} rank {self.info.rank}"
        write_part(Path(folder), name, files.write)
        return name

    @dispatch(Dispatch.ONE_TO_ALL)
    def load(self, folder: str, contents: Sequence[CheckpointContent] = STATE_CONTENTS) -> None:
        """Read these of what `save` wrote."""
        if tuple(contents) == STATE_CONTENTS:
            self.strategy.load(Path(folder))
        elif isinstance(self.strategy, SavesContents):
            self.strategy.load(Path(folder), contents=contents)
        else:
            raise self._lacks("contents", "checkpoint_config.load_contents")

    @dispatch(Dispatch.ONE_TO_ALL)
    def export(self, folder: str) -> dict[str, int]:
        """Write a Hugging Face folder; returns the size of each file that this rank has written there, by its name.

        A backend of the user's own that isn't told where to write returns none.
        """
        files = self._exported(folder)
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files.paths}

    @dispatch(Dispatch.ONE_TO_ALL)
    def export_recorded(self, folder: str) -> Records:
        """Do `export`, as a part of a checkpoint; returns what `save` does."""
        return _records(Path(folder).parent, self._exported(folder))

    def _exported(self, folder: str) -> WrittenFiles:
        files = WrittenFiles()
        if isinstance(self.strategy, SavesToFiles):
            self.strategy.export(Path(folder), files=files)
        else:
            self.strategy.export(Path(folder))
        return files

    def _lacks(self, argument: str, key: str) -> ValueError:
        """Return what says that a backend of the user's own can't do what a key asks for."""
        name = type(self.strategy).__name__
        return ValueError(f"{key}: save and load of {name} take no {argument!r}; add it, or remove the key")
