"""Checkpoints in Megatron's distributed format: weights and AdamW's moments by parameter, for any layout of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from roll.strategies.megatron.megatron_adapters import MegatronAdapters
from roll.strategies.megatron.megatron_releases import check_readable, checkpoint_writer
from roll.strategies.megatron.optimizer import Optimizer
from roll.strategies.megatron.pieces import Rectangle, pieces_of, rectangles_of
from roll.strategies.state_files import StateFiles
from roll.utils.pickles import plain_values_only

STATE, SCHEDULE = "state", "schedule.json"


def save_checkpoint(
    path: Path,
    role: str,
    modules: Sequence[nn.Module],
    optimizer: Optimizer | None,
    files: StateFiles,
    adapters: MegatronAdapters | None = None,
) -> None:
    """Write weights (of a model with adapters what trains), and with an optimizer its state; every rank calls it.

    Raises `ValueError` if the folder can't be written.
    """
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        (path / STATE).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with _errors(f"{role}: {path} couldn't be written"):
        state = _sharded(modules, optimizer, adapters, loading=False)
        dist_checkpointing.save(state, str(path / STATE), sharded_strategy=checkpoint_writer(files))


def load_checkpoint(
    path: Path,
    role: str,
    modules: Sequence[nn.Module],
    optimizer: Optimizer | None,
    adapters: MegatronAdapters | None = None,
) -> str:
    """Read what `save_checkpoint` wrote, into any layout; return the text of `SCHEDULE`.

    Without an optimizer only the weights are read. Raises `ValueError` if there is no such checkpoint of this model.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with _errors(f"{role}: {path} doesn't fit the model"):
        if not (path / STATE).is_dir():
            raise FileNotFoundError(f"there is no folder {path / STATE}")
        counts = (path / SCHEDULE).read_text()
        check_readable(path / STATE)
        wanted = _sharded(modules, optimizer, adapters, loading=True)
        present = [f"model{i}" in wanted for i in range(len(modules))]
        with plain_values_only(path / STATE):
            # Adapters and the optimizer's tensors are read into themselves.
            state: Any = dist_checkpointing.load(wanted, str(path / STATE), strict=StrictHandling.RAISE_UNEXPECTED)
        for i, module in enumerate(modules):
            if present[i]:
                module.load_state_dict(state[f"model{i}"], strict=adapters is None)
    return counts


def _sharded(
    modules: Sequence[nn.Module], optimizer: Optimizer | None, adapters: MegatronAdapters | None, *, loading: bool
) -> dict[str, Any]:
    """Return everything to store, each tensor with its place in the whole model.

    The optimizer's state is stored parameter by parameter like the weights, each rank's own part of it by itself.
    Megatron's own layout of it (`fully_reshardable`) loses its way in padded buffers, and differs from optimizer to
    optimizer.
    """
    from megatron.core import parallel_state

    metadata = {
        # One name per parameter, not per layer number and pipeline stage.
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {}
    if optimizer is not None:
        optimizer.fill_state()
    for i, module in enumerate(modules):
        weights = _spread(_weights(module, metadata))
        if adapters is not None:
            weights = {name: tensor for name, tensor in weights.items() if name.startswith("value_head.")}
        if weights:
            state[f"model{i}"] = weights
            if optimizer is not None:
                state[f"optimizer{i}"] = _optimizer_state(module, weights, optimizer, loading=loading)
    if adapters is not None:
        state["adapters"] = _adapter_state(adapters, optimizer, loading=loading)
    return state


def _weights(chunk: Any, metadata: dict[str, Any]) -> Any:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if chunk.kind == "policy":
        return chunk.sharded_state_dict(metadata=metadata)
    # A language model's own method insists on an output layer, where a critic has its scalar head.
    return super(LanguageModule, chunk).sharded_state_dict(metadata=metadata)


def _spread(weights: Any) -> Any:
    """Have each data-parallel rank write its share of the weights, not the first of them all.

    A weight is written by the rank in whose share its middle lies.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    tensors = [tensor for tensor in nested_values(weights) if not isinstance(tensor, ShardedObject)]
    total, before = sum(tensor.data.numel() for tensor in tensors), 0
    for tensor in tensors:
        middle = before + tensor.data.numel() / 2
        before += tensor.data.numel()
        *others, rank = tensor.replica_id
        ranks = dist.get_world_size(_replicas(tensor.data))
        tensor.replica_id = (*others, (rank - int(ranks * middle / total)) % ranks)
    return weights


def _replicas(parameter: Any) -> Any:
    """Return the ranks that have the same parameter, in the order that Megatron numbers them in."""
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _optimizer_state(chunk: nn.Module, weights: Any, optimizer: Optimizer, *, loading: bool) -> dict[str, Any]:
    """Return, by parameter, this rank's part of its state, each block of it placed as in the parameter.

    Where the optimizer isn't divided, a parameter's state is written by the rank that writes its weight.
    """
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    tensor_of = {tensor.data: tensor for tensor in weights.values() if isinstance(tensor.data, nn.Parameter)}
    state = {}
    for name, parameter in chunk.named_parameters():
        if not parameter.requires_grad or name.startswith("adapters."):
            continue
        assert parameter in tensor_of, f"the checkpoint has no place for the moments of {name}"
        tensor = tensor_of[parameter]
        # The last number tells ranks apart that have the same weights, the others those that share a model.
        ids = tensor.replica_id[:-1] if optimizer.divides else tensor.replica_id
        if loading or is_main_replica(ids):
            state.update(_moments(name, parameter, rectangles_of(tensor, parameter), optimizer))
    return state


def _moments(name: str, parameter: nn.Parameter, rectangles: list[Rectangle], optimizer: Optimizer) -> dict[str, Any]:
    tensors, part = optimizer.own_state(parameter)
    return {f"{name}.{key}": pieces_of(rectangles, part, flat, f"optimizer.{key}.") for key, flat in tensors.items()}


def _adapter_state(adapters: MegatronAdapters, optimizer: Optimizer | None, *, loading: bool) -> dict[str, Any]:
    """Return each factor and its moments, under the names that all backends have for them."""
    state = {}
    for name, parameter, rectangles, alone in adapters.places():
        first = dist.get_rank(_replicas(parameter)) == 0
        if loading or (alone and first):
            everything = slice(0, parameter.numel())
            state[name] = pieces_of(rectangles, everything, parameter.detach().view(-1))
        if optimizer is not None and (loading or (alone and (optimizer.divides or first))):
            state.update(_moments(name, parameter, rectangles, optimizer))
    return state


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Turn the library's exceptions, some of which aren't `Exception`s, into `ValueError`, and its notes into none."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    loggers = [logging.getLogger(name) for name in ("megatron.core.dist_checkpointing", "megatron.core.optimizer")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(dict.fromkeys(str(cause) for cause, _ in error.failures.values()))
        raise ValueError(f"{what}: {causes}") from None
    except (CheckpointingException, KeyError, RuntimeError, OSError, AssertionError) as error:
        raise ValueError(f"{what}: {error}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
