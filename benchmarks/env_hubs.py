"""`roll envs test` over whole collections of environments: which of their ids start without a network, and which pass.

    nice -n 10 python benchmarks/env_hubs.py --hub reasoning_gym --output output/env_hubs
    nice -n 10 python benchmarks/env_hubs.py --hub gem --python path/to/venv/bin/python --output output/env_hubs
    python benchmarks/env_hubs.py --table docs/environment_hubs.md --output output/env_hubs

Each hub's environments are played one after the other, by one process, and by a second one with another PYTHONHASHSEED.
What was found goes to `<output>/<hub>.jsonl`, a line per id, as it is found; what is there already isn't played again.
`--table` writes the tables between the marks in a page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.configs.catalog.env_table import ENV_HUBS
from roll.envs.conformance import STOPPED
from roll.envs.env_probe import NOT_PLAYED, EnvProbes, ProbeEnded, Refused, findings_of
from roll.envs.probe_worker import ProbeRequest
from roll.envs.trial import run_seeds
from roll.envs.wrappers import EnvSpec

SEEDS, STEPS = 4, 30
FEW_SEEDS, FEW_STEPS, SLOW_S = 2, 6, 0.5
"""What is played of an environment that takes so many seconds to be made and to begin an episode."""
TIMEOUT_S, CHECK_S, TOTAL_S = 60.0, 60.0, 240.0
GYMNASIUM = (
    "CliffWalking-v1", "FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CartPole-v1", "MountainCar-v0",
    "MountainCarContinuous-v0", "Acrobot-v1",
)  # fmt: skip
LISTED_BY = {
    "gem": "import gem, gem.envs; ids = gem.envs.registration.ENV_REGISTRY",
    "reasoning_gym": "import reasoning_gym.factory as factory; ids = factory.DATASETS",
    "textarena": "import textarena; ids = textarena.envs.registration.ENV_REGISTRY",
    "minigrid": "import gymnasium, minigrid; ids = [i for i in gymnasium.registry if i.startswith(('Mini', 'Baby'))]",
}
"""Python that sets `ids`."""
NOT_FOR_ONE = re.compile(
    r"it isn't for one player|supports 2|a two-player game|exactly 2 players|players must be 2|2 ≤ players"
)
MARKS = ("<!-- tables of benchmarks/env_hubs.py -->", "<!-- end of the tables -->")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

Row = dict[str, Any]


def ids_of(hub: str, python: str) -> list[str]:
    """Return all ids of a hub, as its package lists them under an interpreter."""
    if hub == "gymnasium":
        return list(GYMNASIUM)
    code = f"{LISTED_BY[hub]}; import json; print('\\n' + json.dumps(sorted(map(str, ids))))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    ids: list[str] = json.loads(done.stdout.splitlines()[-1])
    return ids


def tested(probes: EnvProbes, env_type: str) -> Row:
    """Return what was found of one id: `result` is passed, in part, failed, no start or not for one."""
    spec = EnvSpec(tag="hub", env_type=env_type, action_pattern=None)
    order = ProbeRequest(spec, num_seeds=SEEDS, max_steps=STEPS, timeout_s=TIMEOUT_S, budget_s=CHECK_S)
    began = time.perf_counter()
    row: Row = {"id": env_type, "result": "passed", "findings": []}
    try:
        probes.get().ask("made", order)  # what it loads once is loaded now
    except (ProbeEnded, Refused) as error:
        row["result"] = "not for one" if NOT_FOR_ONE.search(str(error)) else "no start"
        row["why"] = str(error)
    else:
        begun = time.perf_counter()
        with suppress(ProbeEnded, Refused):  # of which the checks speak
            probes.get().ask("trace", replace(order, max_steps=1), run_seeds(1)[0])
        if time.perf_counter() - begun > SLOW_S:
            order = replace(order, num_seeds=FEW_SEEDS, max_steps=FEW_STEPS)
        findings = [finding for finding in findings_of(probes, order, TOTAL_S) if finding.level != "ok"]
        row["findings"] = [[finding.level, finding.check, finding.message, finding.where] for finding in findings]
        if wrong := [finding for finding in findings if finding.level == "error"]:
            row["result"] = "failed"
            row["why"] = "; ".join(f"{finding.check}: {finding.message}" for finding in wrong)
        elif any(finding.message.startswith((NOT_PLAYED, STOPPED)) for finding in findings):
            row["result"] = "in part"
            row["why"] = "nothing is wrong with what was played; it is too slow to play all: " + next(
                (finding.message for finding in findings if finding.check == "speed"), ""
            )
    row["seconds"] = round(time.perf_counter() - began, 2)
    return row


def sweep(hub: str, python: str, folder: Path, only: str, ids: Sequence[str] = ()) -> None:
    """Test the ids that aren't in the hub's file yet: all of the hub, or the given ones."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hub}.jsonl"
    done = {row["id"] for row in read(file)}
    ids = [name for name in ids or ids_of(hub, python) if re.search(only, name) and f"{hub}:{name}" not in done]
    interpreter = None if python == sys.executable else python
    with EnvProbes({**os.environ, **OFFLINE}, timeout_s=TIMEOUT_S, python=interpreter) as probes, file.open("a") as out:
        for number, name in enumerate(ids, 1):
            row = tested(probes, f"{hub}:{name}")
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{number}/{len(ids)} {row['id']}: {row['result']} {row.get('why', '')[:160]}", flush=True)


