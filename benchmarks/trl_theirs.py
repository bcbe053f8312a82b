"""The side of `rollout_vs_trl.py` that runs TRL's `GRPOTrainer`, in an environment of its own.

    <environment>/bin/python benchmarks/trl_theirs.py --folder F --address A --task JSON [--per-device 16 ...]

TRL on a processor without an accelerator: float32, no gradient checkpointing (nothing to save memory for), PyTorch
attention, and transformers' `generate` over all responses of the step at once. vLLM is out of its reach there: server
mode sends weights by NCCL and refuses any device but CUDA, colocate mode is made for sharing the trainer's GPU and for
vLLM up to 0.31.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from trl_task import Task, Turns, score


def run(task: Task, folder: Path, turns: Turns, per_device: int, cache: str | None) -> None:
    """Train until the benchmark says stop."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(task.threads)
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [score(text) for text in completions]

    class TakeTurns(TrainerCallback):
        """Begins a step when it is told to, and times it: from before generation to after the optimizer step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if turns.next() == "stop":
                os._exit(0)  # nothing of this run is kept
            lengths.clear()
            self.started, self.computed = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - self.started
            turns.say(seconds=seconds, processor=time.process_time() - self.computed, lengths=list(lengths))

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=task.rows // per_device,
        num_generations=task.samples,
        max_completion_length=task.response_length,
        max_steps=task.steps,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",  # the mean over all tokens of the step, as ours
        scale_rewards="group",
        learning_rate=task.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        shuffle_dataset=False,
        cache_implementation=cache,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[TakeTurns()],
    )
    turns.say(ready=True, threads=torch.get_num_threads())
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--per-device", type=int, default=16)
    parser.add_argument("--cache", default=None, help="cache_implementation of generate")
    options = parser.parse_args()
    task = Task(**json.loads(options.task))
    run(task, options.folder, Turns(options.address), options.per_device, options.cache)


if __name__ == "__main__":
    main()
