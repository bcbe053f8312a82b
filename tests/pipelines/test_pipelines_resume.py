"""Same seed, same run, whatever kills it: a run that dies in the middle of something and is resumed is the whole one.

Tests here have runs in processes of their own; the run that nothing killed is made once for each job.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pipeline_contract import ADAPTERS, BOTH_KL, CRITIC, JOBS, Keys, write_scored
from same_runs import comparable, exported, in_process, logged
from toy import run_toy, write_toy
from toy_env import CRITIC as CRITIC_OF_TURNS
from toy_env import episodes, faulty, write_toy_env

# Everything that has a state: two optimizers, running reward statistics, an adaptive KL coefficient, a learning-rate
# schedule, shuffled epochs, prompts that over-sampling put back, draws of PF-PPO.
EVERYTHING = (
    *("max_steps=5", "save_steps=2", "eval_steps=1", "adv_estimator=gae", *CRITIC, "ppo_epochs=2"),
    *("reward_norm=running", "add_token_level_kl=true", "init_kl_coef=0.1", "target_kl=0.01", "kl_horizon=200"),
    *("reference.infer_batch_size=16", "is_use_additional_prompts=true", "max_additional_running_prompts=3"),
    *("actor_train.training_args.lr_scheduler_type=cosine", "pf_ppo.reweight_method=pow"),
    "checkpoint_config.save_hf_model=true",
    *("response_length=20", "actor_infer.generating_args.ignore_eos=false"),
)
# As above, with environments that fail now and then, and tasks that filters and failures skip.
AGENTIC = (
    *("max_steps=5", "save_steps=2", "eval_steps=1", "sample_unit=concat", "custom_envs.letters.history_length=1"),
    *("adv_estimator=gae", "discount_over=turn", *CRITIC_OF_TURNS, "ppo_epochs=2"),
    "train_env_manager={num_env_groups: 3, group_size: 8, group_size_redundancy: 1, group_filter: {type: std_filter}}",
    *("actor_train.training_args.per_device_train_batch_size=16", "actor_train.training_args.lr_scheduler_type=cosine"),
)
LORA = (
    *(*ADAPTERS, *BOTH_KL, "actor_train.model_args.lora_dropout=0.1", "max_steps=5", "save_steps=2"),
    *("actor_train.training_args.lr_scheduler_type=cosine", "checkpoint_config.save_hf_model=true"),
)
OF_ROWS = ("validation_share=0.2", "eval_steps=2", "save_steps=2", "max_steps=6")
SCORED = (
    *("rewards.case.rule_weight=0.5", "rewards.case.reward_model_weight=0.25", "reward_model.template=plain"),
    *("max_steps=4", "save_steps=1", "reward_norm=running"),
)

RUNS: dict[str, tuple[Callable[[Path, Path], Path], Callable[[Path], Keys]]] = {
    "rlvr": (write_toy, lambda _: EVERYTHING),
    "rlvr with adapters": (write_toy, lambda _: LORA),
    "scored rlvr": (write_scored, lambda _: SCORED),
    "agentic": (write_toy_env, lambda folder: (*AGENTIC, *faulty(folder, "raise", share=0.05))),
    "dpo": (JOBS["dpo"].write, lambda _: (*OF_ROWS, "reference={}")),
    "reward_model": (JOBS["reward_model"].write, lambda _: OF_ROWS),
}


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a run that nothing interrupts, which is made once."""
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in folders:
            folders[name] = start(name, tmp_path_factory.mktemp("whole") / "run", tiny_model)
        return folders[name]

    return run


def start(name: str, folder: Path, model: Path, *more: str) -> Path:
    """Write a run and let it come to its end."""
    write, keys = RUNS[name]
    write(folder, model)
    assert in_process(folder, keys(folder), *more) == 0
    return folder


def check_same_runs(folder: Path, whole: Path) -> None:
    assert logged(folder) == logged(whole)
    assert exported(folder) == exported(whole)
    assert episodes(folder) == episodes(whole)


@pytest.mark.parametrize(("name", "more"), [("rlvr", ()), ("agentic", ("env_workers.world_size=4",))])
def test_the_same_seed_gives_the_same_bits_in_another_process(uninterrupted, tiny_model, tmp_path, name, more):
    check_same_runs(start(name, tmp_path, tiny_model, *more), uninterrupted(name))
    if name == "agentic":
        assert sum(row.get("rollout/failed_env_error", 0) for row in logged(tmp_path)) > 0


@pytest.mark.parametrize("name", ["rlvr", "agentic"])
def test_another_seed_gives_another_run(uninterrupted, tiny_model, tmp_path, name):
    write, keys = RUNS[name]
    other = run_toy(write(tmp_path, tiny_model), *keys(tmp_path), "seed=4", "max_steps=1")
    assert comparable(other)[0]["reward/mean"] != logged(uninterrupted(name))[0]["reward/mean"]
    mine, theirs = ({tuple(row.token_ids) for row in episodes(folder)} for folder in (tmp_path, uninterrupted(name)))
    assert not mine or len(mine & theirs) < len(mine) / 2


KILLS = [
    ("rlvr", "generation", 120),
    ("rlvr", "scoring", 300),
    ("rlvr", "update", 16),
    ("rlvr", "checkpoint write", 2),
    ("rlvr", "evaluation", 4),
    ("rlvr with adapters", "update", 7),
    ("scored rlvr", "scoring", 150),
    ("agentic", "environment", 500),
    ("agentic", "checkpoint write", 2),
    ("dpo", "update", 5),
    ("reward_model", "checkpoint write", 2),
]


@pytest.mark.parametrize(("name", "moment", "nth"), KILLS)
def test_killed_and_resumed_equals_never_killed(uninterrupted, tiny_model, tmp_path, name, moment, nth):
    write, keys = RUNS[name]
    write(tmp_path, tiny_model)
    assert in_process(tmp_path, keys(tmp_path), moment=moment, nth=nth) == -signal.SIGKILL
    done, saved = len(logged(tmp_path)), list((tmp_path / "output" / "checkpoints").glob("checkpoint-*"))
    assert saved, f"killed {moment} after {done} steps, before the first checkpoint: choose another call"
    assert done < len(logged(uninterrupted(name)))
    assert in_process(tmp_path, keys(tmp_path), "resume_from_checkpoint=auto") == 0
    check_same_runs(tmp_path, uninterrupted(name))
    assert not orphans()


def orphans() -> list[psutil.Process]:
    """Processes of environments that nobody owns any more."""
    alone = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is a zombie that nobody has waited for yet
            if process.ppid() == 1 and "roll.envs.env_worker" in " ".join(process.cmdline()):
                alone.append(process)
    return alone
