"""GRPO against TRL's `GRPOTrainer` on the same task: whole steps, start-up and memory. About 20 minutes.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -r benchmarks/requirements-trl.txt
    python benchmarks/grpo_vs_trl.py --trl-python /tmp/trl/bin/python --json first.json
    python benchmarks/grpo_vs_trl.py --trl-python /tmp/trl/bin/python --json second.json   # half an hour later
    python benchmarks/grpo_vs_trl.py --table first.json second.json

`even`, `tail` and `shared` take a small random model: responses of one length; few that are long; long prompts that
the responses of a group share. `quickstart` takes SmolLM2-135M-Instruct and the rows of the quickstart; our side is the
quickstart as it is shipped, without validation and saves. In each, both sides are one process for all rounds and take
turns, step by step. TRL has the number of responses per pass that was its fastest of those tried before. `start` is the
time from the command to the first token (TRL also: to a built trainer), again by turns.

The tables have medians with quartiles, and medians of the rounds' ratios. Processor seconds are those of all processes
of a side. Peak memory is PSS, seen while a side starts and during one more step, which isn't timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from trl_ours import QUICKSTART  # noqa: E402 - beside this file
from trl_report import report  # noqa: E402
from trl_sides import Side, machine, seconds_to, versions  # noqa: E402
from trl_task import Task, write_files  # noqa: E402

RANDOM: dict[str, dict[str, Any]] = {
    "even": {"prompts": 4, "samples": 8, "prompt_length": 32, "response_length": 256},
    "tail": {"prompts": 4, "samples": 8, "prompt_length": 32, "response_length": 512, "mean_length": 64},
    "shared": {"prompts": 4, "samples": 8, "prompt_length": 512, "response_length": 64},
}
ROUNDS = {"even": 7, "tail": 7, "shared": 7, "quickstart": 3, "start": 5}
TUNING_STEPS = {"quickstart": (0, 1)}
"""Steps of each of TRL's settings: (warm-up, timed). A step of the quickstart takes TRL most of a minute."""


def random_task(name: str, options: argparse.Namespace, folder: Path, steps: int) -> Task:
    """Write the files of a workload with a random model."""
    sizes = {key: value for key in ("prompts", "samples", "prompt_length", "response_length", "mean_length")
             if (value := getattr(options, key)) is not None}  # fmt: skip
    task = Task(**{**RANDOM[name], **sizes}, threads=options.threads, steps=steps)
    write_files(folder, task)
    return task


def quickstart_task(options: argparse.Namespace, folder: Path, steps: int) -> Task:
    """Write the prompts of the quickstart's first steps, as the pipeline will draw them, to `prompts.jsonl`."""
    from roll.configs.parsing.loader import load_config
    from roll.pipelines.rl.rlvr import training_data
    from roll.pipelines.workers.train_worker import resolved_model_args
    from roll.strategies.training.pretrained import load_tokenizer

    model = str(options.model)
    own = (f"pretrain={model}", f"output_dir={folder}/rows")
    config: Any = load_config(*QUICKSTART, [*own, *options.set])
    tokenizer: Any = load_tokenizer(resolved_model_args(config, "actor_train"))
    tasks = training_data(config, tokenizer)[0].take(steps * config.rollout_batch_size)
    rows = [{name: task.payload[name] for name in ("prompt", "ground_truth")} for task in tasks]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Task(
        prompts=config.rollout_batch_size,
        samples=config.num_return_sequences_in_group,
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        threads=options.threads,
        steps=steps,
        learning_rate=config.actor_train.training_args.learning_rate,
        model=model,
        end_ids=tuple(i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])),
    )


def trl_side(options: argparse.Namespace, task: Task, folder: Path, setting: str) -> Side:
    """Start TRL with a setting: responses per pass, and perhaps `bf16`."""
    per_device, *precision = setting.split()
    extra = ["--per-device", per_device, *(f"--{name}" for name in (*precision, *options.trl_options))]
    if options.trl_cache:
        extra += ["--cache", options.trl_cache]
    return Side("trl", options.trl_python, "trl_theirs.py", task, folder, extra)


def our_side(options: argparse.Namespace, task: Task, folder: Path) -> Side:
    extra = ["--per-device", str(min(options.per_device, task.rows)), "--engine", options.engine]
    extra += ["--packing" if options.packing else "--no-packing", "--set", *options.set]
    return Side("ours", sys.executable, "trl_ours.py", task, folder, extra)


