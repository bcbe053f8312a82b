"""What `replay_from` names: the recording is there with its steps, and the replay leaves it alone. Without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roll.configs.errors import Violation, problem
from roll.configs.schema.replay_source import parse_replay_from
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.tracking.live import RUN_FILE
from roll.tracking.recorded_responses import RecordedRollouts, logs_folder, rollouts


@dataclass(frozen=True)
class Recording:
    """Steps of a run that are to be replayed."""

    run: Path
    files: RecordedRollouts
    steps: range
    schedule: int
    """Steps that the schedule of the learning rate is made for, as in the run."""
    left: range
    """Recorded steps after those, which `max_steps` leaves out."""
    run_schedule: int
    """Steps that the run's own schedule was made for, as far as it is known."""


def recording_of(config: RLConfig) -> Recording:
    """Return what `replay_from` of a configuration names.

    Raises:
        ValueError: there is no such recording, or a step isn't in it.
    """
    assert config.replay_from is not None, "asked of a configuration that replays"
    source = parse_replay_from(config.replay_from)
    run = Path(source.run).expanduser()
    files = rollouts(run)
    there = files.steps
    if not there:
        raise ValueError(f"{files.folder} has no rollouts of a training step, but those of validations or dropped ones")
    recorded = planned = _recorded_schedule(run)
    if config.max_steps:
        planned = min(config.max_steps, recorded) if config.num_train_epochs and recorded else config.max_steps
    last = there[-1] if source.last is None else source.last
    if source.chosen and planned and last > planned:
        raise ValueError(f"step {last} is beyond the run's last one, {planned}: raise max_steps")
    end = min(last, planned) if planned else last
    steps = range(source.first, end + 1)
    if missing := [step for step in steps if step not in set(there)]:
        raise ValueError(_missing(config.replay_from, files, missing[0], there, chosen=source.chosen))
    schedule = planned or end
    return Recording(run, files, steps, schedule, range(end + 1, last + 1), recorded or schedule)


def _missing(recording: str, files: RecordedRollouts, step: int, there: list[int], *, chosen: bool) -> str:
    spans: list[list[int]] = []
    for number in there:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    shown = ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
    # rollout_dump_gib deletes the oldest; a file may have been lost.
    instead = (
        "" if chosen else f"; replay_from={recording}:{listed[-1]} replays from there, whatever weights it starts with"
    )
    return f"{files.folder} has no rollouts of step {step}, but of {shown}{instead}"


def _recorded_schedule(run: Path) -> int | None:
    """Return how many steps the run was to have, by its run.json; None where nobody knows."""
    try:
        steps = json.loads((logs_folder(run) / RUN_FILE).read_text(encoding="utf-8"))["total_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) and steps > 0 else None


def replay_violations(config: RunConfig) -> Iterator[Violation]:
    """Check that the recording is there, and that nothing of it is overwritten."""
    if not isinstance(config, RLConfig) or not config.replays:
        return
    try:
        recording = recording_of(config)
    except ValueError as error:
        yield problem("replay_from", str(error), "", config.replay_from)
        return
    run = recording.run
    taken = {run, run / "checkpoints", run / "hf_model", logs_folder(run), recording.files.folder}
    resolved = {folder.resolve() for folder in taken}
    for key, folder in config.output_folders.items():
        if folder.resolve() in resolved:
            why = f"it is a folder of the run that is replayed, {run}, which would be overwritten"
            yield problem(key, why, f"give the replay a folder of its own: {key}=...", str(folder))
            if key == "output_dir":
                return  # the others follow it
