"""The toy at its smallest, run in this process with everything of interest on record."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rollout_files import read_rollouts
from toy import run_toy, write_toy

from roll.pipelines.rl import engine_check
from roll.strategies.base import Request
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.hf.fsdp2 import Fsdp2Strategy
from roll.types.batch import TokenBatch

SMALL = (
    "max_steps=1",
    "rollout_batch_size=2",
    "num_return_sequences_in_group=2",
    "actor_train.training_args.per_device_train_batch_size=4",
    "actor_train.training_args.gradient_accumulation_steps=1",
)
CRITIC = (
    "adv_estimator=gae",
    "critic.model_args.disable_gradient_checkpointing=true",
    "critic.training_args.per_device_train_batch_size=4",
    "critic.training_args.learning_rate=1e-2",
)
REFERENCE = ("reference.infer_batch_size=8",)


@dataclass
class Run:
    """What a run did."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    strategies: dict[str, Fsdp2Strategy] = field(default_factory=dict)
    engines: list[HfInfer] = field(default_factory=list)
    start: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    submitted: list[list[Request]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    """Rows of every decode step."""
    trained: list[tuple[str, TokenBatch]] = field(default_factory=list)
    passes: list[tuple[str, bool, int, int]] = field(default_factory=list)
    """(role, with gradient, rows, longest row) of every forward pass."""

    @property
    def last(self) -> dict[str, Any]:
        return self.rows[-1]

    @property
    def requests(self) -> list[Request]:
        return [request for batch in self.submitted for request in batch]

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows if name in row]

    def rollouts(self, step: int = 1) -> list[SimpleNamespace]:
        return read_rollouts(self.folder / "dump" / f"rollouts-{step:06d}.parquet")

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "output" / "logs" / name).read_text().splitlines()]

    def checkpoints(self, where: str = "output/checkpoints") -> list[str]:
        folder = self.folder / where
        return sorted(path.name for path in folder.glob("checkpoint-*")) if folder.is_dir() else []

    def weights(self, role: str = "actor_train") -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.strategies[role]._module.named_parameters()}

    def moved(self, role: str = "actor_train") -> dict[str, bool]:
        return {name: not torch.equal(value, self.start[role][name]) for name, value in self.weights(role).items()}

    def prompts(self) -> list[tuple[int, ...]]:
        return [request.prompt_ids for request in self.requests]


@contextlib.contextmanager
def recording(run: Run) -> Iterator[None]:
    """Watch strategies and engines, but not while a run compares the two (engine_check.py)."""
    comparing: list[bool] = []
    check = engine_check.check_engines

    def unwatched(*args: Any) -> None:
        comparing.append(True)
        try:
            check(*args)
        finally:
            comparing.pop()

    def around(owner: type, name: str, watch: Any) -> Any:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not comparing:
                watch(self, *args)
            result = original(self, *args, **kwargs)
            if name == "__init__" and owner is Fsdp2Strategy:
                run.start[self._spec.role] = run.weights(self._spec.role)
            return result

        return mock.patch.object(owner, name, wrapped)

    def score(strategy: Fsdp2Strategy, micro: TokenBatch, *_: Any) -> None:
        shape = len(micro), int(micro.lengths.max())
        run.passes.append((strategy._spec.role, torch.is_grad_enabled(), *shape))

    with (
        mock.patch.object(engine_check, "check_engines", unwatched),
        around(Fsdp2Strategy, "__init__", lambda s, spec, _info: run.strategies.__setitem__(spec.role, s)),
        around(Fsdp2Strategy, "_score", score),
        around(Fsdp2Strategy, "train_step", lambda s, batch, _loss: run.trained.append((s._spec.role, batch))),
        around(HfInfer, "submit", lambda e, requests: (run.engines.append(e), run.submitted.append(list(requests)))),
        around(HfInfer, "_draw", lambda e, _logits: run.running.append(len(e._running))),
    ):
        yield


def run_small(folder: Path, model: Path, *overrides: str, **files: Any) -> Run:
    """Write the toy into `folder` and run it with `SMALL` and these overrides.

    `reward` is the text of another reward file, `data` are other rows, `rows` their number, `dump` asks for rollouts.
    """
    write_toy(folder, model, files.pop("rows", 16))
    if reward := files.pop("reward", None):
        (folder / "case_reward.py").write_text(reward)
    if data := files.pop("data", None):
        (folder / "case.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    if files.pop("dump", False):
        overrides = (f"rollout_dump_dir={folder}/dump", *overrides)
    assert not files, f"unknown {files}"
    return again(folder, *overrides)


def again(folder: Path, *overrides: str) -> Run:
    """Run what is in `folder` already."""
    run = Run(folder)
    with recording(run):
        run.rows = run_toy(folder, *SMALL, *overrides)
    return run


def row_of(i: int, **columns: Any) -> dict[str, Any]:
    return {"id": str(i), "tag": "case", "prompt": f"{i % 10}l=", "ground_truth": "lower", **columns}
