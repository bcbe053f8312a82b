"""Batch arithmetic: prompts -> responses -> mini-batches -> optimizer steps, with the sums shown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.configs.errors import Violation
from roll.configs.schema.worker_config import TrainConfig


def divisors(number: int) -> list[int]:
    """Return what divides a number without remainder, in order, in the time of its square root."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """How one training role cuts the responses of a step."""

    role: str
    worker: TrainConfig
    rows: int
    """Responses per step."""
    epochs: int

    @property
    def rows_per_pass(self) -> int:
        """Responses per forward/backward pass, over all ranks."""
        return self.worker.training_args.per_device_train_batch_size * self.worker.data_parallel

    @property
    def mini_batch(self) -> int:
        """Responses per optimizer step, over all ranks."""
        return self.rows_per_pass * self.worker.training_args.gradient_accumulation_steps

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per pipeline step."""
        return self.rows // self.mini_batch * self.epochs

    @property
    def fits(self) -> bool:
        """Return whether mini-batches fill the responses exactly."""
        return self.rows % self.mini_batch == 0

    @property
    def division(self) -> str:
        """Return how data-parallel ranks follow from the role's ranks; empty where each rank has rows of its own."""
        worker = self.worker
        if worker.model_parallel_size == 1:
            return ""
        sizes = " x ".join(f"{name} {size}" for name, size in worker.parallel_sizes.items())
        return f"{worker.ranks} ranks / ({sizes}) = {worker.data_parallel} data-parallel"

    @property
    def product(self) -> str:
        """Return the mini-batch as a product."""
        args = self.worker.training_args
        cut = f"{args.per_device_train_batch_size} per device x {args.gradient_accumulation_steps} accumulation"
        return f"{cut} x {self.worker.data_parallel} data-parallel rank(s) = {self.mini_batch}"

    def nearest_accumulations(self) -> list[int]:
        """Return the nearest `gradient_accumulation_steps` below and above that fit, if any do."""
        if self.rows % self.rows_per_pass:
            return []
        passes, now = self.rows // self.rows_per_pass, self.worker.training_args.gradient_accumulation_steps
        legal = divisors(passes)
        return [count for count in legal if count <= now][-1:] + [count for count in legal if count > now][:1]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch of one pipeline step."""

    roles: Mapping[str, TrainConfig]
    """Those that train."""
    tasks: int
    group_size: int
    epochs: int = 1
    """Passes over the responses of a step."""
    words: tuple[str, str] = ("prompts", "responses")
    """What users call tasks and rows."""
    size_unit: int = 1
    """How much of `rollout_batch_size` one task takes."""

    @property
    def rows(self) -> int:
        """Responses per step."""
        return self.tasks * self.group_size

    @property
    def train_batches(self) -> tuple[TrainBatch, ...]:
        """Return those of all training roles."""
        return tuple(self.of(role) for role in self.roles)

    def of(self, role: str) -> TrainBatch:
        """Return the batch of one training role."""
        return TrainBatch(role=role, worker=self.roles[role], rows=self.rows, epochs=self.epochs)

    def nearest_sizes(self) -> list[int]:
        """Return the nearest `rollout_batch_size` below and above that fits every training role."""
        step = math.lcm(*(b.mini_batch // math.gcd(b.mini_batch, self.group_size) for b in self.train_batches))
        below, above = self.tasks // step * step, -(-self.tasks // step) * step
        return sorted({size * self.size_unit for size in (below, above) if size > 0})

    def violations(self) -> Iterator[Violation]:
        """Training roles whose mini-batch doesn't divide the responses of a step."""
        for batch in self.train_batches:
            if batch.fits:
                continue
            fix = f"rollout_batch_size={' or '.join(map(str, self.nearest_sizes()))}"
            if steps := " or ".join(map(str, batch.nearest_accumulations())):
                fix += f"; or {batch.role}.training_args.gradient_accumulation_steps={steps}"
            expected = (
                f"a mini-batch that divides the {self.words[1]} of a step: {batch.product} doesn't divide "
                f"{self._sum()} (remainder {self.rows % batch.mini_batch})"
            )
            yield Violation(f"{batch.role}.training_args", expected, fix)

    def explain(self) -> str:
        """Explain the arithmetic in words."""
        rows = self.words[1]
        lines = [f"{self._sum()} {rows} per step" if self.words[0] != rows else f"{self.rows} {rows} per step"]
        for batch in self.train_batches:
            passes = "pass" if batch.epochs == 1 else "passes"
            lines.append(f"  {batch.role}: mini-batch {batch.product} {rows}")
            lines.extend([f"    {batch.division}"] if batch.division else [])
            lines.append(
                f"    {self.rows} / {batch.mini_batch} = {_count(self.rows // batch.mini_batch, 'mini-batch', 'es')}, "
                f"x {batch.epochs} {passes} = {_count(batch.optimizer_steps, 'optimizer step')} per step"
            )
        return "\n".join(lines)

    def _sum(self) -> str:
        return f"{self.tasks} {self.words[0]} x {self.group_size} {self.words[1]} = {self.rows}"
