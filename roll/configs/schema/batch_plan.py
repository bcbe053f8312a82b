"""Batch arithmetic: prompts -> responses -> mini-batches -> optimizer steps, with the sums shown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.configs.errors import Violation
from roll.configs.schema.worker_config import TrainConfig, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """How one training role cuts the responses of a step."""

    role: str
    per_device: int
    accumulation: int
    data_parallel: int
    """Ranks that work on different rows."""
    division: str = ""
    """How they follow from the role's ranks; empty where each rank has rows of its own."""
    rows: int
    """Responses per step."""
    epochs: int

    @property
    def mini_batch(self) -> int:
        """Responses per optimizer step, over all ranks."""
        return self.per_device * self.accumulation * self.data_parallel

    @property
    def mini_batches(self) -> int:
        """Mini-batches in one pass over the responses."""
        return self.rows // self.mini_batch

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per pipeline step."""
        return self.mini_batches * self.epochs

    @property
    def fits(self) -> bool:
        """Whether mini-batches fill the responses exactly."""
        return self.rows % self.mini_batch == 0

    def nearest_accumulations(self) -> list[int]:
        """The nearest `gradient_accumulation_steps` below and above that fit, if any do."""
        per_pass = self.per_device * self.data_parallel
        if self.rows % per_pass:
            return []
        return _around(self.accumulation, _divisors(self.rows // per_pass))


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch of one pipeline step."""

    tasks: int
    group_size: int
    train_batches: tuple[TrainBatch, ...]
    words: tuple[str, str] = ("prompts", "responses")
    """What users call tasks and rows."""
    size_unit: int = 1
    """How much of `rollout_batch_size` one task takes."""

    @property
    def rows(self) -> int:
        """Responses per step."""
        return self.tasks * self.group_size

    def of(self, role: str) -> TrainBatch:
        """The batch of one training role."""
        return next(batch for batch in self.train_batches if batch.role == role)

    def nearest_sizes(self) -> list[int]:
        """The nearest `rollout_batch_size` below and above that fits every training role."""
        step = math.lcm(*(b.mini_batch // math.gcd(b.mini_batch, self.group_size) for b in self.train_batches))
        below, above = self.tasks // step * step, -(-self.tasks // step) * step
        return sorted({size * self.size_unit for size in (below, above) if size > 0})

    def violations(self) -> Iterator[Violation]:
        """Training roles whose mini-batch doesn't divide the responses of a step."""
        for batch in self.train_batches:
            if batch.fits:
                continue
            sizes = " or ".join(map(str, self.nearest_sizes()))
            choices = [f"rollout_batch_size={sizes}"]
            if batch.nearest_accumulations():
                steps = " or ".join(map(str, batch.nearest_accumulations()))
                choices.append(f"{batch.role}.training_args.gradient_accumulation_steps={steps}")
            yield Violation(
                f"{batch.role}.training_args",
                f"a mini-batch that divides the {self.words[1]} of a step: {self._product(batch)} doesn't divide "
                f"{self._sum()} (remainder "
                f"{self.rows % batch.mini_batch})",
                "; or ".join(choices),
            )

    def explain(self) -> str:
        """The arithmetic in words."""
        rows = self.words[1]
        lines = [f"{self._sum()} {rows} per step" if self.words[0] != rows else f"{self.rows} {rows} per step"]
        for batch in self.train_batches:
            passes = "pass" if batch.epochs == 1 else "passes"
            lines.append(f"  {batch.role}: mini-batch {self._product(batch)} {rows}")
            lines.extend([f"    {batch.division}"] if batch.division else [])
            lines.append(
                f"    {self.rows} / {batch.mini_batch} = {batch.mini_batches} mini-batches, "
                f"x {batch.epochs} {passes} = {batch.optimizer_steps} optimizer steps per step"
            )
        return "\n".join(lines)

    def _sum(self) -> str:
        return f"{self.tasks} {self.words[0]} x {self.group_size} {self.words[1]} = {self.rows}"

    @staticmethod
    def _product(batch: TrainBatch) -> str:
        cut = f"{batch.per_device} per device x {batch.accumulation} accumulation"
        return f"{cut} x {batch.data_parallel} data-parallel rank(s) = {batch.mini_batch}"


def plan_batches(
    trained_roles: Mapping[str, TrainConfig],
    *,
    tasks: int,
    group_size: int,
    passes: int,
    words: tuple[str, str] = ("prompts", "responses"),
) -> BatchPlan:
    """The batch plan of the roles that train."""
    batches = tuple(
        TrainBatch(
            role=role,
            per_device=worker.training_args.per_device_train_batch_size,
            accumulation=worker.training_args.gradient_accumulation_steps,
            data_parallel=worker.data_parallel,
            division=_division(worker),
            rows=tasks * group_size,
            epochs=passes,
        )
        for role, worker in trained_roles.items()
    )
    return BatchPlan(tasks=tasks, group_size=group_size, train_batches=batches, words=words)


def _division(worker: WorkerConfig) -> str:
    if worker.model_parallel_size == 1:
        return ""
    sizes = " x ".join(f"{name} {size}" for name, size in worker.parallel_sizes.items())
    return f"{worker.ranks} ranks / ({sizes}) = {worker.data_parallel} data-parallel"


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _around(value: int, legal: list[int]) -> list[int]:
    below = [entry for entry in legal if entry <= value][-1:]
    above = [entry for entry in legal if entry > value][:1]
    return below + above
