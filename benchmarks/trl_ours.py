"""Our side of `rollout_vs_trl.py`: `run_pipeline` on a complete configuration.

The pipeline waits for the benchmark before each step. Asked for `bare`, it measures what the parts of the last step
cost by themselves: its engine called directly with the same prompts and lengths, and a plain PyTorch loop over the same
tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trl_task import Task, Turns

CONFIG = """
pipeline: rlvr
exp_name: rollout_vs_trl
seed: 0
executor: inline
output_dir: {folder}/ours
track_with: jsonl
pretrain: {folder}/model
max_steps: {steps}
save_steps: 0
rollout_batch_size: {prompts}
num_return_sequences_in_group: {samples}
prompt_length: {prompt_length}
response_length: {response_length}
max_running_requests: {rows}
adv_estimator: grpo
rewards:
  words: {{name: custom, tag_included: words}}
custom_reward_function: {{path: {benchmarks}/trl_task.py, name: words}}
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  use_sequence_packing: {packing}
  training_args:
    learning_rate: {learning_rate}
    per_device_train_batch_size: {per_device}
    gradient_accumulation_steps: {accumulation}
  data_args: {{file_name: {folder}/prompts.jsonl, prompt: prompt, template: plain, shuffle: false}}
actor_infer:
  generating_args: {{temperature: 1.0, ignore_eos: {ignore_eos}}}
  strategy_args: {{strategy_name: {engine}}}
"""


def write_config(task: Task, folder: Path, options: argparse.Namespace) -> None:
    """Write `ours.yaml`."""
    text = CONFIG.format(
        folder=folder,
        benchmarks=Path(__file__).resolve().parent,
        steps=task.steps,
        prompts=task.prompts,
        samples=task.samples,
        rows=task.rows,
        prompt_length=task.prompt_length,
        response_length=task.response_length,
        packing=str(options.packing).lower(),
        learning_rate=task.learning_rate,
        per_device=options.per_device,
        accumulation=task.rows // options.per_device,
        ignore_eos=str(task.mean_length is None).lower(),
        engine=options.engine,
    )
    (folder / "ours.yaml").write_text(text)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return (seconds, processor seconds of this process with all its threads)."""
    started, computed = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - computed


class BareLoop:
    """Forward, backward, clipping and AdamW with transformers and PyTorch alone, on padded rows sorted by length."""

    SIZES = (8, 16, 32)

    def __init__(self, model: Path, learning_rate: float) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._rows: int | None = None

    def choose(self, batch: Any) -> None:
        """Find, once, the number of rows per pass that is fastest on this batch."""
        if self._rows is None:
            self._rows = min(self.SIZES, key=lambda rows: min(timed(lambda: self._walk(batch, rows))[1] for _ in "12"))

    def step(self, batch: Any) -> None:
        """Take one optimizer step."""
        assert self._rows is not None
        self._walk(batch, self._rows)

    def _walk(self, batch: Any, rows: int) -> None:
        import torch

        order = torch.argsort(batch.lengths, descending=True).tolist()
        scored = float(batch.action_mask.sum())
        self._optimizer.zero_grad()
        for start in range(0, len(order), rows):
            part = batch.select(order[start : start + rows])
            ids, mask = part.pad("token_ids"), part.pad("action_mask", False)[:, 1:]
            logits = self._model(input_ids=ids, attention_mask=part.valid().long(), use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            advantages = part.pad("advantages")[:, 1:]
            (-(logprobs * advantages * mask).sum() / scored).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


class Gate:
    """Stands before each step of the pipeline and does what the benchmark asks for."""

    def __init__(self, turns: Turns, task: Task, folder: Path) -> None:
        self._turns = turns
        self._task = task
        self._folder = folder
        self._batch: Any = None
        self._loop: BareLoop | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace two methods of the training loop: `step` waits here, `update` shows its rows."""
        from roll.pipelines.rl.rl_pipeline import RLPipeline

        step, update = RLPipeline.step, RLPipeline.update

        def gated_step(pipeline: RLPipeline, number: int) -> None:
            self._wait(pipeline)
            seconds, processor = timed(lambda: step(pipeline, number))
            lengths = [int(n) - self._task.prompt_length for n in self._batch.lengths]
            self._turns.say(seconds=seconds, processor=processor, lengths=lengths)

        def watched_update(pipeline: RLPipeline, rollouts: Any, number: int) -> Any:
            self._batch = rollouts.batch
            return update(pipeline, rollouts, number)

        with mock.patch.object(RLPipeline, "step", gated_step), mock.patch.object(RLPipeline, "update", watched_update):
            yield

    def _wait(self, pipeline: Any) -> None:
        import torch

        from roll.pipelines.run.loop import OutOfTasks

        if self._batch is None:
            self._turns.say(ready=True, threads=torch.get_num_threads())
        while (command := self._turns.next()) == "bare":
            self._turns.say(**self._bare(pipeline))
        if command == "stop":
            raise OutOfTasks("the benchmark has seen enough")

    def _bare(self, pipeline: Any) -> dict[str, float]:
        if self._loop is None:
            self._loop = BareLoop(self._folder / "model", self._task.learning_rate)
        loop, batch = self._loop, self._batch
        loop.choose(batch)
        generate, generate_processor = timed(lambda: self._bare_engine(pipeline))
        train, train_processor = timed(lambda: loop.step(batch))
        return {"generate": generate, "train": train, "processor": generate_processor + train_processor}

    def _bare_engine(self, pipeline: Any) -> None:
        from roll.pipelines.workers.infer_worker import InferWorker
        from roll.strategies.base import Request, SamplingParams

        batch, requests = self._batch, []
        for i in range(len(batch)):
            ids = tuple(batch.row("token_ids", i).tolist())
            longest = len(ids) - self._task.prompt_length
            params = SamplingParams(max_new_tokens=longest, ignore_eos=True)
            prompt = ids[: self._task.prompt_length]
            requests.append(Request(id=f"bare-{i}", prompt_ids=prompt, params=params, seed=i, order=(i,)))
        engines, finished = pipeline.clusters.actor_infer, 0
        engines.call(InferWorker.submit, requests)
        while finished < len(requests):
            finished += sum(len(done) for done in engines.call(InferWorker.poll, 16))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--engine", default="hf_infer")
    parser.add_argument("--per-device", type=int, default=16)
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    task = Task(**json.loads(options.task))
    write_config(task, options.folder, options)
    from roll.configs.checks.prerequisites import check_prerequisites
    from roll.configs.parsing.loader import load_config
    from roll.pipelines import load_pipeline, run_pipeline
    from roll.utils.memory import reuse_freed_memory

    reuse_freed_memory()  # as `roll train` does
    config = load_config(options.folder, "ours", [])
    check_prerequisites(config)
    load_pipeline(config)  # sets how threads wait, which torch must not be imported before
    with Gate(Turns(options.address), task, options.folder).installed():
        run_pipeline(config)


if __name__ == "__main__":
    main()
