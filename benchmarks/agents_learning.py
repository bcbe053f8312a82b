"""Do unmodified agents of other frameworks learn? The toy of examples/agents with each of them.

    make install-agents && pip install matplotlib
    python benchmarks/agents_learning.py --seeds 1 2 3 --plot docs/learning/agents.png

Every seed of every framework is a run of `examples/start_pipeline.py` in a process of its own. Validation asks 100
questions that follow from other seeds than training's. Finished runs below `--output` aren't run again. AGENTS_PYTHON
is the interpreter with the frameworks, if it isn't that of .venv-agents.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentic_learning import Curve, run

AGENTS = Path(__file__).parents[1] / "examples" / "agents"
FRAMEWORKS = {
    "openai": "openai",
    "anthropic": "anthropic",
    "langgraph": "LangGraph",
    "openai_agents": "openai-agents",
    "smolagents": "smolagents",
    "coding": "a coding agent",
}
"""Ends of the configurations' names, and what users call them."""
GOAL = 0.9


@dataclass(frozen=True)
class Learnt:
    """One run: its curve, and what it cost after the warm start."""

    curve: Curve
    minutes: Sequence[float]
    """After the warm start, at each point of the curve."""
    calls: float
    """Of the policy, by episode."""
    failed: float
    """Agents that crashed, ran out of time or never called the policy."""
    mismatches: Mapping[str, float]
    """Messages that came back otherwise than sampled, by class."""

    @property
    def minutes_to_goal(self) -> float | None:
        """Return minutes until the first validation at the goal or above; None: there is none."""
        return next((at for at, right in zip(self.minutes, self.curve.success, strict=True) if right >= GOAL), None)


def learnt(name: str, seed: int, folder: Path, settings: Sequence[str]) -> Learnt:
    """Run one framework with one seed, unless it is done, and read its log."""
    curve = run(AGENTS / f"agentic_{name}.yaml", seed, folder, settings)
    rows = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    elapsed, minutes = 0.0, []
    for row in rows:
        elapsed += (row.get("time/step", 0.0) + row.get("time/validate", 0.0)) / 60
        if "val/accuracy" in row:
            minutes.append(elapsed)
    totals = {key: sum(row.get(key, 0.0) for row in rows) for row in rows for key in row if key.startswith("agent/")}
    return Learnt(
        curve=curve,
        minutes=minutes,
        calls=totals["agent/calls"] / totals["agent/episodes"],
        failed=sum(totals[f"agent/{what}"] for what in ("crashes", "timeouts", "never_called")),
        mismatches={key.removeprefix("agent/mismatch_"): n for key, n in totals.items() if "/mismatch_" in key and n},
    )


def table(runs: Mapping[str, Sequence[Learnt]]) -> str:
    """Return the runs as a Markdown table."""
    lines = [
        "| agent | seed | warm start | trained | best | minutes to 90 % | minutes | calls an episode | failed "
        "| sent back otherwise |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in runs.items():
        for one in results:
            success, goal = one.curve.success, one.minutes_to_goal
            otherwise = ", ".join(f"{kind} {n:.0f}" for kind, n in sorted(one.mismatches.items())) or "–"
            lines.append(
                f"| {FRAMEWORKS[name]} | {one.curve.seed} | {success[0]:.0%} | {success[-1]:.0%} | {max(success):.0%} "
                f"| {'–' if goal is None else f'{goal:.1f}'} | {one.minutes[-1]:.1f} | {one.calls:.1f} "
                f"| {one.failed:.0f} | {otherwise} |"
            )
    return "\n".join(lines)


def plot(runs: Mapping[str, Sequence[Learnt]], path: Path) -> None:
    """Draw success over training steps, a colour per framework and a line per seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained", dpi=120)
    for number, (name, results) in enumerate(runs.items()):
        for i, one in enumerate(results):
            right = [100 * share for share in one.curve.success]
            axes.plot(
                one.curve.steps, right, color=f"C{number}", marker=f"{'osD^vP'[number % 6]}", markersize=4,
                alpha=0.8, label=FRAMEWORKS[name] if i == 0 else None,
            )  # fmt: skip
    axes.axhline(100 * GOAL, color="grey", linestyle=":")
    axes.set(xlabel="training step (0: warm start)", ylabel="held-out questions answered rightly, %", ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--output", type=Path, default=Path("output/agents_learning"), help="folder of the runs")
    parser.add_argument("--plot", type=Path, help="a PNG file to draw the curves to")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further keys of all runs")
    options = parser.parse_args()
    settings = ["track_with=jsonl", "eval_steps=10", "log_val_generations=0", *options.set]
    runs = {
        name: [learnt(name, seed, options.output / name / str(seed), settings) for seed in options.seeds]
        for name in options.only
    }
    print(table(runs))
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
