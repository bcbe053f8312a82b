"""Are preferences learnt, and does a policy learn from a reward model that learnt them? Runs of examples/preferences.

    python benchmarks/preference_learning.py --seeds 1 2 3 [--losses sigmoid ipo ...] [--no-policy]

Each seed has a warm start, a run of `pipeline: dpo` for each loss, one of `pipeline: reward_model`, and one of RLVR
with that reward model. Finished runs below `--output` aren't run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLISHED = {"ipo": ["beta=1.0"], "robust": ["label_smoothing=0.1"], "simpo": ["beta=2.0"], "orpo": ["beta=0.5"]}
"""Options that losses need, or are published with."""


def run(name: str, folder: Path, *settings: str) -> tuple[float, float]:
    """Run one configuration of examples/preferences, unless it is finished: held-out accuracy before and after."""
    if not (folder / "hf_model" / "config.json").is_file():
        start = [sys.executable, str(ROOT / "examples" / "start_pipeline.py")]
        where = ["--config_path", str(ROOT / "examples" / "preferences"), "--config_name", name]
        subprocess.run([*start, *where, "track_with=jsonl", f"output_dir={folder}", *settings], check=True)
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    accuracies = [row["val/accuracy"] for row in map(json.loads, lines) if "val/accuracy" in row]
    return (accuracies[0], accuracies[-1]) if accuracies else (0.0, 0.0)


def seed_of(seed: int, output: Path, losses: Sequence[str], policy: bool, quick: Sequence[str]) -> dict[str, str]:
    """Run one seed; what to print by run."""
    folder = output / f"seed{seed}"
    data, first = folder / "data", folder / "sft" / "hf_model"
    pairs = [f"actor_train.data_args.file_name={data}/pairs.jsonl",
             f"validation.data_args.file_name={data}/held_out_pairs.jsonl"]  # fmt: skip
    run("sft_largest", folder / "sft", f"seed={seed}", f"pretrain={data}/random_model",
        f"actor_train.data_args.file_name={data}/answers.jsonl", *quick)  # fmt: skip
    common = [f"seed={seed}", f"pretrain={first}", *quick]
    result = {}
    for loss in losses:
        options = [f"loss_type={loss}", *PUBLISHED.get(loss, ())]
        if loss in ("simpo", "orpo"):
            options.append("reference=null")
        _, after = run("dpo_largest", folder / loss, *common, *pairs, *options)
        result[f"dpo, {loss}"] = f"{after:.1%}"
    if policy:
        model = folder / "reward_model"
        _, after = run("reward_model_largest", model, *common, *pairs)
        result["reward_model"] = f"{after:.1%}"
        tasks = [f"actor_train.data_args.file_name={data}/prompts.jsonl",
                 f"validation.data_args.file_name={data}/held_out.jsonl"]  # fmt: skip
        scores = f"reward_model.model_args.model_name_or_path={model}/hf_model"
        before, after = run("rlvr_largest", folder / "rlvr", *common, *tasks, scores)
        result["rlvr with it"] = f"{before:.1%} -> {after:.1%}"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--losses", nargs="*", default=["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo"])
    parser.add_argument("--no-policy", action="store_true", help="preferences alone")
    parser.add_argument("--output", type=Path, default=Path("output/preference_learning"))
    parser.add_argument("--set", nargs="*", default=[], help="settings for all runs")
    options = parser.parse_args()
    output = options.output.resolve()
    seeds = {seed: seed_of(seed, output, options.losses, not options.no_policy, options.set) for seed in options.seeds}
    print("| held-out accuracy | " + " | ".join(f"seed {seed}" for seed in seeds) + " |")
    print("| --- |" + " --- |" * len(seeds))
    for name in next(iter(seeds.values())):
        print(f"| {name} | " + " | ".join(result[name] for result in seeds.values()) + " |")


if __name__ == "__main__":
    main()
