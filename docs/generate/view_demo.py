r"""Make the recorded run of `roll view --demo` from a run of the quickstart: some of its steps, with no machine named.

    roll quickstart output_dir=RUN rollout_dump_dir=RUN/rollouts eval_steps=8 \
        'rollout_dump_outputs=[old_logprobs,entropies]'
    python docs/generate/view_demo.py RUN
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from roll.tracking.recorded import logs_folder, rollouts
from roll.tracking.rollouts import KINDS, Kind, write_rollouts
from roll.view.demo import demo_run

STEPS = (1, *range(2, 17, 2))
OF_THE_MACHINE = ("host", "pid", "output_dir", "started")


def main() -> None:
    """Copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run, demo = parser.parse_args().run, demo_run()
    shutil.rmtree(demo, ignore_errors=True)
    (demo / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "events.jsonl", "dropped.jsonl"):
        shutil.copy(logs_folder(run) / name, demo / "logs" / name)
    for name in ("run.json", "live.json"):
        about = json.loads((logs_folder(run) / name).read_text(encoding="utf-8"))
        kept = {key: value for key, value in about.items() if key not in OF_THE_MACHINE}
        kept |= {"rollouts": "../rollouts"} if name == "run.json" else {}
        (demo / "logs" / name).write_text(json.dumps(kept) + "\n", encoding="utf-8")
    found = rollouts(run)
    for kind in KINDS:
        for step in {"train": found.steps, "validation": found.validations}.get(kind, []):
            if kind != "train" or step in STEPS:
                copy(demo, run, step, kind)


def copy(demo: Path, run: Path, step: int, kind: Kind) -> None:
    """Write a step's rows again, in the schema of today."""
    found = rollouts(run)
    rows = list(found.rows(step, kind=kind))
    texts = {token: text for row in rows for token, text in zip(row["token_ids"], row["token_texts"], strict=True)}
    for row in rows:
        row["turns"] = [{**turn, "metrics": list((turn["metrics"] or {}).items())} for turn in row["turns"]]
    notes = found.notes(step, kind=kind)
    write_rollouts(
        demo / "rollouts", step, rows, kind=kind, notes=notes, token_text=lambda ids: [texts[i] for i in ids]
    )


if __name__ == "__main__":
    main()
