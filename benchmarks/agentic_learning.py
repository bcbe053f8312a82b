"""Do agents learn? Whole runs from nothing (warm start, then reinforcement learning) with several seeds.

    pip install matplotlib
    python benchmarks/agentic_learning.py examples/sokoban/agentic_sokoban_cpu.yaml --seeds 1 2 3
    python benchmarks/agentic_learning.py FILE --seeds 1 2 3 --plot docs/learning/sokoban.png

Every seed is a run of `examples/start_pipeline.py` in a process of its own; the time is that of the whole command.
Validation plays rooms or maps that training never plays. For comparison, an agent that acts at random and the
environment's own solver play the same validation seeds. Finished runs below `--output` aren't run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from roll.configs.parsing.loader import load_config
from roll.configs.schema.agentic_config import AgenticConfig
from roll.envs.base import Env
from roll.envs.baselines import random_score, scripted_score
from roll.envs.env_registry import bare_env, env_spec
from roll.envs.wrappers import EnvSpec
from roll.rollout.env_tasks import EnvTasks

START = Path(__file__).parents[1] / "examples" / "start_pipeline.py"


@dataclass(frozen=True)
class Curve:
    """One run."""

    seed: int
    steps: list[int]
    success: list[float]
    minutes: float
    random: float | None
    solver: float | None


def run(file: Path, seed: int, folder: Path, overrides: Sequence[str]) -> Curve:
    """Run one seed, unless its run is finished, and read its log."""
    settings = [f"seed={seed}", f"output_dir={folder}", *overrides]
    done = folder / "seconds.json"
    if not done.is_file():
        begun = time.monotonic()
        command = [sys.executable, str(START), "--config_path", str(file.parent), "--config_name", file.stem, *settings]
        subprocess.run(command, check=True)
        done.write_text(json.dumps(time.monotonic() - begun))
    config = load_config(file.parent, file.stem, settings)
    assert isinstance(config, AgenticConfig)
    lines = (config.logging_path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "val/accuracy" in row]
    random, solver = baselines(config)
    return Curve(
        seed=seed,
        steps=[row["step"] for row in rows],
        success=[row["val/accuracy"] for row in rows],
        minutes=json.loads(done.read_text()) / 60,
        random=random,
        solver=solver,
    )


def baselines(config: AgenticConfig) -> tuple[float | None, float | None]:
    """Return the success of the random agent and of the solver on the validation tasks, mean over tags; None for agents
    from elsewhere, which have neither."""
    manager = config.val_env_manager
    assert manager is not None, "a run without validation shows nothing"
    tags = config.tags_of(manager)
    env_types = {tag: config.custom_envs[tag].env_type for tag in tags}
    source = EnvTasks(tags, config.partition_of(manager), env_types, seed=config.seed, split="val")
    tasks = source.validation_tasks(config.validation_groups)
    randoms, solvers = [], []
    for tag in tags:
        section = config.custom_envs[tag]
        if section.agent is not None:
            return None, None
        spec = env_spec(tag, section, manager, config.env_workers.python)
        make = partial(with_actions, spec, tuple(section.action_lookup.values()))
        seeds = [task.seed for task in tasks if task.tag == tag]
        limit = section.max_steps * section.max_actions_per_step
        randoms.append(random_score(make, seeds, limit).success_rate)
        solved = scripted_score(make, seeds, limit)
        if solved is not None:
            solvers.append(solved.success_rate)
    return fmean(randoms), fmean(solvers) if solvers else None


def with_actions(spec: EnvSpec, actions: tuple[str, ...]) -> Env:
    """Return the environment; one that takes any text gets these actions, for the agent that draws them at random."""
    env = bare_env(spec)
    env.actions = env.actions or actions
    return env


def table(curves: Sequence[Curve]) -> str:
    """Return the runs as a Markdown table."""
    lines = ["| seed | random | warm start | trained | gain | solver | minutes |", "|---|---|---|---|---|---|---|"]
    for curve in curves:
        first, last = curve.success[0], curve.success[-1]
        solver = "–" if curve.solver is None else f"{curve.solver:.1%}"
        random = "–" if curve.random is None else f"{curve.random:.1%}"
        lines.append(
            f"| {curve.seed} | {random} | {first:.1%} | {last:.1%} | {100 * (last - first):+.1f} points | "
            f"{solver} | {curve.minutes:.1f} |"
        )
    return "\n".join(lines)


def plot(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draw success over training steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=120)
    for curve in curves:
        axes.plot(curve.steps, [100 * s for s in curve.success], marker="o", markersize=3, label=f"seed {curve.seed}")
    randoms = [curve.random for curve in curves if curve.random is not None]
    if randoms:
        axes.axhline(100 * fmean(randoms), color="grey", linestyle=":", label="random agent")
    solvers = [curve.solver for curve in curves if curve.solver is not None]
    if solvers:
        axes.axhline(100 * fmean(solvers), color="black", linestyle="--", linewidth=1, label="solver")
    axes.set(xlabel="training step (0: warm start)", ylabel="success on held-out tasks, %", ylim=(0, 102), title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a configuration of pipeline agentic with validation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, help="folder of the runs; default: output/learning/<name of the file>")
    parser.add_argument("--plot", type=Path, help="a PNG file to draw the curves to")
    parser.add_argument("--title", help="of the picture; default: the name of the file")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further keys")
    options = parser.parse_args()
    output = options.output or Path("output/learning") / options.file.stem
    curves = [run(options.file, seed, output / str(seed), options.set) for seed in options.seeds]
    print(table(curves))
    if options.plot:
        plot(curves, options.title or options.file.stem, options.plot)


if __name__ == "__main__":
    main()
