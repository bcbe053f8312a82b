"""AdamW of the project on Megatron's optimizers, which keep float32 weights and share them over data-parallel ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.training_args import TrainingArgs
from roll.strategies.training.optim import MOMENTS


def wrap_chunks(chunks: Sequence[nn.Module], options: MegatronConfig) -> list[Any]:
    """Return the chunks with gradient buffers that are summed over data- and context-parallel ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        use_distributed_optimizer=options.use_distributed_optimizer,
        overlap_param_gather=options.overlap_param_gather,
    )
    for chunk in chunks:
        _mark_shards(chunk, options)
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]


def _mark_shards(chunk: nn.Module, options: MegatronConfig) -> None:
    """Say which parameters are shards, so that a norm counts each once. Megatron does so where it initialises them.

    Experts that are divided otherwise than the rest of the model need groups of their own; Megatron sees to that only
    with expert parallelism.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes as mark

    own_expert_group = options.expert_tensor_parallel_size not in (None, options.tensor_model_parallel_size)
    for module in chunk.modules():
        split = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
        weight = module.weight if split else None
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            mark(weight, True, int(isinstance(module, RowParallelLinear)), 1)
        if weight is not None and own_expert_group and getattr(module, "is_expert", False):
            weight.allreduce = False  # type: ignore[union-attr]


class Optimizer:
    """One AdamW step at a time, over all trainable parameters of this rank's chunks."""

    def __init__(
        self,
        chunks: Sequence[Any],
        args: TrainingArgs,
        options: MegatronConfig,
        dtype: torch.dtype,
        *,
        max_norm: float,
        l2: float,
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam",
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_epsilon,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
            optimizer_cpu_offload=options.optimizer_cpu_offload,
            optimizer_offload_fraction=1.0 if options.optimizer_cpu_offload else 0.0,
            clip_grad=0.0,
        )
        with warnings.catch_warnings():
            # A pipeline stage may be frozen as a whole.
            warnings.filterwarnings("ignore", message="WARNING: there is no optimizer")
            self.megatron = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
        self._distributed = options.use_distributed_optimizer
        self._max_norm, self._l2 = max_norm, l2
        self._anchor = [main.detach().clone() for main in self._mains()] if l2 > 0 else []

    def _mains(self) -> Iterator[Tensor]:
        """Yield the float32 weights (or this rank's shards of them) that AdamW steps on."""
        for group in self.megatron.param_groups:
            yield from group["params"]

    def tensors(self) -> Iterator[Tensor]:
        """Yield master weights, moments, and the weights that `l2` pulls towards."""
        yield from self._mains()
        yield from self._anchor
        for optimizer in self.megatron.chained_optimizers:
            states = optimizer.optimizer.state.values() if optimizer.optimizer is not None else ()
            for state in states:
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def zero_grad(self) -> None:
        """Forget the gradients of the last step; the buffers are the chunks' business."""
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> tuple[float, bool]:
        """Clip and step on the summed gradients unless they aren't finite: (norm before clipping, taken)."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        self.megatron.prepare_grads()
        if self._anchor:
            for main, initial in zip(self._mains(), self._anchor, strict=True):
                if main.grad is not None:
                    main.grad.add_(main - initial, alpha=self._l2)
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            return norm, False
        if self._max_norm > 0:
            parameters = [main for main in self._mains() if main.grad is not None]
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, self._max_norm, norm)
        for group in self.megatron.param_groups:
            # Matrices decay, vectors don't: Megatron marks the groups but leaves the number to its scheduler.
            group["lr"], group["weight_decay"] = lr, weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()
        return norm, True

    @torch.no_grad()
    def fill_state(self) -> None:
        """Give parameters that haven't stepped yet their moments: a checkpoint stores and restores them all."""
        for optimizer in self.megatron.chained_optimizers:
            inner = optimizer.optimizer
            if isinstance(inner, torch.optim.AdamW):
                for group in inner.param_groups:
                    for main in group["params"]:
                        if not inner.state[main]:
                            zeros = {name: torch.zeros_like(main) for name in MOMENTS}
                            inner.state[main] = {"step": torch.tensor(0.0), **zeros}
            elif inner is not None:
                optimizer.init_state_fn(inner, optimizer.config)

    def own_state(self, parameter: nn.Parameter) -> tuple[dict[str, Tensor], slice]:
        """Return what this rank has of a parameter's moments, and of a weight in half precision of its float32 master.

        Returns:
            (name -> [part], the part of the flattened parameter). They are views: to write to them is to load. Without
            any part here, nothing by no name.
        """
        main, moments, part = self._place(parameter)
        if main is None:
            return {}, part
        tensors = {MASTER: main, **moments}
        return {name: tensors[name].detach().view(-1) for name in state_names(parameter)}, part

    @property
    def divides(self) -> bool:
        """Return whether each data-parallel rank has a part of its own; otherwise all have everything."""
        return self._distributed

    def take_weights(self) -> None:
        """Make the float32 weights those of the chunks, which were loaded without this optimizer's own."""
        self.megatron.reload_model_params()

    def set_steps(self, steps: int) -> None:
        """Set the number of steps that the moments have seen, where the optimizer counts them itself."""
        for optimizer in self.megatron.chained_optimizers:
            inner = optimizer.optimizer
            if inner is None:
                continue
            if isinstance(inner, torch.optim.AdamW):
                for values in inner.state.values():
                    values["step"] = torch.tensor(float(steps))
                continue
            for group in inner.param_groups:
                group["step"] = steps
            if hasattr(inner, "_sync_hdo_state_to_sub_optimizers"):  # moments in host memory
                inner._sync_hdo_state_to_sub_optimizers()

    def _place(self, parameter: nn.Parameter) -> tuple[Tensor | None, Any, slice]:
        """Return (float32 weight, its moments, the part of the flattened parameter they are); None: no part is here."""
        for optimizer in self.megatron.chained_optimizers:
            inner = optimizer.optimizer
            if self._distributed:
                if parameter in optimizer.model_param_group_index_map:
                    group, order = optimizer.model_param_group_index_map[parameter]
                    main = inner.param_groups[group]["params"][order]
                    part = optimizer._get_model_param_range_map(parameter)["param"]
                    return main, inner.state[main], slice(part.start, part.end)
            elif inner is not None:
                main = getattr(parameter, "main_param", parameter)
                if main in inner.state:
                    return main, inner.state[main], slice(0, parameter.numel())
        return None, None, slice(0, 0)


MASTER = "master"


def state_names(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return what a checkpoint keeps of a trained parameter besides its value."""
    return MOMENTS if parameter.dtype == torch.float32 else (*MOMENTS, MASTER)
