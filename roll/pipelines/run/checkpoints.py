"""What a checkpoint of a run holds: every training role's state, and the pipeline's own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.checkpoint.background import STALLED_SECONDS, BackgroundSave
from roll.checkpoint.best import LINK, Best, best_of, link_best
from roll.checkpoint.files import (
    Checkpoint,
    CheckpointError,
    CheckpointWriteError,
    read_json,
    read_manifest,
    write_json,
)
from roll.checkpoint.model_export import set_aside
from roll.checkpoint.remote_store import RemoteCheckpoints, RemoteError, download
from roll.checkpoint.store import CheckpointStore
from roll.configs.catalog.validation_metrics import best_by
from roll.configs.schema.checkpoint_config import STATE_CONTENTS, CheckpointContent, is_address
from roll.configs.schema.run_config import RunConfig
from roll.pipelines.run.actor_export import export_actor
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.run.run_dtype import dtypes_of
from roll.pipelines.workers.train_worker import Records, TrainWorker

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores a run through its clusters."""

    def __init__(self, config: RunConfig, clusters: Clusters) -> None:
        self._config = config
        self._offloader = clusters.offloader
        self._trained = {"actor_train": clusters.actor_train}
        if clusters.critic is not None:
            self._trained["critic"] = clusters.critic
        self._store = CheckpointStore(config.checkpoint_path.absolute(), config.checkpoint_config.max_to_keep)
        self._starts_fresh = False
        address = config.checkpoint_config.address
        self._remote = None
        if address is not None and not config.only_validates:
            keep = config.checkpoint_config.max_to_keep
            self._remote = RemoteCheckpoints(address, keep, seconds=config.rpc_timeout)
        self._not_uploaded: Checkpoint | None = None
        self._to_delete: Checkpoint | None = None
        self._downloaded: Checkpoint | None = None
        self._on_its_way: BackgroundSave | None = None
        self._best_to_upload: Checkpoint | None = None
        self.best = BestCheckpoint(config.save_best)
        """What validations are compared with; every checkpoint says which one is the best so far."""
        self.loaded = False
        """Whether the roles that train have weights of a checkpoint."""

    def save(
        self, step: int, state: Callable[[Path], dict[str, Any]], contents: Sequence[CheckpointContent] | None = None
    ) -> None:
        """Write the checkpoint of a finished step; a kill leaves it whole or not there at all.

        `state` gives the pipeline's own state, JSON-able, and may write files into the folder that it gets.
        `contents`: instead of `checkpoint_config.save_contents`.
        """
        if self._starts_fresh and (aside := self._store.set_aside()) is not None:
            logger.warning("checkpoints of an earlier run were moved to %s", aside)
        self._set_model_aside()
        self.settle()
        options = self._config.checkpoint_config
        contents = options.saved if contents is None else contents
        meta = {
            "exp_name": self._config.exp_name,
            "strategies": self._strategies,
            "dtypes": dtypes_of(self._config),
            "contents": list(contents),
        }
        best = self.best.record
        unfinished = self._store.begin(step, meta if best is None else {**meta, **best.as_meta()})
        with unfinished.attributed():
            folder = unfinished.folder
            parts: list[str] | None = [] if options.async_save else None
            records = self._save_roles(folder, contents, parts)
            extra = state(folder) if "extra" in contents else {}
            # The disk has it before the checkpoint is complete, like all other files; the step needn't wait for that.
            write_json(folder / "pipeline.json", {"step": step, "seed": self._config.seed, **extra}, flush=False)
            if parts is None:
                unfinished.finish(records)
        if parts is not None:
            self._on_its_way = BackgroundSave(unfinished, parts, self._completed)
        else:
            self._completed(read_manifest(unfinished.final))

    def _completed(self, checkpoint: Checkpoint) -> None:
        """Do what waits for a complete checkpoint on the disk: upload it, and delete the one that was resumed from."""
        if self._remote is not None:
            self._upload(self._remote, checkpoint)
        loaded, self._to_delete = self._to_delete, None
        best = best_of(checkpoint.meta)
        if (
            loaded is not None
            and best is not None
            and loaded.step == best.step
            and loaded.path.parent == self._store.root
        ):
            logger.info("%s stays: it is the best so far", loaded.path)
        elif loaded is not None and loaded.path.is_dir() and loaded.path.resolve() != checkpoint.path.resolve():
            logger.info("deleting %s, which this run resumed from (delete_after_load)", loaded.path)
            self._store.remove(loaded)

    def _upload(self, remote: RemoteCheckpoints, checkpoint: Checkpoint) -> None:
        """Upload a checkpoint. A failure doesn't end the run; the next upload makes up for it, and its end asks
        for it again."""
        try:
            self._upload_with_best(remote, checkpoint)
        except RemoteError as error:
            logger.error("%s; it is complete in %s", error, checkpoint.path)
            self._not_uploaded = checkpoint
        else:
            self._not_uploaded = None
            logger.info("%s was uploaded to %s", checkpoint.path.name, remote.shown)

    def _upload_with_best(self, remote: RemoteCheckpoints, checkpoint: Checkpoint) -> None:
        """Upload a checkpoint, and before it the best one where its own upload failed."""
        best = best_of(checkpoint.meta)
        if best is not None and best.step == checkpoint.step:
            self._best_to_upload = checkpoint
        missing = self._best_to_upload
        if missing is not None and missing is not checkpoint and best is not None and missing.step == best.step:
            remote.upload(missing)
            self._best_to_upload = None
        remote.upload(checkpoint)
        if self._best_to_upload is checkpoint:
            self._best_to_upload = None

    def _save_roles(self, folder: Path, contents: Sequence[CheckpointContent], parts: list[str] | None) -> Records:
        """Have the roles write; with `parts` into memory first, and the names of their parts into it.

        Returns what they say about the files that they have written.
        """
        states, records = _states(contents), []
        for role, cluster in self._trained.items():
            exports = role == "actor_train" and "hf_model" in contents
            if not (states or exports):
                continue
            self._offloader.onload(role)
            if parts is not None:
                parts.extend(cluster.call(TrainWorker.begin_save, str(folder), states, exports))
                continue
            if states:
                records += cluster.call(TrainWorker.save, str(folder / role), states)
            if exports:
                records += cluster.call(TrainWorker.export_recorded, str(folder / "hf_model"))
        return {name: record for of_rank in records for name, record in of_rank.items()}

    def check(self) -> None:
        """Raise what went wrong with a checkpoint that was written in the background."""
        if self._on_its_way is not None and self._on_its_way.done:
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; raise what went wrong with it."""
        saving, self._on_its_way = self._on_its_way, None
        if saving is not None:
            saving.wait(self._config.rpc_timeout)
            logger.info("the checkpoint of step %d was written in %.1f s", saving.step, saving.seconds)

    def finish(self) -> None:
        """Wait for the last checkpoint, also for its upload; raise `CheckpointWriteError` if that fails."""
        self.settle()
        checkpoint = self._not_uploaded
        if self._remote is None or checkpoint is None:
            return
        try:
            self._upload_with_best(self._remote, checkpoint)
        except RemoteError as error:
            raise CheckpointWriteError(
                f"the last checkpoint is complete in {checkpoint.path}, but not in {self._remote.shown}: {error}. "
                "Once the store can be reached, resume_from_checkpoint=auto uploads what it saves next"
            ) from error
        self._not_uploaded = None

    def close(self) -> None:
        """Finish the checkpoint that is being written, also after a failure of the run, which matters more than
        what goes wrong here."""
        saving, self._on_its_way = self._on_its_way, None
        if saving is None:
            return
        if not saving.done:
            logger.warning("finishing the checkpoint of step %d", saving.step)
        try:
            saving.wait(self._config.rpc_timeout, stalled=STALLED_SECONDS)
        except Exception as error:  # noqa: BLE001 - the run's own failure is raised
            logger.error("%s", error)

    def export(self, step: int, state: Callable[[Path], dict[str, Any]]) -> None:
        """Write the actor after its last step as a Hugging Face folder to `export_path`.

        What its ranks can't write is saved as a checkpoint, `state` as for `save`, and written from that. Raises
        `CheckpointWriteError` where that fails too, which says where the weights are.
        """
        starts_fresh = self._starts_fresh
        self._set_model_aside()
        self._offloader.onload("actor_train")
        record = {"exp_name": self._config.exp_name, "seed": self._config.seed, "step": step}
        actor = self._trained["actor_train"]
        try:
            export_actor(actor, self._config.export_path, record)
        except CheckpointWriteError as error:
            from roll.pipelines.run.unwritten_model import write_from_checkpoint

            def save(contents: Sequence[CheckpointContent]) -> None:
                self.save(step, state, contents)
                self.settle()

            self._starts_fresh = starts_fresh  # the checkpoint doesn't take the place of an earlier run's
            logger.error("%s", error)
            write_from_checkpoint(self._config, error, save=save, saved=lambda: self.saved(step), latest=self.latest)

    def saved(self, step: int) -> Checkpoint | None:
        """Return this run's complete checkpoint of a step, if it is the newest and has the weights."""
        newest = None if self._starts_fresh else self._store.latest()
        if newest is None or newest.step != step or "model" not in newest.meta.get("contents", STATE_CONTENTS):
            return None
        return newest

    def _set_model_aside(self) -> None:
        """Move the model of an earlier run out of the way, before a run that starts from scratch writes its own."""
        earlier = self._starts_fresh and self._config.exports
        if earlier and (aside := set_aside(self._config.export_path)) is not None:
            logger.warning("the model of an earlier run was moved to %s", aside)
        self._starts_fresh = False

    def load(self) -> tuple[dict[str, Any], Path] | None:
        """Restore the training roles from the checkpoint that `resume_from_checkpoint` names, as far as
        `load_contents` asks for it.

        Returns the pipeline's state and the checkpoint's folder; None when the run starts at its first step.
        """
        contents = self._config.checkpoint_config.load_contents
        checkpoint = self._chosen()
        if checkpoint is None:
            self._starts_fresh = True
            earlier = self.latest()
            if earlier is not None:
                logger.warning(
                    "%s is there from an earlier run, which resume_from_checkpoint=auto would go on from. When this "
                    "run saves, the earlier checkpoints are moved aside. Give each run its own output_dir",
                    earlier,
                )
            return None
        _check_contents(checkpoint, contents)
        state: dict[str, Any] = read_json(checkpoint.path / "pipeline.json")
        if state.get("step") != checkpoint.step:
            raise CheckpointError(
                f"{checkpoint.path} is that of step {checkpoint.step}, and its state says step {state.get('step')}"
            )
        if "extra" in contents and state["seed"] != self._config.seed:
            raise ValueError(
                f"{checkpoint.path} was written with seed {state['seed']}, but seed is {self._config.seed}; "
                "a resumed run must use the same seed, or start afresh with resume_from_checkpoint: false"
            )
        self._check_strategies(checkpoint)
        for role, cluster in self._trained.items():
            folder = checkpoint.path / role
            if not folder.is_dir():
                raise ValueError(f"{checkpoint.path} holds no {role}; it was written by another configuration")
            self._offloader.onload(role)
            cluster.call(TrainWorker.load, str(folder), _states(contents))
        self.loaded = True
        self._store.last_serial = checkpoint.serial
        if self._config.checkpoint_config.delete_after_load and self._downloaded is None:
            self._to_delete = checkpoint
        if "extra" not in contents:
            self._starts_fresh = True
            logger.info("starting at step 1 with the %s of %s", " and the ".join(contents), checkpoint.path)
            return None
        self._go_on_comparing(checkpoint)
        logger.info("resumed from %s", checkpoint.path)
        return state, checkpoint.path

    def _go_on_comparing(self, checkpoint: Checkpoint) -> None:
        """Take the best so far from a checkpoint, unless its own is gone or elsewhere."""
        best = best_of(checkpoint.meta)
        if best is None:
            return
        if any(there.step == best.step for there in self._store.complete()):
            link_best(self._store.root, best.step)
        elif self._remote is None or all(there.step != best.step for there in self._remote.complete()):
            logger.warning(
                "the best checkpoint so far, of step %d with %s = %.6g, isn't in %s: the next validation is the best",
                best.step,
                best.metric,
                best.value,
                self._store.root,
            )
            return
        self.best.record = best

    def release_loaded(self) -> None:
        """Delete a downloaded copy that everything was taken out of, if the configuration says so."""
        if self._downloaded is not None and self._config.checkpoint_config.delete_after_load:
            logger.info("deleting the copy in %s (delete_after_load)", self._downloaded.path)
            self._store.remove(self._downloaded)
        self._downloaded = None

    def _chosen(self) -> Checkpoint | None:
        """Return the checkpoint to resume from, downloaded where the newest isn't on the disk."""
        wanted, remote = self._config.resume_from_checkpoint, self._remote
        if is_address(wanted):
            self._downloaded = download(str(wanted), self._store.root / "downloaded", self._config.rpc_timeout)
            return self._downloaded
        if remote is None:
            return self._store.resolve(wanted)
        if wanted == LINK:
            return self._best_of_both(remote)
        if wanted not in (True, "auto"):
            if there := remote.complete():
                raise CheckpointError(
                    f"{remote.shown} holds the checkpoints of an earlier run, the newest of step {there[0].step}: "
                    "resume_from_checkpoint=auto goes on from it, or name another checkpoint_config.output_dir"
                )
            return self._store.resolve(wanted)
        newest = self._store.latest()
        for candidate in remote.complete():
            if newest is not None and candidate.serial <= newest.serial:
                break
            try:
                self._downloaded = remote.download(candidate, self._store)
                break
            except CheckpointError as error:
                logger.warning("not resuming from checkpoint-%d of %s: %s", candidate.step, remote.shown, error)
        return self._store.resolve(wanted)

    def _best_of_both(self, remote: RemoteCheckpoints) -> Checkpoint | None:
        """Return the best checkpoint by the newest of disk and address, downloaded where it isn't here."""
        there, newest = remote.complete(), self._store.latest()
        if there and (newest is None or there[0].serial > newest.serial):
            best = best_of(there[0].meta)
            if best is not None and all(mine.step != best.step for mine in self._store.complete()):
                for candidate in there:
                    if candidate.step == best.step:
                        self._downloaded = remote.download(candidate, self._store)
                        return self._downloaded
        return self._store.resolve(LINK)

    @property
    def _strategies(self) -> dict[str, str]:
        workers = self._config.roles
        return {role: workers[role].strategy_args.strategy_name for role in self._trained}

    def _check_strategies(self, checkpoint: Checkpoint) -> None:
        for role, mine in self._strategies.items():
            theirs = checkpoint.meta.get("strategies", {}).get(role, mine)
            if theirs == mine:
                continue
            model = checkpoint.path / "hf_model"
            there = role == "actor_train" and model.is_dir()
            fresh = f", or start afresh with {role}.model_args.model_name_or_path={model}" if there else ""
            raise ValueError(
                f"{checkpoint.path} holds {role} as {theirs} wrote it, but {role}.strategy_args.strategy_name is "
                f"{mine}, and each backend reads its own states only; go on with {theirs}{fresh}"
            )

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        checkpoint = self._store.latest()
        return None if checkpoint is None else checkpoint.path


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


def _states(contents: Sequence[CheckpointContent]) -> tuple[CheckpointContent, ...]:
    """Return the contents that are states of the roles, in one order."""
    return tuple(content for content in STATE_CONTENTS if content in contents)


def _check_contents(checkpoint: Checkpoint, wanted: Sequence[CheckpointContent]) -> None:
    """Raise `CheckpointError` if the checkpoint lacks what `load_contents` asks for."""
    held = checkpoint.meta.get("contents", STATE_CONTENTS)
    lacking = [content for content in wanted if content not in held]
    if not lacking:
        return
    rest = [content for content in wanted if content in held]
    ways = []
    if "model" in rest:
        ways.append(f"checkpoint_config.load_contents=[{','.join(rest)}] goes on without")
    if "hf_model" in held:
        ways.append(f"pretrain={checkpoint.path / 'hf_model'} starts from its weights")
    raise CheckpointError(
        f"{checkpoint.path} was saved with save_contents [{', '.join(held)}]; it lacks {' and '.join(lacking)}, which "
        f"load_contents asks for. {'; '.join(ways) or 'Name another checkpoint'}"
    )
