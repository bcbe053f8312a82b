"""How long a step is held up by a checkpoint, written in the step and in the background.

    python benchmarks/checkpoint_saving.py
    python benchmarks/checkpoint_saving.py --backends fsdp2 zero2 megatron --hidden 768 --layers 8

Fine-tunes a random Qwen2 on made-up rows, with a checkpoint every few steps. `held up` is the run's `time/save`:
the median over the checkpoints but the first. `written after` is the time from then until the checkpoint is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = {"fsdp2": "fsdp2_train", "zero2": "deepspeed_train", "megatron": "megatron_train"}
OPTIONS = {"zero2": "actor_train.strategy_args.strategy_config={zero_optimization: {stage: 2}}"}
CONFIG = """
pipeline: sft
output_dir: {folder}/output
pretrain: {folder}/model
track_with: jsonl
sequence_length: 64
save_steps: {every}
export_model: false
actor_train:
  data_args: {{file_name: {folder}/rows.jsonl, prompt: prompt, response: response, template: plain}}
  training_args: {{learning_rate: 1.0e-5, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}}
"""


def make_inputs(folder: Path, hidden: int, layers: int, every: int) -> int:
    """Write a model, rows and a configuration; the number of the model's parameters."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=2048, tie_word_embeddings=True, max_position_embeddings=128,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(2000)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder / "model")
    rows = [{"prompt": f"w{i} w{i + 1}", "response": " ".join(f"w{i + j}" for j in range(32))} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder, every=every))
    return sum(parameter.numel() for parameter in model.parameters())


def measure(folder: Path, backend: str, steps: int, *, background: bool) -> dict[str, float]:
    """Return seconds and bytes of one run."""
    output = folder / f"{backend}-{background}"
    executor = "inline" if backend == "fsdp2" else "ray"
    command = [
        sys.executable, "-m", "roll.cli", "train", str(folder / "run.yaml"), f"output_dir={output}",
        f"max_steps={steps}", f"executor={executor}", f"actor_train.strategy_args.strategy_name={BACKENDS[backend]}",
        f"checkpoint_config.async_save={str(background).lower()}",
        *([OPTIONS[backend]] if backend in OPTIONS else []),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    logged = [json.loads(line) for line in (output / "logs" / "metrics.jsonl").read_text().splitlines()]
    saves = [row["time/save"] for row in logged if row.get("time/save", 0) > 0]
    between = [row["time/step"] for row in logged[1:]]
    checkpoint = max((output / "checkpoints").glob("checkpoint-*"))
    log = (output / "logs" / "controller.log").read_text()
    written = [float(seconds) for seconds in re.findall(r"was written in ([0-9.]+) s", log)]
    return {
        "held up": median(saves[1:] or saves),
        "step": median(between),
        "written": median(written) if written else 0.0,
        "bytes": float(sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["fsdp2"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints: one must be done by then")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_inputs(folder, options.hidden, options.layers, options.every)
        print(f"{parameters / 1e6:.1f} million parameters")
        print("| backend | checkpoint | held up, in the step | held up, in the background | written after | a step |")
        print("|---|---|---|---|---|---|")
        for backend in options.backends:
            now = measure(folder, backend, options.steps, background=False)
            later = measure(folder, backend, options.steps, background=True)
            print(
                f"| {backend} | {now['bytes'] / 1e6:.1f} MB | {now['held up']:.3f} s | {later['held up']:.3f} s | "
                f"{later['written']:.1f} s | {now['step']:.2f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
