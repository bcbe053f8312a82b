"""Does every recipe, and every way to run one, end where synchronous GRPO ends? Runs of examples/recipes/*_cpu.yaml.

    python benchmarks/recipes_learning.py --seeds 1 2 3 [--only grpo ppo ...] [--plot docs/learning/recipes.png]

Each seed has a warm start of its own. Finished runs below `--output` aren't run again. `async` is asynchronous
generation one step ahead, on two devices under Ray; `bf16` trains and samples in that type; `deepspeed` and `megatron`
train GRPO on these backends; `grpo_game` is GRPO on the game that `gigpo` plays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import hypot, sqrt
from pathlib import Path
from statistics import fmean, stdev

from preference_learning import ROOT, run

ASYNC = ("executor=ray", "num_gpus_per_node=2", "actor_train.device_mapping=0", "actor_infer.device_mapping=1",
         "async_generation_ratio=1", "policy_loss=decoupled_ppo")  # fmt: skip
BACKEND = "actor_train.strategy_args.strategy_name"
WAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("grpo", ()),
    "bf16": ("grpo", ("++actor_train.model_args.dtype=bf16", "++actor_infer.model_args.dtype=bf16")),
    "async": ("grpo", ASYNC),
    "deepspeed": ("grpo", (f"{BACKEND}=deepspeed_train",)),
    "megatron": ("grpo", (f"{BACKEND}=megatron_train",)),
    **{name: (name, ()) for name in (
        "ppo", "vapo", "dapo", "gspo", "cispo", "dr_grpo", "reinforce_plus_plus", "rejection_sampling", "gigpo"
    )},
    "grpo_game": ("gigpo", ("adv_estimator=grpo", "reward_normalization.method=identity")),
}  # fmt: skip
"""Recipe and settings by name."""
BASELINES = {"gigpo": "grpo_game"}
"""What a way is compared with, where that isn't `grpo`."""

Curve = tuple[list[int], list[float]]


def curve_of(way: str, seed: int, output: Path, settings: Sequence[str]) -> Curve:
    """Run one way with one seed, unless it is finished: steps and held-out accuracies."""
    recipe, own = WAYS[way]
    folder, first = output / f"seed{seed}" / way, output / f"seed{seed}" / "sft"
    data = output / f"seed{seed}" / "data"
    more: list[str] = []
    if recipe != "gigpo":
        run("sft_largest", first, f"seed={seed}", f"pretrain={data}/random_model",
            f"actor_train.data_args.file_name={data}/answers.jsonl", *settings)  # fmt: skip
        more = [f"pretrain={first}/hf_model", f"actor_train.data_args.file_name={data}/prompts.jsonl",
                f"validation.data_args.file_name={data}/held_out.jsonl"]  # fmt: skip
    if not (folder / "hf_model" / "config.json").is_file():
        start = [sys.executable, str(ROOT / "examples" / "start_pipeline.py")]
        where = ["--config_path", str(ROOT / "examples" / "recipes"), "--config_name", f"{recipe}_cpu"]
        command = [*start, *where, "track_with=jsonl", f"output_dir={folder}", f"seed={seed}", *more, *own, *settings]
        subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row["val/accuracy"]) for row in rows if "val/accuracy" in row]
    return [step for step, _ in points], [accuracy for _, accuracy in points]


def plot(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw the mean over seeds of each way, with a band from the lowest to the highest seed, beside GRPO's."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in curves if name not in ("grpo", *BASELINES.values())]
    columns = 4
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(11, 2.4 * rows), sharey=True, layout="constrained", squeeze=False
    )
    for axes, name in zip(grid.flat, names, strict=False):
        for shown, colour in ((BASELINES.get(name, "grpo"), "0.6"), (name, "tab:blue")):
            if shown not in curves:
                continue
            steps = curves[shown][0][0]
            values = [[100 * value for value in accuracy] for _, accuracy in curves[shown]]
            at = list(zip(*values, strict=True))
            axes.fill_between(steps, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.25, linewidth=0)
            axes.plot(steps, list(map(fmean, at)), color=colour)
        axes.set_title(f"{name} (a game)" if name in BASELINES else name, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(names) :]:
        axes.axis("off")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    for axes in grid[:, 0]:
        axes.set_ylabel("held out, right (%)")
        axes.set_ylim(0, 100)
    figure.savefig(path, dpi=120)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean over seeds."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--output", type=Path, default=Path("output/recipes_learning"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="settings for all runs")
    options = parser.parse_args()
    output = options.output.resolve()
    curves = {way: [curve_of(way, seed, output, options.set) for seed in options.seeds] for way in options.only}
    shown = [f"seed {seed}" for seed in options.seeds]
    print("| way | " + " | ".join(shown) + " | mean | standard error of the seeds | from its GRPO, +- |")
    print("| --- |" + " --- |" * (len(shown) + 3))
    ends = {way: [accuracy[-1] for _, accuracy in seeds] for way, seeds in curves.items()}
    for way, seeds in curves.items():
        cells = " | ".join(f"{accuracy[0]:.1%} -> {accuracy[-1]:.1%}" for _, accuracy in seeds)
        mean, error = fmean(ends[way]), _error(ends[way])
        base = BASELINES.get(way, "grpo")
        distance = "" if way == base or base not in ends or way in BASELINES.values() else (
            f"{100 * (mean - fmean(ends[base])):+.1f} +- {100 * hypot(error, _error(ends[base])):.1f} points"
        )  # fmt: skip
        print(f"| {way} | {cells} | {mean:.1%} | {100 * error:.1f} points | {distance} |")
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
