"""How many engines do I need? A run in virtual time, in a few real seconds.

    python -m benchmarks.simulation --engines 2 --groups 64 --group-size 8 --median 600 --sigma 1.0 \\
        --train-seconds 60 --sync-seconds 5 --modes sync over-sampled:16 async:1

prints one row per mode: time of a step, how busy engines and trainer are, staleness, what was thrown away. Scheduler,
episode player and engine driver are those of a run; tokens, environments and training are made up, and time is virtual
(`virtual_clock.py`). docs/scheduler.md says how to measure the numbers that go in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulation.engine_model import EngineModel, Lengths, LognormalLengths, ParetoLengths
from benchmarks.simulation.scenario import Outcome, Scenario, simulate
from benchmarks.simulation.simulated_episodes import EpisodeModel

COLUMNS = ("mode", "engines", "step s", "responses/s", "engines busy", "of peak tokens/s", "trainer busy", "staleness",
           "returned", "wasted")  # fmt: skip


def with_mode(scenario: Scenario, mode: str) -> Scenario:
    """Return the scenario in mode `sync`, `over-sampled:<extra prompts>` or `async:<async_generation_ratio>`."""
    name, _, number = mode.partition(":")
    try:
        if name == "sync" and not number:
            return replace(scenario, extra_prompts=0, async_ratio=0.0)
        if name == "over-sampled":
            return replace(scenario, extra_prompts=int(number), async_ratio=0.0)
        if name == "async" and float(number) > 0:
            return replace(scenario, extra_prompts=0, async_ratio=float(number))
    except ValueError:
        pass
    raise ValueError(f"unknown mode {mode!r}; expected sync, over-sampled:<extra prompts> or async:<ratio above 0>")


def row(mode: str, outcome: Outcome) -> tuple[str, ...]:
    """Return one line of the table."""
    scenario, total = outcome.scenario, max(1, outcome.trained_tokens)
    staleness = ", ".join(f"{age}: {tokens / total:.0%}" for age, tokens in sorted(outcome.staleness.items()))
    return (
        mode,
        str(scenario.engines),
        f"{outcome.step_seconds:.1f}",
        f"{scenario.groups * scenario.group_size / outcome.step_seconds:.1f}",
        f"{outcome.engines_busy:.0%}",
        f"{outcome.engine_utilisation:.0%}",
        f"{outcome.trainer_busy:.0%}",
        staleness,
        f"{outcome.counters.get('rollout/returned_prompts', 0) / scenario.steps:.1f}",
        f"{outcome.wasted_share:.0%}",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parser().parse_args(arguments)
    lengths: Lengths = LognormalLengths(median=args.median, sigma=args.sigma)
    if args.pareto is not None:
        lengths = ParetoLengths(shortest=args.median * 0.5 ** (1 / args.pareto), alpha=args.pareto)
    try:
        base = Scenario(
            engine=EngineModel(
                max_running_requests=args.max_running_requests,
                step_seconds=args.decode_step_seconds,
                step_seconds_per_request=args.decode_step_seconds_per_request,
                prefill_tokens_per_second=args.prefill_tokens_per_second,
            ),
            lengths=lengths,
            episode=EpisodeModel(prompt_tokens=args.prompt_tokens, turns=args.turns, env_seconds=args.env_seconds),
            steps=args.steps,
            groups=args.groups,
            group_size=args.group_size,
            max_new_tokens=args.max_new_tokens,
            filtered_share=args.filtered_share,
            train_seconds=args.train_seconds,
            sync_seconds=args.sync_seconds,
            seed=args.seed,
        )
        scenarios = [(m, with_mode(replace(base, engines=n), m)) for n in args.engines for m in args.modes]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    sys.stdout.write(table([row(mode, simulate(scenario)) for mode, scenario in scenarios]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[2], help="one row each")
    add("--modes", nargs="+", default=["sync", "over-sampled:16", "async:1"], help="sync, over-sampled:N, async:R")
    add("--steps", type=int, default=8, help="training steps; the first isn't measured")
    add("--groups", type=int, default=64, help="rollout_batch_size: prompts of a step")
    add("--group-size", type=int, default=8, help="num_return_sequences_in_group")
    add("--prompt-tokens", type=int, default=512)
    add("--median", type=float, default=600, help="tokens of the median response")
    add("--sigma", type=float, default=1.0, help="spread of the lognormal: mean = median * exp(sigma^2 / 2)")
    add("--pareto", type=float, metavar="ALPHA", help="a Pareto tail with this power, same median, in place of sigma")
    add("--max-new-tokens", type=int, default=8192, help="response_length: cuts the tail")
    add("--turns", type=int, default=1, help="responses per episode")
    add("--env-seconds", type=float, default=0.0, help="one step of an environment, or one reward")
    add("--filtered-share", type=float, default=0.0, help="groups that query_filter_config drops")
    add("--train-seconds", type=float, default=60.0, help="a step without generation and weights")
    add("--sync-seconds", type=float, default=5.0, help="new weights to the engines")
    add("--max-running-requests", type=int, default=128, help="per engine")
    add("--decode-step-seconds", type=float, default=0.012, help="a decode step of a nearly empty engine")
    add("--decode-step-seconds-per-request", type=float, default=0.0001, help="what each running request adds")
    add("--prefill-tokens-per-second", type=float, default=20_000.0)
    add("--seed", type=int, default=0)
    return parser
