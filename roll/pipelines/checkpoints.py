"""What a checkpoint of a run holds: every training role's state, and the pipeline's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll.checkpoint.files import Checkpoint, CheckpointError, CheckpointWriteError, read_json, write_json
from roll.checkpoint.model_export import set_aside, write_model
from roll.checkpoint.store import CheckpointStore
from roll.configs.schema.run_config import RunConfig
from roll.pipelines.clusters import Clusters
from roll.workers.train import TrainWorker

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores a run through its clusters."""

    def __init__(self, config: RunConfig, clusters: Clusters) -> None:
        self._config = config
        self._offloader = clusters.offloader
        self._trained = {"actor_train": clusters.actor_train}
        if clusters.critic is not None:
            self._trained["critic"] = clusters.critic
        self._store = CheckpointStore(config.checkpoint_path, config.checkpoint_config.max_to_keep)
        self._starts_fresh = False

    def save(self, step: int, state: Callable[[Path], dict[str, Any]]) -> None:
        """Write the checkpoint of a finished step; a kill leaves it whole or not there at all.

        `state` gives the pipeline's own state, JSON-able, and may write files into the folder that it gets.
        """
        if self._starts_fresh and (aside := self._store.set_aside()) is not None:
            logger.warning("checkpoints of an earlier run were moved to %s", aside)
        self._set_model_aside()
        with self._store.writing(step, {"exp_name": self._config.exp_name, "strategies": self._strategies}) as folder:
            for role, cluster in self._trained.items():
                self._offloader.onload(role)
                cluster.call(TrainWorker.save, str(folder / role))
            if self._config.checkpoint_config.save_hf_model:
                self._offloader.onload("actor_train")
                self._trained["actor_train"].call(TrainWorker.export, str(folder / "hf_model"))
            write_json(folder / "pipeline.json", {"step": step, "seed": self._config.seed, **state(folder)})

    def export(self, step: int) -> None:
        """Write the actor after its last step as a Hugging Face folder to `export_path`."""
        self._set_model_aside()
        self._offloader.onload("actor_train")
        record = {"exp_name": self._config.exp_name, "seed": self._config.seed, "step": step}
        actor = self._trained["actor_train"]
        try:
            write_model(self._config.export_path, lambda folder: actor.call(TrainWorker.export, str(folder)), record)
        except CheckpointWriteError as error:
            latest = self.latest()
            rest = "no checkpoint was kept (save_steps is 0)" if latest is None else f"{latest} is intact: "
            if latest is not None:
                rest += "resume_from_checkpoint=auto does what is left and writes the model again"
            raise CheckpointWriteError(f"{error}; {rest}") from error

    def _set_model_aside(self) -> None:
        """Move the model of an earlier run out of the way, before a run that starts from scratch writes its own."""
        earlier = self._starts_fresh and self._config.exports
        if earlier and (aside := set_aside(self._config.export_path)) is not None:
            logger.warning("the model of an earlier run was moved to %s", aside)
        self._starts_fresh = False

    def load(self) -> tuple[dict[str, Any], Path] | None:
        """Restore the training roles from the checkpoint that `resume_from_checkpoint` names.

        Returns the pipeline's state and the checkpoint's folder; None when the run starts from nothing.
        """
        checkpoint = self._store.resolve(self._config.resume_from_checkpoint)
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
        state: dict[str, Any] = read_json(checkpoint.path / "pipeline.json")
        if state.get("step") != checkpoint.step:
            raise CheckpointError(
                f"{checkpoint.path} is that of step {checkpoint.step}, and its state says step {state.get('step')}"
            )
        if state["seed"] != self._config.seed:
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
            cluster.call(TrainWorker.load, str(folder))
        logger.info("resumed from %s", checkpoint.path)
        return state, checkpoint.path

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
