"""The tables of one or several runs of `grpo_vs_trl.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median, quantiles
from typing import Any

Rows = list[dict[str, Any]]
SIDES = {"trl": "TRL", "ours": "ours", "bare": "bare parts"}


def spread(values: Sequence[float]) -> str:
    """Return the median with the quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def ratios(first: Rows, second: Rows, unit: str) -> list[float]:
    """Return those of each round."""
    return [a[unit] / b[unit] for a, b in zip(first, second, strict=True)]


def per_token(rows: Rows, unit: str) -> float:
    """Return seconds or processor seconds per trained token, over all rounds together."""
    return sum(row[unit] for row in rows) / sum(sum(row["lengths"]) for row in rows)


def table(header: Sequence[str], lines: Iterator[Sequence[str]]) -> str:
    """Return a table of Markdown; empty without lines."""
    rows = list(lines)
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows]) + "\n"


def machines(runs: Sequence[dict[str, Any]]) -> str:
    """Return a line for each run about what it ran on."""
    lines = []
    for number, run in enumerate(runs, 1):
        where = dict(run["machine"])
        packages = where.pop("packages")
        cells = [f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
                 for name, value in where.items()]  # fmt: skip
        cells += [f"{SIDES[side]}: " + " ".join(f"{name} {version}" for name, version in of.items())
                  for side, of in packages.items()]  # fmt: skip
        lines.append(f"run {number}: {'; '.join(cells)}")
    return "\n".join(lines) + "\n"


def of_steps(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield (workload, number of the run, what it measured), a workload's runs together."""
    for name in dict.fromkeys(name for run in runs for name in run["workloads"] if name != "start"):
        for number, run in enumerate(runs, 1):
            if name in run["workloads"]:
                yield name, number, run["workloads"][name]


def step_lines(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for name, number, measured in of_steps(runs):
        for side, rows in measured["rounds"].items():
            if side == "bare" or not rows:
                continue
            tokens = [sum(row["lengths"]) for row in rows]
            rate = median(t / row["seconds"] for t, row in zip(tokens, rows, strict=True))
            processor, kernel = (median(row[unit] for row in rows) for unit in ("processor", "kernel"))
            yield [name, str(number), SIDES[side], spread([row["seconds"] for row in rows]),
                   f"{processor:.2f} ({kernel:.2f})", f"{rate:,.0f}", f"{fmean(tokens):,.0f}",
                   f"{fmean(max(row['lengths']) for row in rows):,.0f}",
                   f"{measured['peak_memory'][side] / 2**30:.2f}"]  # fmt: skip


def compared(runs: Sequence[dict[str, Any]], of: str, to: str) -> Iterator[list[str]]:
    """Yield the ratios of each run, and of several the range of their medians."""
    medians: dict[str, list[list[float]]] = {}
    for name, number, measured in of_steps(runs):
        first, second = (measured["rounds"].get(side) or [] for side in (of, to))
        if not first or not second:
            continue
        by_round = [ratios(first, second, unit) for unit in ("seconds", "processor")]
        by_token = [per_token(first, unit) / per_token(second, unit) for unit in ("seconds", "processor")]
        medians.setdefault(name, []).append([*map(median, by_round), *by_token])
        load = ", ".join(map(str, measured["load"]))
        yield [name, str(number), *map(spread, by_round), *(f"{ratio:.2f}" for ratio in by_token), load]
    for name, every in medians.items():
        if len(every) > 1:
            yield [name, "all", *(f"{min(column):.2f} to {max(column):.2f}" for column in zip(*every, strict=True)), ""]


def start_lines(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for number, run in enumerate(runs, 1):
        for side, rows in run["workloads"].get("start", {}).get("rounds", {}).items():
            cells = [spread([row[name] for row in rows]) if rows and name in rows[0] else ""
                     for name in ("first line", "built trainer", "first token")]  # fmt: skip
            if rows:
                yield [str(number), SIDES[side], *cells]


def start_ratios(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for number, run in enumerate(runs, 1):
        rounds = run["workloads"].get("start", {}).get("rounds", {})
        if rounds.get("trl") and rounds.get("ours"):
            pairs = list(zip(rounds["ours"], rounds["trl"], strict=True))
            yield [str(number), *(spread([ours["first token"] / trl[name] for ours, trl in pairs])
                                  for name in ("built trainer", "first token"))]  # fmt: skip


def tuning_lines(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for name, number, measured in of_steps(runs):
        if tried := measured["tuning"]:
            best = min(tried, key=tried.__getitem__)
            yield [name, str(number), best, ", ".join(f"{setting}: {s:.2f} s" for setting, s in tried.items())]


def report(runs: Sequence[dict[str, Any]]) -> str:
    """Return all tables."""
    ratio = ["workload", "run", "by the clock", "processor seconds", "per token", "per token, processor", "load before"]
    parts: list[tuple[str, list[str], Callable[[], Iterator[Sequence[str]]]]] = [
        ("", ["workload", "run", "side", "s per step", "processor s (kernel)", "tokens/s", "trained tokens", "longest",
              "peak GiB"], lambda: step_lines(runs)),
        ("TRL / ours", ratio, lambda: compared(runs, "trl", "ours")),
        ("our step / its bare parts", ratio, lambda: compared(runs, "ours", "bare")),
        ("TRL's responses per pass", ["workload", "run", "best", "tried"], lambda: tuning_lines(runs)),
        ("start-up, s", ["run", "side", "first line", "built trainer", "first token"], lambda: start_lines(runs)),
        ("our first token / TRL's start", ["run", "to a built trainer", "to its first token"],
         lambda: start_ratios(runs)),
    ]  # fmt: skip
    tables = [(title, table(header, lines())) for title, header, lines in parts]
    return machines(runs) + "".join(f"\n{title}\n\n{text}" if title else f"\n{text}" for title, text in tables if text)
