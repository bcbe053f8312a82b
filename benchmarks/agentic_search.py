"""Settings of a small agent's recipe, tried on seeds that no table reports.

    OMP_NUM_THREADS=1 python benchmarks/agentic_search.py sokoban --seeds 11 [--only "four layers"]

A try is a shipped configuration with another model, other demonstrations or some keys changed. It is a warm start and a
run per seed, in processes of their own; validation plays rooms or maps that training never plays. Finished runs below
`--output` aren't run again. docs/benchmarks.md has what came of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from small_agents import prepare  # noqa: E402 - beside the configurations

from roll.configs.parsing.loader import load_config  # noqa: E402
from roll.configs.schema.agentic_config import AgenticConfig  # noqa: E402
from roll.configs.schema.sft_config import SFTConfig  # noqa: E402


@dataclass(frozen=True)
class Try:
    """How a recipe differs from the shipped files."""

    warm_steps: int
    steps: int
    layers: int = 2
    episodes: int = 600
    """Rooms or maps that are demonstrated."""
    run: tuple[str, ...] = ()
    """Other keys of the training run."""


def lake(rate: float, entropy: float) -> tuple[str, ...]:
    """Return keys for a learning rate and a share of the entropy in the loss."""
    return (f"actor_train.training_args.learning_rate={rate}", f"entropy_loss_coef={entropy}")


def sokoban(rate: float, entropy: float, actions: int) -> tuple[str, ...]:
    """Return the same, and a key for the actions of an episode of training."""
    return (*lake(rate, entropy), f"custom_envs.sokoban.max_steps={actions}")


SEARCHES: Mapping[str, tuple[str, Mapping[str, Try]]] = {
    "sokoban": ("examples/sokoban/agentic_sokoban_cpu.yaml", {
        "80 steps": Try(80, 80, run=sokoban(1e-3, 0.01, 10)),
        "300 steps": Try(80, 300, run=sokoban(1e-3, 0.01, 10)),
        "entropy 0.03": Try(80, 300, run=sokoban(1e-3, 0.03, 10)),
        "entropy 0.2": Try(80, 300, run=sokoban(1e-3, 0.2, 10)),
        "more shown": Try(200, 250, episodes=3000, run=sokoban(1e-3, 0.05, 15)),
        "four layers": Try(120, 250, layers=4, episodes=2000, run=sokoban(1e-3, 0.05, 12)),
        "shipped": Try(250, 250, layers=4, episodes=3000, run=sokoban(7e-4, 0.05, 12)),
    }),
    "frozen_lake_8x8": ("examples/frozen_lake/agentic_frozen_lake_8x8_cpu.yaml", {
        "as 4x4": Try(120, 150, run=lake(1e-3, 0.01)),
        "more shown": Try(500, 1, episodes=3000, run=lake(1e-3, 0.01)),
        "four layers": Try(500, 80, layers=4, episodes=3000, run=lake(1e-3, 0.01)),
        "shipped": Try(1000, 40, layers=4, episodes=3000, run=lake(5e-4, 0.02)),
    }),
}  # fmt: skip
"""The shipped file and what was tried, for each environment."""


def outcome(file: str, tried: Try, seed: int, folder: Path, settings: Sequence[str]) -> list[float]:
    """Run warm start and training unless they are finished; return success in every validation, then minutes."""
    path = ROOT / file
    config = load_config(path.parent, path.stem)
    assert isinstance(config, AgenticConfig) and config.warm_start is not None
    done = folder / "seconds.json"
    if not done.is_file():
        begun, model, warm = time.monotonic(), f"{folder}/warm_model", ROOT / config.warm_start
        keys = (f"seed={seed}", f"output_dir={folder}/warm", f"export_dir={model}", f"max_steps={tried.warm_steps}")
        first = load_config(warm.parent, warm.stem, keys)
        assert isinstance(first, SFTConfig)
        # The warm start takes the model and the demonstrations that are there.
        prepare(first, path.parent.name, path.stem, layers=tried.layers, episodes=tried.episodes)
        start(warm, *keys)
        own = (f"seed={seed}", f"output_dir={folder}/run", f"pretrain={model}", "warm_start=null", "track_with=jsonl")
        start(path, *own, f"max_steps={tried.steps}", *tried.run, *settings)
        done.write_text(json.dumps(time.monotonic() - begun))
    rows = [json.loads(line) for line in (folder / "run" / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [100 * row["val/accuracy"] for row in rows if "val/accuracy" in row] + [json.loads(done.read_text()) / 60]


def start(file: Path, *settings: str) -> None:
    """Run a configuration to its end."""
    where = ["--config_path", str(file.parent), "--config_name", file.stem]
    command = [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), *where, *settings]
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> None:
    """Run, and print a line for every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=list(SEARCHES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12])
    parser.add_argument("--only", nargs="+", metavar="TRY", help="some of the tries")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: output/search/<environment>")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further keys of every run")
    options = parser.parse_args()
    file, tries = SEARCHES[options.environment]
    output = options.output or Path("output/search") / options.environment
    print("| tried | seed | warm start | trained | best | minutes |\n|---|---|---|---|---|---|")
    for name in options.only or tries:
        for seed in options.seeds:
            folder = output.absolute() / name.replace(" ", "_") / str(seed)
            *success, minutes = outcome(file, tries[name], seed, folder, options.set)
            cells = [f"{success[0]:.1f}%", f"{success[-1]:.1f}%", f"{max(success):.1f}%", f"{minutes:.1f}"]
            print(f"| {name} | {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
