"""Whole steps of GRPO on this machine's accelerators, beside what `roofline.py` says they must take at least.

    python benchmarks/gpu_step.py --model Qwen/Qwen3-0.6B
    python benchmarks/gpu_step.py --model Qwen/Qwen2.5-7B --gpus 8 --response 4096
    python benchmarks/gpu_step.py --gpus 2 --apart   # the engine on the second one
    python benchmarks/gpu_step.py --dry-run          # on a CPU: two layers, a few tokens, hf_infer

A run of `python examples/start_pipeline.py` as a user would start it: vLLM and FSDP2 share the accelerators, the model
has random weights, and every response has `--response` tokens. A row is the median over the steps after the first.
`least` is the time at the peak of an H100's data sheet, so a share is wrong on another accelerator by the ratio of the
peaks. Time that no phase has is the controller's, rewards', or waiting. `time/...` of all spans stands in the metrics
file that is named last, and `mismatch/abs_log_ratio_mean` is how far the engine's log-probs are from the trainer's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from gpu_model import write_model
from roofline import add_workload, phases

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from roll.workbench.planning.architecture import read_architecture  # noqa: E402

CONFIG = """
pipeline: rlvr
exp_name: gpu_step
seed: 0
{placement}
output_dir: {folder}/run
track_with: jsonl
pretrain: {folder}/model
max_steps: {steps}
save_steps: 0
rollout_batch_size: {prompts}
num_return_sequences_in_group: {group}
prompt_length: {prompt}
response_length: {response}
max_running_requests: {concurrent}
adv_estimator: grpo
use_kl_loss: true
rewards:
  words: {{name: custom, tag_included: words}}
custom_reward_function: {{path: {benchmarks}/gpu_model.py, name: share_of_low_words}}
actor_train:
  {trains}
  model_args: {{dtype: {dtype}}}
  strategy_args: {{strategy_name: fsdp2_train}}
  training_args: {{learning_rate: 1.0e-6, per_device_train_batch_size: 4, gradient_accumulation_steps: {accumulation}}}
  use_sequence_packing: true
  use_dynamic_batching_in_train: true
  max_tokens_per_microbatch_in_train: {micro_batch}
  use_dynamic_batching_in_infer: true
  max_tokens_per_microbatch_in_infer: {micro_batch}
  data_args: {{file_name: {folder}/prompts.jsonl, prompt: prompt, template: plain, shuffle: false}}
actor_infer:
  {infers}
  model_args: {{dtype: {dtype}}}
  generating_args: {{temperature: 1.0, ignore_eos: true}}
  strategy_args: {{strategy_name: {engine}}}
reference:
  {trains}
  model_args: {{dtype: {dtype}}}
  strategy_args: {{strategy_name: fsdp2_infer}}
  use_sequence_packing: true
  use_dynamic_batching_in_infer: true
  max_tokens_per_microbatch_in_infer: {micro_batch}
"""
SPANS = {
    "prefill, decode": ("generate",),
    "score": ("old_logprobs", "reference"),
    "train, gather, optimizer": ("train_actor",),
    "sync": ("sync_weights",),
}
"""Phases of the roofline -> the spans of a step in which they happen."""


def write_prompts(folder: Path, args: argparse.Namespace) -> None:
    """Write one line for each prompt of the run."""
    lines = []
    for i in range(args.prompts * args.steps):
        text = " ".join(f"w{2 + (7 * i + j) % 997}" for j in range(args.prompt))
        lines.append(json.dumps({"id": str(i), "tag": "words", "prompt": text, "ground_truth": "none"}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def write_config(folder: Path, args: argparse.Namespace) -> None:
    """Write `step.yaml`."""
    half = args.gpus // 2 if args.apart else args.gpus
    trains, infers = range(half), range(half if args.apart else 0, args.gpus)
    rows = args.prompts * args.group
    text = CONFIG.format(
        **vars(args),
        folder=folder,
        benchmarks=Path(__file__).resolve().parent,
        placement="executor: inline" if args.dry_run else f"num_gpus_per_node: {args.gpus}",
        trains=f"device_mapping: {[*trains]}" if args.gpus else "",
        infers=f"device_mapping: {[*infers]}" if args.gpus else "",
        dtype="fp32" if args.dry_run else "bf16",
        engine="hf_infer" if args.dry_run else "vllm",
        accumulation=max(1, rows // args.updates // 4 // max(1, half)),
    )
    (folder / "step.yaml").write_text(text)


def show(metrics: Path, args: argparse.Namespace) -> None:
    """Print measured seconds by phase beside the roofline's."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row][1:]
    arch = read_architecture(args.model, {}, "pretrain")
    least = {phase.name: phase.least for phase in phases(arch, max(1, args.gpus), args)}  # type: ignore[arg-type]
    total = median(row["time/step"] for row in steps)
    print(f"\n{args.model}, {args.gpus} accelerators, {len(steps)} steps measured"
          f"{': a dry run, the figures mean nothing' if args.dry_run else ''}")  # fmt: skip
    print("| phase | s, median | least s | share of the peak | share of the step |")
    print("|---|---|---|---|---|")
    for names, spans in SPANS.items():
        seconds = median(sum(row.get(f"time/{span}", 0.0) for span in spans) for row in steps)
        bound = sum(least[name] for name in names.split(", "))
        reached = f"{bound / seconds:.1%}" if seconds else "-"
        print(f"| {names} | {seconds:.3f} | {bound:.3f} | {reached} | {seconds / total:.0%} |")
    print(f"| step | {total:.3f} | {sum(least.values()):.3f} | {sum(least.values()) / total:.1%} | 100% |")
    tokens = args.prompts * args.group * (args.prompt + args.response)
    print(f"\n{tokens / total / max(1, args.gpus):.0f} tokens/s per accelerator")
    for name in ("mismatch/abs_log_ratio_mean", "mismatch/kl", "sync/copied_gigabytes", "actor/grad_norm"):
        values = [row[name] for row in steps if name in row]
        print(f"{name}: {median(values):.3g}" if values else f"{name}: not reported")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="one of the sizes that `roll plan` knows")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    add_workload(parser)
    parser.add_argument("--apart", action="store_true", help="engines on the second half of the accelerators")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of the run")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, as small as it gets")
    args = parser.parse_args(arguments)
    args.layers, args.vocabulary = None, None
    if args.dry_run:
        args.gpus, args.steps, args.layers, args.vocabulary = 0, 2, 1, 1000
        args.prompts = args.group = 2
        args.prompt = args.response = args.concurrent = 4
        args.micro_batch, args.updates = 64, 1
    return args


def main() -> None:
    """Run, and print."""
    args = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(args.model, folder / "model", layers=args.layers, vocabulary=args.vocabulary)
        write_prompts(folder, args)
        write_config(folder, args)
        start = [sys.executable, str(ROOT / "examples" / "start_pipeline.py")]
        subprocess.run([*start, "--config_path", str(folder), "--config_name", "step", *args.set], check=True)
        show(folder / "run" / "logs" / "metrics.jsonl", args)


if __name__ == "__main__":
    main()
