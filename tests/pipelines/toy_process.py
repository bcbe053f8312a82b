"""Runs the `toy.yaml` of a folder in a process of its own, optionally killed with SIGKILL in the middle of something.

python toy_process.py FOLDER MOMENT NTH [key=value ...]
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path


def kill_at(moment: str, nth: int) -> None:
    """The process dies at the n-th call of the function that stands for this moment."""
    from roll.checkpoint import background
    from roll.checkpoint.store import Unfinished
    from roll.pipelines.rl.engine_pipeline import EnginePipeline
    from roll.pipelines.run import checkpoints
    from roll.pipelines.workers.train_worker import TrainWorker
    from roll.rollout.episode_envs import PooledEnv, RewardEnv
    from roll.strategies.engines.hf.hf_infer import HfInfer

    owner, name = {
        "generation": (HfInfer, "_step"),
        "scoring": (RewardEnv, "step"),
        "environment": (PooledEnv, "step"),
        "update": (TrainWorker, "train_step"),
        # The actor's state is written by then, the pipeline's isn't.
        "checkpoint write": (checkpoints, "write_json"),
        # Of a part that a rank writes while training goes on: one file is there.
        "background write": (background, "hash_files"),
        "background finish": (Unfinished, "finish"),
        "evaluation": (EnginePipeline, "evaluate"),
    }[moment]
    original, calls = getattr(owner, name), [0]

    @functools.wraps(original)  # keeps the dispatch mode of a worker's method
    def dying(*args, **kwargs):
        calls[0] += 1
        if calls[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


def main(folder: str, moment: str = "", nth: str = "0", *overrides: str) -> None:
    """Run it."""
    from toy import run_toy

    if moment:
        kill_at(moment, int(nth))
    run_toy(Path(folder), *overrides)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(*sys.argv[1:])
