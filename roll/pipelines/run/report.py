"""Everything a run says: trackers, the rollout dump, what was dropped, and the closing summary."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from roll.checkpoint.best import Best
from roll.configs.schema.run_config import RunConfig
from roll.data.quarantine import BAD_ROWS
from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.eval_table import TagResult, table
from roll.pipelines.rollouts.rollout_dump import RolloutDump
from roll.tracking.base import Sample
from roll.tracking.drops import DropLog, last_words
from roll.tracking.health import OF_LENGTH, Health
from roll.tracking.live import LiveFiles
from roll.tracking.run_summary import RunSummary, render
from roll.tracking.timing import OUTSIDE_STEP, Timers
from roll.tracking.tracker_registry import build_trackers
from roll.types.trajectory import LEFT_OUT, Group, Trajectory
from roll.utils.console import Console

logger = logging.getLogger(__name__)

_WORK = (
    "generate",
    "generate_greedy",
    "reference",
    "teacher",
    "old_logprobs",
    "values",
    "credit",
    "train_critic",
    "train_actor",
    "sync_weights",
)
_BAD_ROWS = {"bad rows": "train", "bad validation rows": "val"}


class RunReport:
    """One per run.

    Args:
        timers: the run's; a row takes what they measured since the last row.
        resume_step: last step that is already on record; None for a new run.
        total_steps: after which the run ends; 0: nobody knows.
        first_step: that this run walks, where it is a later one although nothing is resumed.
    """

    def __init__(
        self,
        config: RunConfig,
        timers: Timers,
        tokenizer: Any,
        *,
        resume_step: int | None,
        total_steps: int = 0,
        first_step: int = 1,
    ) -> None:
        self._config = config
        self._timers = timers
        self._tokenizer = tokenizer
        self._started = time.monotonic()
        folder = config.logging_path
        self._trackers = build_trackers(
            config.track_with,
            config.tracker_kwargs,
            folder,
            resume_step,
            run_name=config.exp_name,
            settings=dataclasses.asdict(config),
        )
        self._drops = DropLog(folder, resume_step)
        self._dump = RolloutDump(config, tokenizer)
        if resume_step is None:
            self._dump.set_earlier_aside()
        self._live = LiveFiles(folder, self._dump.about(total_steps), resume_step=resume_step)
        timers.on_change = self._live.phase
        self._spans: dict[str, float] = {}
        self._tokens = 0
        self._resumed_at = resume_step or 0
        self._skipped = max(self._resumed_at, first_step - 1)
        self._steps = self._resumed_at
        self._accuracy: list[dict[str, float]] = []
        self._eval_results: Sequence[TagResult] = ()
        self._rewards: list[dict[str, float]] = []
        self._health = Health(without=OF_LENGTH if config.one_token_responses else ())
        self._warned: set[str] = set()
        self._unshown: tuple[int, dict[str, float]] = (-1, {})

    def watch(self, gauges: Callable[[], Mapping[str, Any]]) -> None:
        """Show what changes within a phase to those who follow the run; see `LiveFiles.watch`."""
        self._live.watch(gauges)

    def row(self, step: int, values: Mapping[str, float], *, due: bool = True) -> None:
        """Write a step's metrics, timings and counters as one line to every tracker. Called every step, shown when due.

        The last row is always shown: at the latest by `finish`.
        """
        row = {**values, **self._drops.close_step(step), **self._timers.result()}
        for name, value in row.items():
            if name.startswith("time/") and not name.endswith(("/self", "_share", "/controller")):
                span = name.removeprefix("time/")
                self._spans[span] = self._spans.get(span, 0.0) + value
        self._tokens += int(row.get("tokens/response", row.get("sft/tokens", row.get("preference/tokens", 0))))
        seconds = row.get("time/step")
        trained = "tokens/response" in row
        if seconds and trained:
            row["throughput/tokens_per_second"] = (row["tokens/prompt"] + row["tokens/response"]) / seconds
            row["throughput/responses_per_second"] = row["rollout/responses"] / seconds
        if row.get("time/generate") and trained:
            row["throughput/generated_per_second"] = row["tokens/response"] / row["time/generate"]
        if seconds and "tokens/read" in row:
            row["throughput/tokens_per_second"] = row["tokens/read"] / seconds
        row["memory/host_gib"] = psutil.Process().memory_info().rss / 2**30
        if "val/accuracy" in row:
            parts = {tuple(name.split("/")): value for name, value in row.items()}
            domains = {part[1]: v for part, v in parts.items() if len(part) == 3 and part[::2] == ("val", "accuracy")}
            self._accuracy.append({**domains, "all": row["val/accuracy"]})
            self._rewards.append({p[1]: v for p, v in parts.items() if len(p) == 3 and p[::2] == ("val", "reward")})
        if "val/token_accuracy" in row:
            self._accuracy.append({"tokens": row["val/token_accuracy"]})
        for words in self._health.look(step, row):
            logger.warning("%s", words)
            self._live.event(step, "warning", words)
        self._steps = max(self._steps, step)
        self._live.step_done(self._steps)
        held, values_held = self._unshown
        if held == step and not values_held:
            # A step has one row and this one's is out: what comes late stands in the row of the step that never was.
            step += 1
        self._unshown = (step, {**values_held, **row} if held == step else row)
        if due:
            self._show()

    def _show(self) -> None:
        step, row = self._unshown
        if row:
            self._trackers.log(step, row)
        self._unshown = (step, {})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show some responses to people."""
        if samples:
            self._trackers.log_samples(step, samples)

    def dropped(self, group: Group, reason: str) -> None:
        """Record a group that won't be trained on."""
        self._dump.dropped(group.task, group.trajectories, reason)
        shown = max(group.trajectories, key=lambda t: t.num_response_tokens)
        word = next((f"{word}_group" for word in ("filtered", "unscored") if reason.startswith(word)), "failed_group")
        for trajectory in group.trajectories:
            if not trajectory.trainable and trajectory.status not in LEFT_OUT:
                self._warn(trajectory)
        self._drops.add(
            word,
            group.task.id,
            reason if not shown.error else f"{reason}: {shown.error}",
            {
                "domain": group.task.domain,
                "scores": [t.reward for t in group.survivors],
                "statuses": [t.status for t in group.trajectories],
                "response": self._text(shown),
            },
        )

    def failed(self, group: Group) -> None:
        """Record the members that failed or were filtered, of a group that is trained on without them."""
        self._dump.dropped(group.task, [member for member in group.trajectories if not member.trainable])
        for trajectory in group.trajectories:
            if not trajectory.trainable:
                sample: dict[str, Any] = {
                    "domain": group.task.domain,
                    "status": trajectory.status,
                    "response": self._text(trajectory),
                }
                if trajectory.status == "filtered":
                    sample["score"] = trajectory.reward
                    self._drops.add("filtered_response", trajectory.id, trajectory.error, sample)
                    continue
                if trajectory.status == "unscored":
                    self._drops.add("unscored_response", trajectory.id, trajectory.error, sample)
                    continue
                self._drops.add("failed_response", trajectory.id, trajectory.error, sample)
                self._warn(trajectory)

    def _warn(self, trajectory: Trajectory) -> None:
        """Warn of the first failure of each kind; the others are counted."""
        if trajectory.status not in self._warned:
            self._warned.add(trajectory.status)
            words = f"{trajectory.id} failed ({trajectory.status}): {last_words(trajectory.error)}"
            self._live.event(self._steps + 1, "failure", words)
            logger.warning(
                "%s failed (%s): %s; further ones are counted, and listed in dropped.jsonl",
                trajectory.id,
                trajectory.status,
                last_words(trajectory.error),
            )

    def eval_results(self, results: Sequence[TagResult]) -> None:
        """Keep what `val_only` found, for the closing table."""
        self._eval_results = results

    def rollouts(self, step: int, rollouts: Rollouts) -> None:
        """Write every row of a step to parquet, those that were dropped since the last one included, if asked for."""
        self._dump.step(step, rollouts)

    def validation(self, step: int, groups: Sequence[Group]) -> None:
        """Write the episodes of a validation, if asked for."""
        self._dump.validation(step, groups)

    def _text(self, trajectory: Trajectory) -> str:
        return self._tokenizer.decode([token for turn in trajectory.turns for token in turn.response_ids])

    def finish(self, checkpoint: Path | None, best: Best | None = None) -> None:
        """Hand the closing numbers to the trackers, then print the summary: a live table must have ended by then.

        `checkpoint` is the newest one, `best` what `save_best` has chosen.
        """
        self._show()
        summary = self._summary(checkpoint, best)
        self._trackers.finish(summary.metrics())
        self._live.end("finished")
        if not self._config.print_summary:
            return
        console = Console(stderr=True)
        if self._eval_results:
            console.print(table(self._eval_results))
        console.print(render(summary))

    def _summary(self, checkpoint: Path | None, best: Best | None) -> RunSummary:
        files = {"metrics and logs": self._config.logging_path}
        if "tensorboard" in self._config.track_with:
            files["tensorboard"] = self._config.logging_path / "tensorboard"
        bad = {what: self._config.logging_path / BAD_ROWS[split] for what, split in _BAD_ROWS.items()}
        files.update({what: path for what, path in bad.items() if path.is_file()})
        if checkpoint is not None:
            files["checkpoint"] = checkpoint
        if checkpoint is not None and best is not None:
            files[f"best, {best.metric} {best.value:.4g}"] = checkpoint.with_name(f"checkpoint-{best.step}")
        if self._eval_results:
            files["scores"] = self._config.output_path / "scores.json"
            files["episodes"] = self._config.output_path / "episodes.jsonl"
        files.update({key: Path(name) for key, name in self._config.extra_output_dirs.items() if name})
        if (model := files.pop("export_dir", None)) is not None and model.is_dir():
            files = {"trained model": model, **files}
        return RunSummary(
            exp_name=self._config.exp_name,
            steps=0 if self._config.only_validates else max(0, self._steps - self._skipped),
            wall_seconds=time.monotonic() - self._started,
            # The first validation of a resumed run isn't one of the starting model.
            accuracy_before=self._accuracy[0] if len(self._accuracy) > 1 and not self._resumed_at else {},
            accuracy_after=self._accuracy[-1] if self._accuracy else {},
            reward_before=self._rewards[0] if len(self._rewards) > 1 and not self._resumed_at else {},
            reward_after=self._rewards[-1] if self._rewards else {},
            notices=[
                *self._without_best(best),
                *self._health.messages(),
                *(f"tracker {name}: {why}" for name, why in self._trackers.failed.items()),
            ],
            tokens=self._tokens,
            step_seconds=self._spans.get("step", 0.0),
            spans={name: self._spans[name] for name in (*_WORK, *OUTSIDE_STEP) if name in self._spans},
            files=files,
            hazards=self._config.hazards,
        )

    def _without_best(self, best: Best | None) -> list[str]:
        if self._config.save_best is None or best is not None or self._config.only_validates:
            return []
        return [f"save_best: no validation gave {self._config.save_best}, so that no checkpoint was kept as the best"]

    def close(self) -> None:
        """Close what wasn't closed; after a failure the trackers are told that there is no summary."""
        self._drops.close_step(self._steps + 1)  # those of a step that failed may say why
        self._drops.close()
        self._live.end("failed")
        self._trackers.finish({})