def tuned(name: str, options: argparse.Namespace, task: Task, folder: Path) -> dict[str, float]:
    """Return the seconds of a step with each of TRL's settings; a setting that fails, isn't there."""
    sizes = options.trl_per_device or [n for n in (task.rows // 4, task.rows // 2, task.rows) if n]
    settings = [str(size) for size in dict.fromkeys(sizes) if task.rows % size == 0]
    if name == "quickstart" and set(machine()["features"]) & {"avx512_bf16", "amx_bf16"}:
        settings += [f"{size} bf16" for size in settings]
    if len(settings) == 1:
        return {settings[0]: 0.0}
    seconds: dict[str, float] = {}
    warm_up, timed = TUNING_STEPS.get(name, (1, 2))
    for setting in settings:
        try:
            side = trl_side(options, task, folder, setting)
        except RuntimeError as error:
            print(f"{name}: TRL with {setting}: {error}", file=sys.stderr)
            continue
        try:
            steps = [side.step()["seconds"] for _ in range(warm_up + timed)]
            seconds[setting] = min(steps[warm_up:])
        except RuntimeError as error:  # out of memory, say
            print(f"{name}: TRL with {setting}: {error}", file=sys.stderr)
        finally:
            side.close()
        print(f"{name}: TRL with {setting}: {seconds.get(setting, float('nan')):.2f} s", file=sys.stderr)
    return seconds


def measure_steps(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what a workload's rounds gave."""
    rounds = options.rounds or ROUNDS[name]
    steps = rounds + options.warm_up + 2
    make: Callable[..., Task] = quickstart_task if name == "quickstart" else lambda *all_: random_task(name, *all_)
    task, load = make(options, folder, steps), machine()["load before"]
    figures: dict[str, list[dict[str, Any]]] = {side: [] for side in ("trl", "ours", "bare")}
    tuning: dict[str, float] = {}
    sides: list[Side] = []
    try:
        if options.only != "ours":
            tuning = tuned(name, options, task, folder)
            sides.append(trl_side(options, task, folder, min(tuning, key=tuning.__getitem__)))
        if options.only != "trl":
            sides.append(our_side(options, task, folder))
        for i in range(options.warm_up + rounds):
            # Who goes first changes, so that a machine that slows down or speeds up favours neither.
            for side in sides if i % 2 == 0 else reversed(sides):
                figures[side.name].append(side.step())
                if side.name == "ours" and options.bare and task.model is None:
                    parts = side.ask("bare")
                    lengths = figures["ours"][-1]["lengths"]
                    figures["bare"].append({**parts, "seconds": parts["generate"] + parts["train"], "lengths": lengths})
            print(f"{name}: round {i + 1 - options.warm_up} of {rounds}", file=sys.stderr)
        for side in sides:
            side.watched_step()
    finally:
        for side in sides:
            side.close()
    return {
        "task": asdict(task),
        "load": load,
        "tuning": tuning if len(tuning) > 1 else {},
        "threads": {side.name: side.threads for side in sides},
        "ready": {side.name: side.ready_seconds for side in sides},
        "peak_memory": {side.name: side.peak_memory for side in sides},
        "rounds": {side: rows[options.warm_up :] for side, rows in figures.items()},
    }


def measure_start(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds from each side's command to what it then does, round by round."""
    rounds, load = options.rounds or ROUNDS["start"], machine()["load before"]
    task = quickstart_task(options, folder, 1)
    ours = [sys.executable, str(HERE / "trl_ours.py"), "--first-token", "{notes}", "train"]
    ours += [str(QUICKSTART[0] / QUICKSTART[1]), f"pretrain={task.model}", *options.set]
    trl = [options.trl_python, str(HERE / "trl_theirs.py"), "--first-token", "{notes}", "--folder", str(folder)]
    trl += ["--task", json.dumps(asdict(task)), "--per-device", str(task.rows)]
    commands = {name: command for name, command in (("trl", trl), ("ours", ours)) if options.only in (None, name)}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for i in range(options.warm_up + rounds):
        for name in list(commands) if i % 2 == 0 else reversed(list(commands)):
            output = [f"output_dir={folder}/start{i}"] if name == "ours" else []
            figures[name].append(seconds_to([*commands[name], *output], options.threads))
        print(f"start: round {i + 1 - options.warm_up} of {rounds}", file=sys.stderr)
    return {"load": load, "rounds": {name: rows[options.warm_up :] for name, rows in figures.items()}}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all workloads that were asked for, and the machine."""
    packages = {} if options.only == "ours" else {"trl": versions(options.trl_python)}
    run: dict[str, Any] = {"machine": {**machine(), "packages": {**packages, "ours": versions(sys.executable)}}}
    run["workloads"] = {}
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            started = name == "start"
            run["workloads"][name] = measure_start(options, path) if started else measure_steps(name, options, path)
        if options.json is not None:
            options.json.write_text(json.dumps(run))
    return run


def prepared_model() -> Path:
    """Return the folder of the quickstart's model; the first call makes it."""
    from roll.utils.models import prepare_smollm2

    return prepare_smollm2()


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO against TRL's: whole steps, start-up and memory.")
    parser.add_argument("--trl-python", default="python", help="interpreter of the environment that has TRL")
    parser.add_argument("--workloads", nargs="+", choices=list(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help="of each workload; default: 7, the quickstart 3, the start 5")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also write every figure to this file, after each workload")
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSON", help="only print the tables of such files")
    parser.add_argument("--only", choices=["ours", "trl"], help="measure one side alone")
    parser.add_argument("--bare", action="store_true", help="also the parts of our step by themselves (random models)")
    for size in ("prompts", "samples", "prompt-length", "response-length", "mean-length"):
        parser.add_argument(f"--{size}", type=int, help="of the random models' workloads, in place of their own")
    parser.add_argument("--engine", default="hf_infer", help="our engine for the random models: hf_infer or vllm")
    parser.add_argument("--per-device", type=int, default=16, help="our responses per pass (random models)")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further keys of our side")
    parser.add_argument("--model", type=Path, help="of the quickstart and the start; default: SmolLM2-135M-Instruct")
    parser.add_argument("--trl-per-device", type=int, nargs="+", help="TRL's responses per pass to try")
    parser.add_argument("--trl-cache", help="cache_implementation of TRL's generate")
    parser.add_argument("--trl-options", nargs="*", default=[], choices=["bf16", "compile", "continuous"])
    options = parser.parse_args()
    if options.table:
        print(report([json.loads(path.read_text()) for path in options.table]))
        return
    if options.model is None and {"quickstart", "start"} & set(options.workloads):
        options.model = prepared_model()
    print(report([measure(options)]))


if __name__ == "__main__":
    main()