def read(file: Path) -> list[Row]:
    """Return the rows of a file, the last one of each id; none if there is no file."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    return list({row["id"]: row for row in rows}.values())


def tables(rows_of: Mapping[str, Sequence[Row]]) -> str:
    """Return the tables as Markdown: counts by hub, and what doesn't start or fails."""
    lines = ["| hub | ids | for one player | start offline | pass | pass as far as played | share |"]
    lines.append("|---|---|---|---|---|---|---|")
    reasons: list[str] = []
    for hub, rows in rows_of.items():
        count = Counter(row["result"] for row in rows)
        alone = len(rows) - count["not for one"]
        starting = alone - count["no start"]
        share = f"{count['passed'] / starting:.1%}" if starting else ""
        passed = f"{count['passed']} | {count['in part']} | {share}"
        lines.append(f"| {hub} | {len(rows)} | {alone} | {starting} | {passed} |")
        groups: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if row["result"] in ("no start", "failed", "in part"):
                groups.setdefault((row["result"], reason(row["why"])), []).append(row["id"].partition(":")[2])
        for (result, why), ids in sorted(groups.items()):
            shown = ", ".join(f"`{name}`" for name in ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
            reasons.append(f"| {hub} | {result} | {len(ids)} | {shown} | {why} |")
    table = ["| hub | result | ids | which | why |", "|---|---|---|---|---|", *reasons]
    return "\n".join([*lines, "", *(table if reasons else ["Nothing fails."])])


def reason(why: str) -> str:
    """Return what a message says without what differs between ids: names, numbers, texts, paths, colours."""
    text = re.sub(r"\x1b\[\d*m", "", why)
    text = re.sub(r"^.*?: \w+ can't make '[^']*': ", "", text)
    text = re.sub(r"custom_envs\.hub\.\w+: \S+: ", "", text)
    text = re.sub(r", line \d+\)$", ")", text)
    text = re.sub(r"( directory not found): \S+$", r"\1", text)
    text = re.sub(r",? first in line \d+ of its trace: .*?(?=\. [A-Z]|; \w[\w ,-]*: |$)", "", text, flags=re.DOTALL)
    text = re.sub(r"\bof seed \d{5,}", "of a seed", text)
    text = re.sub(r"(/[\w.-]+)+/(?=[\w.-])|\b\d{5,}\b ?", "", text)
    text = re.sub(r"\. (Draw from|Please use|The clock).*?(?=; \w[\w ,-]*: |$)", "", text, flags=re.DOTALL)
    text = " ".join(text.split()).rstrip(" :").replace("|", "\\|")
    return text if len(text) <= 260 else f"{text[:260]}..."


def write_tables(page: Path, folder: Path) -> None:
    """Put the tables between the marks of a page."""
    rows_of = {file.stem: read(file) for file in sorted(folder.glob("*.jsonl"))}
    text = page.read_text("utf-8")
    before, begin, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{page} lacks the lines {MARKS[0]} and {MARKS[1]}")
    page.write_text(f"{before}{begin}\n\n{tables(rows_of)}\n\n{end}{after}", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hub", choices=ENV_HUBS)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the hub's package")
    parser.add_argument("--only", default="", help="a regular expression: ids that it is found in")
    parser.add_argument("--ids", nargs="+", default=(), help="these, e.g. the address of a server, instead of all")
    parser.add_argument("--output", type=Path, default=Path("output/env_hubs"))
    parser.add_argument("--table", type=Path, help="write the tables into this page")
    options = parser.parse_args()
    if options.hub:
        sweep(options.hub, options.python, options.output, options.only, options.ids)
    if options.table:
        write_tables(options.table, options.output)


if __name__ == "__main__":
    main()
