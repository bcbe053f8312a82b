"""Our side of `grpo_vs_trl.py`: `run_pipeline` on a complete configuration.

The pipeline waits for the benchmark before each step. Asked for `bare`, it measures what the parts of the last step
cost by themselves: its engine called directly with the same prompts and lengths, and a plain PyTorch loop over the same
tokens. With `--first-token` it is a command of `roll` that notes when its engine has drawn the first token.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from trl_task import Task, Turns, note_time  # noqa: E402 - beside this file

QUICKSTART = (HERE.parent / "examples" / "quickstart", "rlvr_smollm2")
STEPS_ALONE = ("val_before_train=false", "eval_steps=0", "save_steps=0", "export_model=false", "track_with=[jsonl]")
"""What makes a run of the quickstart one of steps alone."""
SAMPLER = "roll.strategies.engines.hf.token_sampler"

CONFIG = """
pipeline: rlvr
exp_name: grpo_vs_trl
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
  model_args: {{disable_gradient_checkpointing: true, dtype: fp32}}
  use_sequence_packing: {packing}
  training_args:
    learning_rate: {learning_rate}
    per_device_train_batch_size: {per_device}
    gradient_accumulation_steps: {accumulation}
  data_args: {{file_name: {folder}/prompts.jsonl, prompt: prompt, template: plain, shuffle: false}}
actor_infer:
  model_args: {{dtype: fp32}}
  generating_args: {{temperature: 1.0, ignore_eos: {ignore_eos}}}
  strategy_args: {{strategy_name: {engine}}}
"""


def load(task: Task, folder: Path, options: argparse.Namespace) -> Any:
    """Return the checked configuration: of the quickstart as it is shipped, or one written to `ours.yaml`."""
    from roll.configs.checks.prerequisites import check_prerequisites
    from roll.configs.parsing.loader import load_config

    if task.model is not None:
        own = (f"pretrain={task.model}", f"output_dir={folder}/ours", f"max_steps={task.steps}")
        config = load_config(*QUICKSTART, [*STEPS_ALONE, *own, *options.set])
    else:
        write_config(task, folder, options)
        config = load_config(folder, "ours", options.set)
    check_prerequisites(config)
    return config


def write_config(task: Task, folder: Path, options: argparse.Namespace) -> None:
    """Write `ours.yaml`."""
    text = CONFIG.format(
        folder=folder,
        benchmarks=HERE,
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
            trained = self._batch.action_mask.split(self._batch.lengths.tolist())
            lengths = [int(part.sum()) for part in trained]
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


def first_token(notes: Path, command: list[str]) -> None:
    """Run a command of `roll`, and note when its engine has drawn the first token of the first row."""

    class Finder:
        """Finds the sampler as it is found without this, and changes it once it is imported."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            del path, target
            if name != SAMPLER:
                return None
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.loader is not None
            execute = spec.loader.exec_module

            def execute_and_change(module: Any) -> None:
                execute(module)
                sample = module.sample

                def noted(*arguments: Any) -> Any:
                    drawn = sample(*arguments)
                    note_time(notes, "first token")
                    return drawn

                module.sample = noted

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    sys.argv = ["roll", *command]
    from roll.cli.__main__ import main

    sys.exit(main())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--task")
    parser.add_argument("--engine", default="hf_infer")
    parser.add_argument("--per-device", type=int, default=16)
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further keys")
    parser.add_argument("--first-token", type=Path, help="file of notes; what follows is a command of roll")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.first_token is not None:
        first_token(options.first_token, options.command)
    task = Task(**json.loads(options.task))
    from roll.pipelines import load_pipeline, run_pipeline
    from roll.utils.memory import reuse_freed_memory

    reuse_freed_memory()  # as `roll train` does
    config = load(task, options.folder, options)
    load_pipeline(config)  # sets how threads wait, which torch must not be imported before
    with Gate(Turns(options.address), task, options.folder).installed():
        run_pipeline(config)


if __name__ == "__main__":
    main()
