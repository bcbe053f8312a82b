"""Does a small model learn word problems by reinforcement? Runs of examples/word_problems on MAWPS.

    OMP_NUM_THREADS=1 python benchmarks/word_problems_learning.py mawps.jsonl --search
    OMP_NUM_THREADS=1 python benchmarks/word_problems_learning.py mawps.jsonl --seeds 1 2 3

Each seed is two commands, the warm start and the training; accuracy is greedy, on the same held-out problems before and
after. `--search` tries other settings (`TRIED`) on seeds of its own and on training problems alone: it never reads a
held-out one. Intervals are paired, by problem. Finished runs below `--output` aren't run again.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "word_problems"
sys.path.insert(0, str(FOLDER))
from word_problems import HELD_OUT, SOLVED, Split, read, split, write_split  # noqa: E402 - a file of an example

SEARCH_SEEDS = (101,)
TRIED: Mapping[str, tuple[str, ...]] = {
    "as it is": (),
    "learning rate 3e-5": ("actor_train.training_args.learning_rate=3e-5",),
    "learning rate 6e-5": ("actor_train.training_args.learning_rate=6e-5",),
}
"""Settings of the training by name."""


@dataclass(frozen=True)
class Run:
    """What one seed reached."""

    before: Mapping[str, float]
    """Reward of each held-out problem."""
    after: Mapping[str, float]
    minutes: float
    processor_minutes: float

    @property
    def gains(self) -> dict[str, float]:
        """Difference of each problem."""
        return {prompt: self.after[prompt] - self.before[prompt] for prompt in self.before}


def run(parts: Split, seed: int, folder: Path, name: str, warm: Sequence[str], settings: Sequence[str]) -> Run:
    """Run the warm start and the training `name` of a seed, unless they are finished, and read its samples."""
    data, sft, rl = folder / "data", folder / "sft", folder / name
    if not (data / "held_out.jsonl").is_file():
        write_split(parts, data)
    solved = f"actor_train.data_args.file_name={data}/solved.jsonl"
    first = start("sft_word_problems", sft, f"seed={seed}", solved, *warm)
    then = start(
        "rlvr_word_problems", rl, f"seed={seed}", f"pretrain={sft}/hf_model",
        f"actor_train.data_args.file_name={data}/tasks.jsonl", f"validation.data_args.file_name={data}/held_out.jsonl",
        f"log_val_generations={len(parts.held_out)}", *settings,
    )  # fmt: skip
    samples: dict[int, dict[str, float]] = {}
    for line in (rl / "logs" / "samples.jsonl").read_text("utf-8").splitlines():
        sample = json.loads(line)
        samples.setdefault(sample["step"], {})[sample["prompt"]] = sample["reward"]
    before, after = samples[min(samples)], samples[max(samples)]
    assert len(before) == len(after) == len(parts.held_out), "a held-out problem has no reward"
    return Run(before, after, (first[0] + then[0]) / 60, (first[1] + then[1]) / 60)


def start(name: str, folder: Path, *settings: str) -> tuple[float, float]:
    """Run one configuration, unless it is finished; seconds by the clock and of processor time."""
    done = folder / "seconds.json"
    if not done.is_file():
        begun, used = time.monotonic(), processor_seconds()
        command = [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), "--config_path", str(FOLDER)]
        command += ["--config_name", name, "track_with=jsonl", f"output_dir={folder}", *settings]
        subprocess.run(command, check=True)
        done.write_text(json.dumps([time.monotonic() - begun, processor_seconds() - used]))
    seconds, processor = json.loads(done.read_text())
    return seconds, processor


def processor_seconds() -> float:
    """Return the processor time of all commands so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def interval(gains: Sequence[float]) -> str:
    """Return a mean of paired differences in points, with its 95 % interval."""
    mean = fmean(gains)
    half = 1.96 * (stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0)
    return f"{100 * mean:+.1f} points ({100 * (mean - half):+.1f} to {100 * (mean + half):+.1f})"


def table(title: str, runs: Mapping[str, Run]) -> str:
    """Return the runs as a Markdown table."""
    lines = [f"| {title} | warm start | trained | gain (95 %) | minutes | CPU minutes |", "|---|---|---|---|---|---|"]
    for name, each in runs.items():
        before, after = fmean(each.before.values()), fmean(each.after.values())
        cells = [name, f"{before:.1%}", f"{after:.1%}", interval(list(each.gains.values()))]
        lines.append(f"| {' | '.join(cells)} | {each.minutes:.1f} | {each.processor_minutes:.1f} |")
    return "\n".join(lines)


def search(options: argparse.Namespace, output: Path) -> None:
    """Try settings on problems that aren't held out, and print what each reached."""
    problems, runs = read(options.file), {}
    for seed in SEARCH_SEEDS:
        outer = split(problems, seed=seed, held_out=options.held_out, solved=options.solved)
        rest = [*outer.solved, *outer.tasks]
        parts = split(rest, seed=seed, held_out=options.held_out // 4, solved=options.solved)
        folder = output / "search" / f"seed{seed}"
        for name in options.only:
            settings = [*TRIED[name], *options.set]
            runs[f"{name}, {seed}"] = run(parts, seed, folder, name.replace(" ", "_"), options.set_warm, settings)
    print(table("settings, seed", runs))


def final(options: argparse.Namespace, output: Path) -> None:
    """Run the example as it is, and print each seed and the mean over all."""
    problems, seeds = read(options.file), options.seeds
    runs = {}
    for seed in seeds:
        parts = split(problems, seed=seed, held_out=options.held_out, solved=options.solved)
        runs[seed] = run(parts, seed, output / f"seed{seed}", "rl", options.set_warm, options.set)
    print(table("seed", {str(seed): each for seed, each in runs.items()}))
    prompts = runs[seeds[0]].before
    means = [fmean(each.gains[prompt] for each in runs.values()) for prompt in prompts]
    print(f"\nmean of {len(seeds)} seeds on {len(prompts)} problems: {interval(means)}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="mawps.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--search", action="store_true", help="try settings instead, on seeds of its own")
    parser.add_argument("--only", nargs="+", choices=TRIED, default=list(TRIED), help="of the search")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="problems; the search takes a quarter of them")
    parser.add_argument("--solved", type=int, default=SOLVED, help="problems that the warm start sees solved")
    parser.add_argument("--output", type=Path, default=Path("output/word_problems_learning"))
    parser.add_argument("--set-warm", nargs="*", default=[], metavar="key=value", help="keys of the warm start")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="keys of the training")
    options = parser.parse_args()
    output = options.output.resolve()
    (search if options.search else final)(options, output)


if __name__ == "__main__":
    main()
