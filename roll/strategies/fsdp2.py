"""`fsdp2_train` and `fsdp2_infer`: PyTorch FSDP2 (`fully_shard`), one process upwards.

A world of one needs no process group and runs the plain module: the laptop's path. Several ranks shard every decoder
layer, and the root. Master weights are float32; `dtype: bf16` computes under autocast.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.configs.base import TrainConfig
from roll.configs.strategy import Fsdp2Config
from roll.distributed.process_group import init_process_group
from roll.distributed.worker import WorkerInfo
from roll.strategies.base import LossFn, NamedWeights, OutputName, RankLayout, TrainSpec, TrainStrategy
from roll.strategies.hf.model import (
    DTYPES,
    PolicyScorer,
    ScoredTokens,
    ValueScorer,
    load_backbone,
    load_causal_lm,
    load_tokenizer,
    named_tensors,
    quiet_transformers,
)
from roll.strategies.micro import denominators, filler, lay_out, plan_micro_batches, rows_to_compute
from roll.strategies.optim import parameter_groups, schedule_from
from roll.types.batch import Denominators, TokenBatch, TokenOutputs
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)

_MOST_SKIPPED = 5
"""Non-finite gradients in a row: one is an accident of a batch, this many are a diverged model."""


class Fsdp2Strategy(TrainStrategy):
    """See the module docstring; `spec.trains` decides whether there is an optimizer."""

    def __init__(self, spec: TrainSpec, info: WorkerInfo) -> None:
        self._spec = spec
        self._world_size = info.world_size
        self._rank = info.rank
        self.layout = RankLayout(dp_rank=info.rank, dp_size=info.world_size)
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if self._world_size > 1:
            init_process_group(info, backend="nccl" if self._device.type == "cuda" else "gloo")
        self._tokenizer = load_tokenizer(spec.worker.model_args)
        options = spec.worker.strategy_args.strategy_config
        assert isinstance(options, Fsdp2Config)
        self._options = options
        self._dtype = DTYPES[options.param_dtype or spec.worker.model_args.dtype]
        self._module = self._build_module()
        self._steps = 0
        self._skipped = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._anchor: dict[str, Tensor] = {}
        if spec.trains:
            self._build_optimizer()

    def _build_module(self) -> PolicyScorer | ValueScorer:
        args = self._spec.worker.model_args
        stored = torch.float32 if self._spec.trains else self._dtype
        if self._spec.kind == "policy":
            model = load_causal_lm(args, stored)
            module: PolicyScorer | ValueScorer = PolicyScorer(model, self._spec.temperature)
        else:
            model = load_backbone(args, stored)
            module = ValueScorer(model)
        _freeze(model, args.freeze_module_prefix if self._spec.trains else ("",))
        if self._spec.trains and not args.disable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # transformers recomputes only in train mode; dropout would make the ratio of old and new log-probs noise.
            _disable_dropout(model)
            model.train()
        module.to(self._device)
        if isinstance(module, PolicyScorer):
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != stored):
                module.check()
        return self._shard(module) if self._world_size > 1 else module

    def _shard(self, module: PolicyScorer | ValueScorer) -> PolicyScorer | ValueScorer:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        shards = self._options.fsdp_size or self._world_size
        if shards == self._world_size:
            mesh = init_device_mesh(self._device.type, (shards,))
        else:
            mesh = init_device_mesh(
                self._device.type, (self._world_size // shards, shards), mesh_dim_names=("replicate", "shard")
            )
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self._options.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self._dtype, reduce_dtype=DTYPES[self._options.reduce_dtype], cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy() if self._options.offload_policy else OffloadPolicy(),
        }
        # What transformers itself names as the blocks that must stay on one device.
        blocks = set(getattr(self._hf_module(module), "_no_split_modules", None) or ())
        for child in list(module.modules()):
            if type(child).__name__ in blocks:
                fully_shard(child, **options)
        fully_shard(module, **options)  # in place
        return module

    def _build_optimizer(self) -> None:
        args = self._trained.training_args
        if not any(parameter.requires_grad for parameter in self._module.parameters()):
            raise ValueError(f"{self._spec.role}: freeze_module_prefix leaves nothing to train")
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self._module.named_parameters(), args.weight_decay),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            foreach=True,
        )
        self._lr_factor: Callable[[int], float] = schedule_from(args, self._spec.total_optimizer_steps)
        if self._spec.l2 > 0:
            trained = ((n, p) for n, p in self._module.named_parameters() if p.requires_grad)
            self._anchor = {name: parameter.detach().clone() for name, parameter in trained}

    @property
    def _trained(self) -> TrainConfig:
        worker = self._spec.worker
        assert isinstance(worker, TrainConfig), f"{self._spec.role} has no training_args"
        return worker

    # --- computing -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: TokenBatch, outputs: Sequence[OutputName]) -> TokenOutputs:
        """See the base class. Tokens the policy didn't choose hold 0."""
        worker = self._spec.worker
        parts = plan_micro_batches(
            batch.lengths.tolist(),
            max_rows=None if worker.use_dynamic_batching_in_infer else worker.infer_batch_size,
            max_tokens=worker.max_tokens_per_microbatch_in_infer if worker.use_dynamic_batching_in_infer else None,
        )
        scored = []
        for rows in self._aligned(parts):
            micro = batch.select(rows) if rows else filler(batch)
            result = self._score(micro, outputs)
            if rows:
                scored.append(result.to("cpu"))
        if not scored:
            return _no_outputs(outputs)
        return TokenOutputs.concat(scored).reorder(batch.row_ids)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        """See the base class. A step whose gradient isn't finite is skipped and counted."""
        assert self._optimizer is not None, f"{self._spec.role} was built without an optimizer"
        worker = self._trained
        sizes = denominators(batch)
        batch = batch.select(rows_to_compute(batch, loss_fn))
        whole = self._reduced(replace(sizes, computed_tokens=denominators(batch).tokens))
        dynamic = worker.use_dynamic_batching_in_train
        parts = plan_micro_batches(
            batch.lengths.tolist(),
            max_rows=None if dynamic else worker.training_args.per_device_train_batch_size,
            max_tokens=worker.max_tokens_per_microbatch_in_train if dynamic else None,
        )
        metrics = Metrics()
        self._optimizer.zero_grad(set_to_none=True)
        aligned = self._aligned(parts)
        for i, rows in enumerate(aligned):
            with self._gradient_sync(last=i == len(aligned) - 1):
                self._backward(batch, rows, loss_fn, whole, metrics)
        self._update(metrics)
        return metrics

    def _backward(
        self, batch: TokenBatch, rows: list[int], loss_fn: LossFn, whole: Denominators, metrics: Metrics
    ) -> None:
        micro = batch.select(rows) if rows else filler(batch)
        outputs = self._score(micro, loss_fn.needs)
        if rows:
            terms = loss_fn.compute(outputs, micro.to(self._device), whole)
            metrics.merge(terms.metrics)
            loss = terms.loss
        else:
            loss = torch.stack([column.sum() for column in outputs.columns().values()]).sum() * 0.0
        # FSDP averages gradients over ranks; the loss is already divided by global sizes and wants their sum.
        (loss * self._world_size).backward()

    def _score(self, micro: TokenBatch, outputs: Sequence[OutputName]) -> TokenOutputs:
        layout = lay_out(micro, self._device)
        with self._autocast():
            scored: ScoredTokens = self._module(
                layout.ids, layout.mask, layout.positions, layout.index, layout.targets, "entropy" in outputs
            )
        columns = {}
        for name in outputs:
            value = getattr(scored, name)
            assert value is not None, f"a {self._spec.kind} model gives no {name}"
            columns[name] = value.new_zeros(micro.num_tokens).index_put((layout.flat,), value)
        return TokenOutputs(row_ids=micro.row_ids, offsets=micro.offsets, **columns)

    def _update(self, metrics: Metrics) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        parameters = [p for p in self._module.parameters() if p.grad is not None]
        for name, parameter in self._module.named_parameters():
            if name in self._anchor and parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - self._anchor[name], alpha=self._spec.l2)
        limit = self._spec.max_grad_norm
        norm = nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else float("inf"))
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        lr = self._trained.training_args.learning_rate * self._lr_factor(self._steps)
        finite = bool(torch.isfinite(norm))
        if finite:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self._steps += 1
        else:
            logger.warning("%s: gradient norm is %s; this optimizer step is skipped", self._spec.role, float(norm))
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped >= _MOST_SKIPPED:
            raise FloatingPointError(
                f"{self._spec.role}: the gradient was not finite in {self._skipped} optimizer steps in a row, after "
                f"{self._steps} good ones. The weights or the loss have diverged: lower learning_rate, clip with "
                "max_grad_norm, and go on from an earlier checkpoint"
            )
        if self._rank == 0:
            role = "critic" if self._spec.kind == "value" else "actor"
            if finite:
                metrics.add_mean(f"{role}/grad_norm", float(norm))
            metrics.add_mean(f"{role}/lr", lr)
            metrics.add_sum(f"{role}/optimizer_steps", float(finite))
            metrics.add_sum(f"{role}/skipped_steps", float(not finite))

    # --- ranks -----------------------------------------------------------------------------------------------------

    def _aligned(self, parts: list[list[int]]) -> list[list[int]]:
        """As many passes on every rank; an empty one computes a filler row."""
        if self._world_size == 1:
            return parts
        most = torch.tensor(len(parts))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return parts + [[] for _ in range(int(most) - len(parts))]

    def _reduced(self, mine: Denominators) -> Denominators:
        if self._world_size == 1:
            return mine
        sizes = torch.tensor(astuple(mine), dtype=torch.float64, device=self._device)
        dist.all_reduce(sizes)
        return Denominators(*sizes.tolist())

    @contextlib.contextmanager
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        if self._world_size > 1:
            self._module.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        stored_as_computed = self._dtype == torch.float32 or not self._spec.trains
        if stored_as_computed or self._world_size > 1:  # several ranks: FSDP's own mixed precision
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    # --- weights ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _hf_module(module: PolicyScorer | ValueScorer) -> nn.Module:
        return module.lm if isinstance(module, PolicyScorer) else module.backbone

    def named_weights(self) -> NamedWeights:
        """Every rank must walk it to the end: gathering a sharded tensor is a collective."""
        for name, tensor in named_tensors(self._hf_module(self._module)):
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()

    def _state(self) -> dict[str, Any]:
        """Weights, and with an optimizer its state; the same keys whatever the sharding."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if self._optimizer is None:
            return {"model": get_model_state_dict(self._module)}
        model, optimizer = get_state_dict(self._module, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        """Weights and optimizer in torch's distributed checkpoint format, the schedule's position beside them."""
        import torch.distributed.checkpoint as dcp

        path.mkdir(parents=True, exist_ok=True)
        with _checkpoint_errors(f"{path} couldn't be written"):
            dcp.save(self._state(), checkpoint_id=path / "state", no_dist=self._world_size == 1)
        if self._rank == 0:
            (path / "schedule.json").write_text(json.dumps({"optimizer_steps": self._steps}))

    def load(self, path: Path) -> None:
        """Read what `save` wrote; the world size may differ. Without an optimizer only the weights are read."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

        state = self._state()
        with _checkpoint_errors(f"{path} doesn't fit the model of {self._spec.role}"):
            dcp.load(state, checkpoint_id=path / "state", no_dist=self._world_size == 1)
        if self._optimizer is None:
            set_model_state_dict(self._module, state["model"])
            return
        set_state_dict(
            self._module, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self._steps = json.loads((path / "schedule.json").read_text())["optimizer_steps"]

    def export(self, path: Path) -> None:
        """A Hugging Face folder with weights and tokenizer; rank 0 writes."""
        assert isinstance(self._module, PolicyScorer), "a critic has no Hugging Face form"
        weights = {}
        for name, tensor in self.named_weights():
            if self._rank == 0:
                weights[name] = tensor.cpu().contiguous()
        if self._rank == 0:
            with quiet_transformers():
                self._module.lm.save_pretrained(path, state_dict=weights)
            self._tokenizer.save_pretrained(path)


def _freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Take the parameters whose names begin so out of training."""
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise ValueError(f"freeze_module_prefix: no parameter begins with {prefix!r}; the first is {names[0]!r}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes)))


def _disable_dropout(model: nn.Module) -> None:
    """Zero every probability of dropping or jittering, as a module or as a number that a module keeps."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


@contextlib.contextmanager
def _checkpoint_errors(what: str) -> Iterator[None]:
    """Turn torch's exception, a `BaseException` with the stacks of all ranks, into `ValueError` with their causes."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        # It assumes one process, which was asked for with `no_dist`.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            causes = "; ".join(dict.fromkeys(str(cause) for cause, _ in error.failures.values()))
            raise ValueError(f"{what}: {causes}") from None


def _no_outputs(outputs: Sequence[OutputName]) -> TokenOutputs:
    columns = {name: torch.zeros(0) for name in outputs}
    return TokenOutputs(row_ids=(), offsets=torch.zeros(1, dtype=torch.int64), **columns)
