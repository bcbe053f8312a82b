"""Does a student reach what its teacher learnt by reinforcement, and for how much less computing?

    python benchmarks/distill_learning.py --seeds 1 2 3 [--plot docs/learning/distill.png]

For each seed: the runs of examples/preferences (warm start, reward model, RLVR: the teacher), then the student of
examples/distill, which starts where the teacher started. Processor seconds are those of the run's own process, start
included; runs are inline, so there are no others. Finished runs below `--output` aren't run again.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preference_learning import ROOT, run

Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Pair:
    """Teacher and student of one seed: held-out accuracy by processor seconds."""

    seed: int
    teacher: Points
    student: Points

    @property
    def share(self) -> float:
        """Return what the student reaches of the teacher's gain."""
        (_, taught), (_, reached) = self.teacher, self.student
        return (reached[-1] - reached[0]) / (taught[-1] - taught[0])


def timed(name: str, config_path: str, folder: Path, *settings: str) -> Points:
    """Run one configuration, unless it is finished; accuracies, and the processor seconds at which they were reached.

    A run's seconds are spread over its steps as its own clock says.
    """
    cost = folder / "processor_seconds.json"
    if not cost.is_file():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = [sys.executable, str(ROOT / "examples" / "start_pipeline.py")]
        where = ["--config_path", str(ROOT / "examples" / config_path), "--config_name", name]
        subprocess.run([*start, *where, "track_with=jsonl", f"output_dir={folder}", *settings], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cost.write_text(json.dumps(spent))
    rows = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    last, total = rows[-1]["step"], float(json.loads(cost.read_text()))
    points = [(total * row["step"] / last, row["val/accuracy"]) for row in rows if "val/accuracy" in row]
    return [at for at, _ in points], [accuracy for _, accuracy in points]


def pair_of(seed: int, output: Path, settings: Sequence[str]) -> Pair:
    """Run one seed."""
    folder = output / f"seed{seed}"
    data, first, judge = folder / "data", folder / "sft" / "hf_model", folder / "reward_model"
    run("sft_largest", folder / "sft", f"seed={seed}", f"pretrain={data}/random_model",
        f"actor_train.data_args.file_name={data}/answers.jsonl", *settings)  # fmt: skip
    run("reward_model_largest", judge, f"seed={seed}", f"pretrain={first}", *settings,
        f"actor_train.data_args.file_name={data}/pairs.jsonl",
        f"validation.data_args.file_name={data}/held_out_pairs.jsonl")  # fmt: skip
    common = [f"seed={seed}", f"pretrain={first}", f"actor_train.data_args.file_name={data}/prompts.jsonl",
              f"validation.data_args.file_name={data}/held_out.jsonl", *settings]  # fmt: skip
    scores = f"reward_model.model_args.model_name_or_path={judge}/hf_model"
    teacher = timed("rlvr_largest", "preferences", folder / "rlvr", *common, scores)
    taught = f"teacher.model_args.model_name_or_path={folder}/rlvr/hf_model"
    return Pair(seed, teacher, timed("distill_largest", "distill", folder / "distill", *common, taught))


def plot(pairs: Sequence[Pair], path: Path) -> None:
    """Draw accuracy over processor seconds, a line per seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, colour, lines in (
        ("reinforcement learning (the teacher)", "tab:blue", [pair.teacher for pair in pairs]),
        ("on-policy distillation from it", "tab:orange", [pair.student for pair in pairs]),
    ):
        for i, (seconds, accuracy) in enumerate(lines):
            axes.plot(seconds, [100 * value for value in accuracy], color=colour, label=name if i == 0 else None)
    axes.set_xlabel("processor seconds")
    axes.set_ylabel("held-out prompts answered rightly (%)")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("output/distill_learning"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="settings for all runs")
    options = parser.parse_args()
    pairs = [pair_of(seed, options.output.resolve(), options.set) for seed in options.seeds]
    print("| seed | start | teacher | processor s | student | processor s | share of the gain | share of the time |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for pair in pairs:
        (spent, taught), (less, ours) = pair.teacher, pair.student
        share = f"{pair.share:.0%}" if taught[-1] != taught[0] else "-"
        print(f"| {pair.seed} | {ours[0]:.1%} | {taught[-1]:.1%} | {spent[-1]:.1f} | {ours[-1]:.1%} | {less[-1]:.1f} "
              f"| {share} | {less[-1] / spent[-1]:.0%} |")  # fmt: skip
    if options.plot:
        plot(pairs, options.plot)


if __name__ == "__main__":
    main()
