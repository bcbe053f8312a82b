"""The side of `grpo_vs_trl.py` that runs TRL's `GRPOTrainer`, in an environment of its own.

    <environment>/bin/python benchmarks/trl_theirs.py --folder F --address A --task JSON [--per-device 16 ...]

TRL on a processor without an accelerator: no gradient checkpointing (nothing to save memory for), PyTorch attention,
and transformers' `generate` over all responses of the step at once. vLLM is out of its reach there: server mode sends
weights by NCCL and refuses any device but CUDA, colocate mode is made for sharing the trainer's GPU and for vLLM up to
0.31. With `--first-token` it notes when the trainer is built and when the first token is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from trl_task import Task, Turns, note_time, score, solved


def trainer_of(task: Task, folder: Path, options: argparse.Namespace, seen: list[int], callbacks: list[Any]) -> Any:
    """Return TRL's trainer; it adds the length of each response to `seen`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(task.threads)

    def reward(completions: list[str], completion_ids: list[list[int]], ground_truth: list[str], **_: Any) -> Any:
        seen.extend(len(ids) for ids in completion_ids)
        if task.model is None:
            return [score(text) for text in completions]
        return [solved(text, answer) for text, answer in zip(completions, ground_truth, strict=True)]

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=options.bf16,
        gradient_checkpointing=False,
        per_device_train_batch_size=options.per_device,
        gradient_accumulation_steps=task.rows // options.per_device,
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
        cache_implementation=options.cache,
        use_transformers_continuous_batching=options.continuous,
        torch_compile=options.compile,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    source = task.model or folder / "model"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if task.end_ids:
        model.generation_config.eos_token_id = list(task.end_ids)
    return GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(source),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{name: row[name] for name in ("prompt", "ground_truth")} for row in rows]),
        callbacks=callbacks,
    )


def take_turns(task: Task, options: argparse.Namespace) -> None:
    """Train until the benchmark says stop."""
    import torch
    from transformers import TrainerCallback

    turns, lengths = Turns(options.address), []

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

    trainer = trainer_of(task, options.folder, options, lengths, [TakeTurns()])
    turns.say(ready=True, threads=torch.get_num_threads())
    trainer.train()


def first_token(task: Task, options: argparse.Namespace) -> None:
    """Note when the trainer is built, and when it has drawn a first token of every row."""
    trainer = trainer_of(task, options.folder, options, [], [])
    note_time(options.first_token, "built trainer")
    import torch

    draw = torch.multinomial

    def noted(*arguments: Any, **further: Any) -> Any:
        drawn = draw(*arguments, **further)
        note_time(options.first_token, "first token")
        return drawn

    torch.multinomial = noted
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address")
    parser.add_argument("--task", required=True)
    parser.add_argument("--per-device", type=int, default=16)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--cache", default=None, help="cache_implementation of generate")
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching in generate")
    parser.add_argument("--compile", action="store_true", help="torch_compile")
    parser.add_argument("--first-token", type=Path, help="file of notes")
    options = parser.parse_args()
    task = Task(**json.loads(options.task))
    if options.first_token is not None:
        first_token(task, options)
    else:
        take_turns(task, options)


if __name__ == "__main__":
    main()
