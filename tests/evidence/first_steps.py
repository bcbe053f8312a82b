"""The first optimizer step of a migrated configuration, by our own pipeline, on rollouts that were made by hand.

Nothing is generated: what the engine would have sampled is given. Log-probs, rewards, advantages, corrections, losses
and gradients are those of the pipeline's own code, on one rank in this process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from roll.configs.parsing.loader import load_config
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.data.finished_rows import RowOrder
from roll.data.sft_rows import TaughtRow
from roll.data.sft_rows import batch_of as sft_batch
from roll.distributed.executors import make_executor
from roll.pipelines.credit.stages import StepData
from roll.pipelines.offline.sft import sft_data
from roll.pipelines.rl.rl_pipeline import RLPipeline
from roll.pipelines.rollouts.assemble import Rollouts, assemble
from roll.pipelines.run.clusters import Clusters, _start, placements
from roll.pipelines.workers.train_worker import TrainWorker, resolved_model_args
from roll.strategies.hf.fsdp2 import Fsdp2Strategy
from roll.strategies.training.pretrained import load_tokenizer
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics
from roll.types.trajectory import Group, Task, Trajectory, Turn
from roll.workbench.migrate.report import MigrationReport, as_yaml
from roll.workbench.migrate.translate import migrate

TRAINED = ("actor_train", "critic")
SCORING = (*TRAINED, "reference")


@dataclass
class Migrated:
    """A file of another project as it is read here."""

    report: MigrationReport
    config: Any
    """As `roll check` reads it, for the devices that the file names."""
    alone: Any
    """The same on one rank in this process, in float32; a mini-batch is as large."""

    def says(self, *words: str) -> bool:
        """Whether a line of the report has all of these words."""
        return any(all(word in line for word in words) for line in self.report.text().splitlines())


def read_migrated(old: Path, *keys: str) -> Migrated:
    """Migrate a file, write it, and load it as `roll check` does; `keys` answer what the new file asks."""
    report, tree = migrate(old)
    assert tree is not None
    folder = old.parent / f"{old.stem}-new"
    folder.mkdir(exist_ok=True)
    (folder / "new.yaml").write_text(as_yaml(report, tree), "utf-8")
    config = load_config(folder, "new", keys)
    (folder / "alone.yaml").write_text(yaml.safe_dump(_on_one_rank(config, tree), sort_keys=False), "utf-8")
    return Migrated(report, config, load_config(folder, "alone", keys))


def _on_one_rank(config: RunConfig, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with which one process trains what the file's devices train together."""
    tree = {**copy.deepcopy(dict(tree)), "executor": "inline", "num_gpus_per_node": 1, "num_nodes": 1}
    for role in config.roles:
        worker = tree.setdefault(role, {})
        worker["device_mapping"] = [0]
        if role not in SCORING:
            continue
        worker["strategy_args"] = {"strategy_name": "fsdp2_train" if role in TRAINED else "fsdp2_infer"}
        worker["model_args"] = {**worker.get("model_args", {}), "dtype": "fp32", "attn_implementation": "auto"}
        if role in TRAINED:
            batch, args = config.batch.of(role), worker.setdefault("training_args", {})
            width = batch.worker.training_args.per_device_train_batch_size
            args |= {"per_device_train_batch_size": width, "gradient_accumulation_steps": batch.mini_batch // width}
    return tree


@dataclass
class Step:
    """What the first optimizer step of a role saw and made."""

    rows: tuple[str, ...] = ()
    loss: float = float("nan")
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Before clipping, by the parameters' names."""


@contextmanager
def recorded_steps() -> Iterator[dict[str, Step]]:
    """Keep the first optimizer step of every role that trains."""
    steps: dict[str, Step] = {}
    attempt, apply = Fsdp2Strategy._attempt, Fsdp2Strategy._apply

    def attempted(self: Any, batch: TokenBatch, loss_fn: Any, lr: float) -> Any:
        first = self._spec.role not in steps
        step = steps.setdefault(self._spec.role, Step(rows=batch.row_ids))
        found = attempt(self, batch, loss_fn, lr)
        if first:
            values = found[0].result()
            named = ("actor/loss", "critic/loss", "sft/loss")
            step.loss = next(values[name] for name in named if name in values)
        return found

    def applied(self: Any, lr: float) -> Any:
        step = steps[self._spec.role]
        if not step.gradients:
            named = self._module.named_parameters()
            step.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        return apply(self, lr)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Fsdp2Strategy, "_attempt", attempted)
        patched.setattr(Fsdp2Strategy, "_apply", applied)
        yield steps


