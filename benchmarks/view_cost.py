"""What recording every response costs a run, in CPU seconds: the rows of the demo, written as a run does.

    python benchmarks/view_cost.py --model FOLDER       # the quickstart's model, for its tokenizer

Prints CPU seconds per step of 64 responses: rows with their texts and the file, and the files for a run under way; and
what it costs to look every second at what processes use, with this process and its children as the run. The
quickstart's own CPU seconds per step are printed by `/usr/bin/time -v roll quickstart`, divided by its 16 steps.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch

from roll.pipelines.rollouts.assemble import assemble
from roll.pipelines.rollouts.rollout_rows import Texts, training_rows
from roll.rollout.progress import RolloutProgress
from roll.tracking.live import LiveFiles
from roll.tracking.process_usage import RoleUsage
from roll.tracking.recorded_responses import rollouts
from roll.tracking.rollouts import write_rollouts
from roll.types.trajectory import Group, Task, Trajectory, Turn
from roll.workbench.view.export import demo_runs


def groups_of(step: int) -> list[Group]:
    """Return the groups of a step of the demo."""
    tasks: dict[str, Task] = {}
    members: dict[str, list[Trajectory]] = {}
    for row in rollouts(demo_runs()[0]).rows(step):
        (turn,) = row["turns"]
        cut = turn["prompt_tokens"]
        played = Turn(
            prompt_ids=tuple(row["token_ids"][:cut]),
            response_ids=tuple(row["token_ids"][cut:]),
            logprobs=tuple(row["sampling_logprobs"][cut:]),
            versions=tuple(row["versions"][cut:]),
            finish_reason=turn["finish_reason"],
        )
        name = row["task_id"]
        tasks[name] = Task(
            id=name, source="", payload={"question": row["prompt"]}, seed=1, tag="", domain=row["domain"]
        )
        trajectory = Trajectory(task_id=name, member=row["member"], turns=(played,), reward=row["reward"])
        members.setdefault(name, []).append(trajectory)
    return [Group(task=tasks[name], trajectories=tuple(members[name])) for name in members]


def main() -> None:
    """Measure."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    texts = Texts(AutoTokenizer.from_pretrained(parser.parse_args().model))
    written, followed = [], []
    with tempfile.TemporaryDirectory() as temporary:
        live = LiveFiles(Path(temporary), {"exp_name": "cost"}, resume_step=None)
        for step in rollouts(demo_runs()[0]).steps:
            batch = assemble(groups_of(step))
            filled = {name: torch.zeros(batch.batch.num_tokens) for name in ("advantages", "returns", "token_rewards")}
            for name, column in filled.items():
                object.__setattr__(batch.batch, name, column)
            begun = time.process_time()
            write_rollouts(Path(temporary), step, training_rows(batch, texts), token_text=texts.of_tokens)
            written.append(time.process_time() - begun)
            begun = time.process_time()
            for phase in range(20):  # twice as many changes as a step has
                live.phase(["step", f"phase {phase}"])
            live.step_done(step)
            followed.append(time.process_time() - begun)
    print(f"rows and file: {statistics.median(written):.4f} CPU seconds a step (the first {written[0]:.3f})")
    print(f"what a page follows: {statistics.median(followed):.5f} CPU seconds a step")
    print(f"a look every second: {looks():.5f} CPU seconds a second")


def looks(seconds: int = 120) -> float:
    """Return the CPU seconds that it costs to read and write what changes within a step, per second of a run."""
    now = 0.0
    usage = RoleUsage(lambda: {"actor_train": [(socket.gethostname(), os.getpid())]}, clock=lambda: now)
    playing = RolloutProgress(groups_wanted=64, episodes_running=512)
    with tempfile.TemporaryDirectory() as temporary:
        live = LiveFiles(Path(temporary), {"exp_name": "cost"}, resume_step=None)
        begun = time.process_time()
        for _ in range(seconds):
            now += 1.0
            gauges = {"usage": usage.read(), "rollout": {"train": playing.shown()}}
            live.show(gauges)
        return (time.process_time() - begun) / seconds


if __name__ == "__main__":
    main()
