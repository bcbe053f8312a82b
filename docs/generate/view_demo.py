r"""Make the recorded runs of `roll view --demo` from runs that took place: some of their steps, with no machine named.

    roll quickstart output_dir=RUN rollout_dump_dir=RUN/rollouts eval_steps=8 \
        'rollout_dump_outputs=[old_logprobs,entropies]'
    python docs/generate/view_demo.py RUN quickstart --steps 1 2 4 6 8 10 12 14 16

    dial="seed=1 max_steps=60 eval_steps=5 save_steps=20 tracing.enabled=true train_env_manager.num_env_groups=8 \
        rollout_batch_size=64 val_env_manager.num_env_groups=16 track_with=[jsonl] \
        custom_envs.dial.env_type=docs/generate/jammed_dial.py:JammedDial rollout_dump_outputs=[old_logprobs,entropies]"
    roll train examples/custom_env/agentic_dial exp_name=dial output_dir=RUN rollout_dump_dir=RUN/rollouts $dial \
        actor_infer.model_args.dtype=bf16
    python docs/generate/view_demo.py RUN dial --steps 5 50 --traced 50
    roll train examples/custom_env/agentic_dial exp_name=dial-collapsed output_dir=RUN2 \
        rollout_dump_dir=RUN2/rollouts $dial entropy_loss_coef=0 actor_train.training_args.learning_rate=2.0e-2 \
        actor_train.training_args.lr_scheduler_type=constant
    python docs/generate/view_demo.py RUN2 dial-collapsed --steps 5 50
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from roll.tracking.recorded_responses import logs_folder, rollouts, steps_of
from roll.tracking.rollouts import KINDS, Kind, write_rollouts
from roll.workbench.view.export import HERE
from roll.workbench.view.spans import SPANS_FILE, trace_id

OF_THE_MACHINE = ("host", "pid", "output_dir", "started")
TRACED_EPISODES = 8


def main() -> None:
    """Copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name", help="folder of the demo")
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="which to keep")
    parser.add_argument("--traced", type=int, help=f"the step of which {TRACED_EPISODES} episodes keep their spans")
    options = parser.parse_args()
    run, demo = options.run, HERE / options.name
    shutil.rmtree(demo, ignore_errors=True)
    (demo / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "events.jsonl", "dropped.jsonl"):
        lines = (logs_folder(run) / name).read_text(encoding="utf-8").splitlines()
        selected = [line for line in lines if name != "dropped.jsonl" or json.loads(line)["step"] in options.steps]
        (demo / "logs" / name).write_text("".join(anywhere(line) + "\n" for line in selected), encoding="utf-8")
    for name in ("run.json", "live.json"):
        about = json.loads((logs_folder(run) / name).read_text(encoding="utf-8"))
        about = {key: value for key, value in about.items() if key not in OF_THE_MACHINE}
        about |= {"rollouts": "../rollouts"} if name == "run.json" else {}
        (demo / "logs" / name).write_text(json.dumps(about) + "\n", encoding="utf-8")
    recorded, traces = rollouts(run), set()
    if options.traced:
        rows = list(recorded.rows(options.traced))[:TRACED_EPISODES]
        traces = {trace_id(row["trace"]) for row in rows}
        copy_spans(logs_folder(run) / SPANS_FILE, demo / "logs" / SPANS_FILE, traces)
    for kind in KINDS:
        there = steps_of(recorded.folder, kind)
        validates = kind == "validation" and options.name == "quickstart"
        for step in there if validates else [step for step in options.steps if step in there]:
            copy(demo, run, step, kind, traces)


def copy(demo: Path, run: Path, step: int, kind: Kind, traces: set[str]) -> None:
    """Write a step's rows again, in the schema of today."""
    recorded = rollouts(run)
    rows = list(recorded.rows(step, kind=kind))
    texts = {token: text for row in rows for token, text in zip(row["token_ids"], row["token_texts"], strict=True)}
    for row in rows:
        row["turns"] = [{**turn, "metrics": list((turn["metrics"] or {}).items())} for turn in row["turns"]]
        row["error"], row["dropped"] = anywhere(row["error"]), anywhere(row["dropped"])
        row["trace"] = row["trace"] if trace_id(row["trace"]) in traces else ""
    notes = recorded.notes(step, kind=kind)
    write_rollouts(
        demo / "rollouts", step, rows, kind=kind, notes=notes, token_text=lambda ids: [texts[i] for i in ids]
    )


def copy_spans(source: Path, target: Path, traces: set[str]) -> None:
    """Keep the spans of some traces."""
    with target.open("w", encoding="utf-8") as out:
        for line in source.read_text(encoding="utf-8").splitlines():
            content = json.loads(line)
            for part in content["resourceSpans"]:
                part["resource"] = {}
                part["scopeSpans"] = [
                    {**scope, "spans": spans}
                    for scope in part["scopeSpans"]
                    if (spans := [span for span in scope["spans"] if span["traceId"] in traces])
                ]
            content["resourceSpans"] = [part for part in content["resourceSpans"] if part["scopeSpans"]]
            if content["resourceSpans"]:
                out.write(json.dumps(content, separators=(",", ":")) + "\n")


def anywhere(text: Any) -> Any:
    """Return a text without the folder that this runs in."""
    return text.replace(f"{Path.cwd()}/", "") if isinstance(text, str) else text


if __name__ == "__main__":
    main()