class HandMade(RLPipeline):
    """Walks a step on rollouts that are there."""

    validates_first = False

    def rollouts(self, step: int) -> tuple[Rollouts, Metrics]:
        raise AssertionError(f"step {step} has its rollouts")

    def evaluate(self, step: int) -> dict[str, float]:
        raise AssertionError(f"nothing is validated after step {step}")


@contextmanager
def started(config: RunConfig, total_steps: int) -> Iterator[Clusters]:
    """The roles that score and train, without an engine."""
    wanted = {place.role: place for place in placements(config) if place.role in SCORING}
    with make_executor("inline", list(wanted.values()), rpc_timeout=60) as executor:
        yield Clusters({role: _start(executor, place, config, total_steps) for role, place in wanted.items()})


def module_of(clusters: Clusters, role: str) -> nn.Module:
    """Return the module that a role of this process trains."""
    module: nn.Module = clusters.by_role[role]._worker.strategy._module  # type: ignore[attr-defined]
    return module


def moved(module: nn.Module, seed: int, scale: float) -> None:
    """Add noise to every weight, the same for every module with these parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def rl_steps(
    config: RLConfig, groups: list[Group], move: Callable[[str, nn.Module, str], None], sampled: Tensor
) -> tuple[dict[str, Step], Rollouts, bool]:
    """Walk a step as the pipeline does, with the sampler's log-probs of the action tokens given.

    `move(role, module, when)` changes weights `before` it and ahead of the `update`, so that ratios to the old
    log-probs aren't 1. Returns the first optimizer steps, the rollouts, and whether weights moved before the update:
    they don't where a batch gets one step, whose ratios are 1.
    """
    with started(config, total_steps=10) as clusters, recorded_steps() as steps:
        pipeline = HandMade(
            config, clusters, load_tokenizer(resolved_model_args(config, "actor_train")), total_steps=10
        )
        trained = [role for role in TRAINED if role in clusters.by_role]
        for role in trained:
            move(role, module_of(clusters, role), "before")
        rollouts = assemble(groups)
        column = torch.zeros(rollouts.batch.num_tokens).masked_scatter(rollouts.batch.action_mask, sampled)
        rollouts = replace(rollouts, batch=rollouts.batch.with_columns(sampling_logprobs=column))
        rollouts = pipeline.credit(pipeline.models(StepData(rollouts, 1))).rollouts
        moves = pipeline.old_logprobs.source != "update"
        for role in trained if moves else ():
            move(role, module_of(clusters, role), "update")
        pipeline.update(rollouts, 1)
    return steps, rollouts, moves


def sft_step(config: Any) -> tuple[Step, list[TaughtRow]]:
    """Walk the first step of fine-tuning; returns it and all rows."""
    with started(config, total_steps=10) as clusters, recorded_steps() as steps:
        tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
        rows = sft_data(config, tokenizer).training.rows
        order = RowOrder(rows, sft_batch, seed=config.seed, shuffle=config.actor_train.data_args.shuffle)
        clusters.actor_train.call(TrainWorker.train_step, order.take(config.rows_per_step))
    return steps["actor_train"], list(rows)


def hand_made(scores: list[list[float]], *, vocabulary: int, longest: int, domain: str) -> list[Group]:
    """Return a group for every list of scores: responses of 2 tokens to `longest`, of which the last is cut off."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(6, vocabulary, (count,), generator=generator).tolist())

    groups = []
    for number, row in enumerate(scores):
        name, prompt = f"t{number}", tokens(3 + number % 4)
        members = []
        for member, score in enumerate(row):
            size = longest if member == 0 else int(torch.randint(2, longest, (), generator=generator))
            turn = Turn(
                prompt_ids=prompt, response_ids=tokens(size), logprobs=(-1.0,) * size, versions=(0,) * size,
                finish_reason="stop",
            )  # fmt: skip
            members.append(Trajectory(task_id=name, member=member, turns=(turn,), reward=score))
        task = Task(id=name, source="hand", payload={}, seed=0, tag=domain, domain=domain)
        groups.append(Group(task=task, trajectories=tuple(members)))
    return groups
