"""What a run with `val_only` writes: every episode as it was played, and a table of results by tag.

<output_dir>/scores.json               the table
<output_dir>/episodes.jsonl            an episode per line: texts, rewards and what the environment counted, by turn
<output_dir>/episodes.unfinished.jsonl the same as far as it got, while it runs, or if it was ended before its end
<rollout_dump_dir>/rollouts-*.parquet  the same episodes as tokens, if asked for
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from roll.configs.schema.rl_config import RLConfig
from roll.pipelines.rollouts.rollout_metrics import episode_counts
from roll.pipelines.rollouts.validation import episode_success, successes
from roll.types.trajectory import Group, Task, Trajectory

_NOTE = 400  # Characters of a note below the table; `scores.json` has all


EPISODES = "episodes.jsonl"
UNFINISHED = "episodes.unfinished.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagResult:
    """What was achieved in one kind of environment, or one domain."""

    tag: str
    episodes: int
    failed: int
    """Episodes without a reward; they are left out of every mean."""
    first_failure: str
    """What went wrong in the first of them."""
    no_room: int
    """Episodes that were cut off because `sequence_length` left no room for another response. They count, without
    success unless their environment says so."""
    first_no_room: str
    """Where the first of them was."""
    success: float | None
    """Share of episodes that succeed; None where the environment doesn't say."""
    success_error: float | None
    """Standard error of that share."""
    reward: float | None
    reward_error: float | None
    turns: float | None
    tokens: float | None
    """Response tokens per episode."""
    counts: Mapping[str, float]
    """What the environment counted, per episode."""


def results_by_tag(groups: Sequence[Group]) -> list[TagResult]:
    """Return the results of each tag, in order of appearance."""
    tags: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        tags[group.task.tag] += group.trajectories
    return [_result(tag, played) for tag, played in tags.items()]


def _result(tag: str, played: Sequence[Trajectory]) -> TagResult:
    good = [t for t in played if t.trainable]
    succeeded = successes(good)
    rewards = [t.reward for t in good]
    cut = [t for t in good if t.error]
    counts: dict[str, list[float]] = defaultdict(list)
    for trajectory in good:
        for name, value in episode_counts(trajectory).items():
            counts[name].append(value)
    return TagResult(
        tag=tag,
        episodes=len(played),
        failed=len(played) - len(good),
        first_failure=next((f"{t.id}: {t.status}: {t.error}" for t in played if not t.trainable), ""),
        no_room=len(cut),
        first_no_room=next((f"{t.id}: {t.error}" for t in cut), ""),
        success=fmean(succeeded) if succeeded else None,
        success_error=_error(succeeded),
        reward=fmean(rewards) if rewards else None,
        reward_error=_error(rewards),
        turns=fmean(len(t.turns) for t in good) if good else None,
        tokens=fmean(t.num_response_tokens for t in good) if good else None,
        counts={name: sum(values) / len(good) for name, values in sorted(counts.items())},
    )


def _error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def table(results: Sequence[TagResult]) -> RenderableType:
    """Return the results as a table, with what went wrong below it."""
    shown = Table("environment", "episodes", "failed", "success", "reward", "turns", "tokens")
    for result in results:
        success = "–" if result.success is None else f"{result.success:.1%}"
        if result.success is not None and result.success_error is not None:
            success += f" ± {result.success_error:.1%}"
        shown.add_row(
            Text(result.tag),
            str(result.episodes),
            str(result.failed),
            success,
            _with_error(result.reward, result.reward_error),
            _with_error(result.turns, None),
            _with_error(result.tokens, None),
        )
    notes = [f"{s.failed} failed, e.g. {s.first_failure}" for s in results if s.failed]
    notes += [f"{s.no_room} cut off, e.g. {s.first_no_room}" for s in results if s.no_room]
    return Renderables(shown, *(Text(_short(note)) for note in notes))  # no markup: messages may hold brackets


def _short(text: str) -> str:
    """Cut the middle out of a long text: a traceback says at its end what happened."""
    return text if len(text) <= _NOTE else f"{text[: _NOTE // 4]} [...] {text[-_NOTE * 3 // 4 :]}"


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" + (f" ± {error:.2g}" if error is not None else "")


def write_eval_files(
    folder: Path, groups: Sequence[Group], tokenizer: Any, about: Mapping[str, Any]
) -> list[TagResult]:
    """Write `scores.json` and `episodes.jsonl`; files are there whole or as they were before.

    Args:
        groups: validation groups, failed episodes included.
        about: what was played by what, for the head of the table.
    """
    results = results_by_tag(groups)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_episode(g.task, t, tokenizer), ensure_ascii=False) for g in groups for t in g.trajectories]
    _replace(folder / EPISODES, "".join(f"{line}\n" for line in lines))
    content = {**about, "scores": [asdict(result) for result in results]}
    _replace(folder / "scores.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    (folder / UNFINISHED).unlink(missing_ok=True)
    return results


def append_episodes(folder: Path, group: Group, tokenizer: Any) -> None:
    """Add the episodes of a finished group to those of a validation that is still on its way."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_episode(group.task, t, tokenizer), ensure_ascii=False) for t in group.trajectories]
    with open(folder / UNFINISHED, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _episode(task: Task, trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    return {
        "task": task.id,
        "tag": task.tag,
        "seed": task.seed,
        "member": trajectory.member,
        "status": trajectory.status,
        "error": trajectory.error,
        "reward": trajectory.reward if trajectory.trainable else None,
        "success": episode_success(trajectory) if trajectory.trainable else None,
        "answer": trajectory.answer,
        "turns": [
            {
                "prompt": tokenizer.decode(turn.prompt_ids),
                "response": tokenizer.decode(turn.response_ids),
                "text": tokenizer.decode(turn.response_ids, skip_special_tokens=True),
                **({"role": turn.role} if turn.role else {}),
                "finish_reason": turn.finish_reason,
                "reward": turn.reward,
                "metrics": dict(turn.metrics),
            }
            for turn in trajectory.turns
        ],
    }


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    # What utf-8 can't hold, a lone surrogate, is written as JSON writes it.
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


logger = logging.getLogger(__name__)

_SECONDS = 10.0
_RECENT = 64
"""Tasks whose pace an estimate goes by: the first to end say little, because all begin together."""
_SHARE = 0.1
"""Of the tasks that have to be through before there is an estimate."""


class ValidationProgress:
    """Logs how far a validation is, every ten seconds; a mere validation (`val_only`) also keeps what is finished."""

    def __init__(self, config: RLConfig, tokenizer: Any, tasks: int) -> None:
        self._folder = config.output_path if config.val_only else None
        self._tokenizer = tokenizer
        self._tasks = tasks
        self.begin()

    def begin(self) -> None:
        """Start from the first task."""
        self._done = 0
        self._shown = time.monotonic()
        self._ends: deque[float] = deque(maxlen=_RECENT)
        if self._folder is not None:
            (self._folder / UNFINISHED).unlink(missing_ok=True)

    def add(self, group: Group) -> None:
        """Note that a task is through."""
        self._done += 1
        if self._folder is not None:
            append_episodes(self._folder, group, self._tokenizer)
        now = time.monotonic()
        self._ends.append(now)
        if now - self._shown >= _SECONDS and self._done < self._tasks:
            self._shown = now
            logger.info("validation: %d of %d tasks%s", self._done, self._tasks, self._estimate())

    def _estimate(self) -> str:
        """Return how long the rest takes at the pace of the last tasks; nothing while too few have ended."""
        if len(self._ends) < 2 or self._done < _SHARE * self._tasks:
            return ""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f", about {pace * (self._tasks - self._done):.0f} s to go"
