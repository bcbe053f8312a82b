"""Weights into and out of Megatron's chunks, tensor by tensor, under Hugging Face names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.byte_account import count_gathered
from roll.strategies.attention.attention import all_gathered
from roll.strategies.megatron.mapping import HfTensor, MappedParameter, WeightTable
from roll.strategies.megatron.source import WeightSource, open_weights

if TYPE_CHECKING:
    from roll.strategies.megatron.megatron_model import TokenGPT

_SCORE = "score.weight"
_HEADS = ("lm_head.weight", _SCORE)  # tensors outside the backbone: a value model has no use for them
_BESIDE = ("value_head.", "adapters.")  # parameters that no tensor of a base model stands for


@dataclass(frozen=True)
class Ranks:
    """The groups that share a model."""

    tensor: Any
    expert_tensor: Any
    expert: Any
    pipeline: Any

    @classmethod
    def here(cls) -> Ranks:
        """Return those of this process."""
        from megatron.core import parallel_state as state

        return cls(
            tensor=state.get_tensor_model_parallel_group(),
            expert_tensor=state.get_expert_tensor_parallel_group(),
            expert=state.get_expert_model_parallel_group(),
            pipeline=state.get_pipeline_model_parallel_group(),
        )

    def table(self, chunk: TokenGPT) -> WeightTable:
        """Return the weights of a chunk's model, divided over these ranks."""
        return WeightTable(
            chunk.arch, tensor=dist.get_world_size(self.tensor), expert_tensor=dist.get_world_size(self.expert_tensor)
        )

    def sharing(self, entry: MappedParameter) -> Any:
        """Return the group over which an entry is divided."""
        return self.expert_tensor if entry.experts else self.tensor

    def experts(self, entry: MappedParameter) -> list[int]:
        """Return numbers of the experts on this rank."""
        here = entry.experts // dist.get_world_size(self.expert)
        first = dist.get_rank(self.expert) * here
        return list(range(first, first + here))


@dataclass(frozen=True)
class Held:
    """An entry on this rank, of one expert where it is one of the experts."""

    entry: MappedParameter
    expert: int | None
    parameter: nn.Parameter
    matrix: Tensor  # view of the parameter in the orientation of its tensors


@torch.no_grad()
def load_weights(chunks: Sequence[TokenGPT], source: str | Path | Mapping[str, Tensor]) -> None:
    """Fill the parameters of this rank's chunks (all but a value head) with its shares of a model's tensors.

    The head of a reward model is filled where the source has one.

    `source`: a folder, a hub id, a `.gguf` file, or tensors under the names of a transformers module or checkpoint.
    Raises `ValueError` if a tensor is missing, unknown, or of another shape than the model's configuration says.
    """
    ranks = Ranks.here()
    table = ranks.table(chunks[0])
    with open_weights(source) as weights:
        _check_complete(weights, table, chunks[0].kind)
        for chunk in chunks:
            for held in held_by(chunk, ranks):
                group = ranks.sharing(held.entry)
                _fill(held, weights, dist.get_rank(group), dist.get_world_size(group))
            if chunk.kind == "reward" and chunk.post_process and _SCORE in weights.names:
                head = HfTensor(_SCORE, tuple(chunk.value_head.weight.shape))
                weights.check(head, 0)
                chunk.value_head.weight.copy_(weights.read(head, None, None, 0, 0))


def _fill(held: Held, weights: WeightSource, rank: int, ranks: int) -> None:
    entry, position = held.entry, 0
    _check_size(held, rank, ranks)
    if entry.dim is None:
        held.matrix.copy_(weights.read(entry.tensors[0], held.expert, None, 0, 0))
        return
    for segment in entry.share(rank, ranks):
        target = held.matrix.narrow(entry.dim, position, segment.size)
        if segment.tensor is None:
            target.zero_()
        else:
            tensor = entry.tensors[segment.tensor]
            target.copy_(weights.read(tensor, held.expert, entry.dim, segment.start, segment.stop))
        position += segment.size


def _check_size(held: Held, rank: int, ranks: int) -> None:
    """Check that no parameter is larger than what fills it: it would keep memory that nobody has written to."""
    entry, wanted = held.entry, list(held.entry.tensors[0].shape)
    if entry.dim is not None:
        wanted[entry.dim] = sum(segment.size for segment in entry.share(rank, ranks))
    if list(held.matrix.shape) != wanted:
        raise ValueError(
            f"Megatron's {entry.parameters[0]} has shape {tuple(held.matrix.shape)}, and the folder's model fills "
            f"{tuple(wanted)} of it: with these options Megatron builds another model. Remove what you last added to "
            "strategy_config"
        )


def _check_complete(weights: WeightSource, table: WeightTable, kind: str) -> None:
    tensors = [(tensor, entry.experts) for entry in all_entries(table, kind) for tensor in entry.tensors]
    wanted = {name for tensor, experts in tensors for name in weights.parts(tensor, experts)}
    missing = sorted(wanted - weights.names)
    if missing:
        raise ValueError(f"the model's weights lack {len(missing)} tensors: {_some(missing)}")
    ignored = _HEADS if kind != "policy" or table.arch.tied else ()
    unknown = {name for name in weights.names - wanted if not name.endswith("rotary_emb.inv_freq")}
    if unknown - set(ignored):
        unexpected = sorted(unknown - set(ignored))
        raise ValueError(
            f"the model's weights have {len(unexpected)} tensors that its configuration knows nothing of: "
            f"{_some(unexpected)}"
        )
    for tensor, experts in tensors:
        weights.check(tensor, experts)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def entries_of(table: WeightTable, kind: str) -> Iterator[tuple[int | None, MappedParameter]]:
    """Yield all (number of the layer, entry) of a model; of a tied one the embedding stands for the head."""
    yield None, table.embedding
    for layer in range(table.arch.layers):
        yield from ((layer, entry) for entry in table.layer(layer))
    yield None, table.final_norm
    if kind == "policy" and not table.arch.tied:
        yield None, table.head


def all_entries(table: WeightTable, kind: str) -> Iterator[MappedParameter]:
    """Yield all entries of a model, see `entries_of`."""
    yield from (entry for _, entry in entries_of(table, kind))


def held_by(chunk: TokenGPT, ranks: Ranks) -> Iterator[Held]:
    """Yield what of the table a chunk holds; every parameter but adapters and a value head's exactly once."""
    table = ranks.table(chunk)
    parameters = {name: p for name, p in chunk.named_parameters() if not name.startswith(_BESIDE)}
    left = set(parameters)
    for prefix, entry in _places(chunk, table):
        for local, expert in enumerate(ranks.experts(entry) if entry.experts else [None]):
            names = {prefix + option.format(expert=local): option for option in entry.parameters}
            name = next((name for name in names if name in parameters), None)
            assert name is not None, f"the chunk has none of {list(names)}"
            left.discard(name)
            matrix = parameters[name].detach()
            if expert is not None and "{expert}" not in names[name]:
                matrix = _of_stack(matrix, name, local, len(ranks.experts(entry)), table.arch.hidden)
            yield Held(entry, expert, parameters[name], matrix)
    assert not left, f"the weight table doesn't know {sorted(left)}"


def _of_stack(matrix: Tensor, name: str, expert: int, experts: int, hidden: int) -> Tensor:
    """Return one expert in Megatron's own grouped layer, which keeps all of them transposed in one matrix."""
    shape = (experts, hidden, -1) if name.endswith("weight1") else (experts, -1, hidden)
    return matrix.view(shape)[expert].T


def _places(chunk: TokenGPT, table: WeightTable) -> Iterator[tuple[str, MappedParameter]]:
    """Yield (what stands before the parameter's name, entry) for what the chunk was built with."""
    if chunk.pre_process:
        yield "", table.embedding
    for i, layer in enumerate(chunk.decoder.layers):
        for entry in table.layer(layer.layer_number - 1):
            yield f"decoder.layers.{i}.", entry
    if chunk.post_process:
        yield "", table.final_norm
    if chunk.post_process and chunk.kind == "policy" and not (chunk.pre_process and table.arch.tied):
        yield "", table.head


@torch.no_grad()
def stream_weights(
    chunks: Sequence[TokenGPT],
    dtype: torch.dtype | None = None,
    merged: Callable[[nn.Parameter, Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors under names of the transformers module, in the same order on every rank; a collective.

    Of a policy, names begin with `model.` (but `lm_head.weight`) and the embedding of a tied model comes once. Of a
    value model they are those of its backbone, without its head; of a reward model those of a classifier. A tensor may
    share memory with a parameter. `dtype`: what they are cast to before they are gathered if it is narrower. `merged`:
    what to send in place of a parameter's matrix.
    """
    ranks, kind = Ranks.here(), chunks[0].kind
    table = ranks.table(chunks[0])
    held: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for chunk in chunks:
        for part in held_by(chunk, ranks):
            held[_key(part.entry)].append(part)
    like = next(chunks[0].parameters())
    sent = dtype if dtype is not None and dtype.itemsize < like.dtype.itemsize else like.dtype
    owners = _owners([_key(entry) in held for entry in all_entries(table, kind)], ranks.pipeline, like.device)
    for entry, owner in zip(all_entries(table, kind), owners, strict=True):
        if owner == dist.get_rank(ranks.pipeline):
            mine = held[_key(entry)]
            matrices = [part.matrix if merged is None else merged(part.parameter, part.matrix) for part in mine]
            wholes = _joined(entry, [matrix.to(sent) for matrix in matrices], ranks)
        else:
            leading = (entry.experts,) if entry.experts else ()
            wholes = [like.new_empty(*leading, *tensor.shape, dtype=sent) for tensor in entry.tensors]
        for tensor, full in zip(entry.tensors, wholes, strict=True):
            yield module_name(tensor, kind), _spread(full, owner, ranks.pipeline)
    if kind == "reward":
        heads = [chunk.value_head.weight.detach() for chunk in chunks if chunk.post_process]
        (owner,) = _owners([bool(heads)], ranks.pipeline, like.device)
        yield _SCORE, _spread(heads[0] if heads else like.new_empty(1, table.arch.hidden), owner, ranks.pipeline)


def module_name(tensor: HfTensor, kind: str) -> str:
    """Name of a tensor in a causal language model (policy), in a classifier (reward), or in the backbone (value)."""
    return tensor.name if kind == "value" or tensor.name in _HEADS else "model." + tensor.name


def _key(entry: MappedParameter) -> tuple[str, str]:
    return entry.parameters[0], entry.tensors[0].name


def _owners(mine: list[bool], pipeline: Any, device: torch.device) -> list[int]:
    """Return the pipeline rank that holds each entry."""
    rank = dist.get_rank(pipeline)
    owners = torch.tensor([rank if here else -1 for here in mine], device=device)
    dist.all_reduce(owners, op=dist.ReduceOp.MAX, group=pipeline)
    return owners.tolist()


def _spread(full: Tensor, owner: int, pipeline: Any) -> Tensor:
    if dist.get_world_size(pipeline) == 1:
        return full
    full = full.contiguous()
    count_gathered(full.nbytes)
    dist.broadcast(full, src=dist.get_global_rank(pipeline, owner), group=pipeline)
    return full


def _joined(entry: MappedParameter, matrices: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return the entry's tensors from the shares of the ranks of this pipeline stage."""
    group = ranks.sharing(entry)
    mine = torch.stack(matrices) if entry.experts else matrices[0]
    shares = [mine] if entry.dim is None else _gathered(mine, group)
    wholes = assembled(entry, shares)
    if not entry.experts:
        return wholes
    return [torch.cat(_gathered(full, ranks.expert)) for full in wholes]


def _gathered(mine: Tensor, group: Any) -> list[Tensor]:
    shares = all_gathered(mine, group)
    if len(shares) > 1:
        count_gathered(sum(share.nbytes for share in shares))
    return shares


def assembled(entry: MappedParameter, shares: list[Tensor]) -> list[Tensor]:
    """Return an entry's tensors from the shares of all ranks; experts are stacked in front."""
    leading = shares[0].shape[:1] if entry.experts else ()
    if entry.dim is None:
        return shares
    dim = entry.dim + len(leading)
    if len(shares) == 1 and len(entry.tensors) == 1:
        # One tensor in its own order: without the padding, there is nothing to copy.
        return [shares[0].narrow(dim, 0, entry.tensors[0].shape[entry.dim])]
    wholes = [shares[0].new_empty(*leading, *tensor.shape) for tensor in entry.tensors]
    for rank, share in enumerate(shares):
        position = 0
        for segment in entry.share(rank, len(shares)):
            if segment.tensor is not None:
                target = wholes[segment.tensor].narrow(dim, segment.start, segment.size)
                target.copy_(share.narrow(dim, position, segment.size))
            position += segment.size
    return wholes


def freeze(chunks: Sequence[TokenGPT], prefixes: Sequence[str]) -> None:
    """Take the parameters whose Hugging Face names begin with one of `prefixes` out of training.

    Raises `ValueError` if no tensor begins so, or only some of those that Megatron keeps in one parameter do.
    """
    ranks, kind = Ranks.here(), chunks[0].kind
    table = ranks.table(chunks[0])
    entries = [[module_name(tensor, kind) for tensor in entry.tensors] for entry in all_entries(table, kind)]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for names in entries for name in names):
            first = entries[0][0]
            raise ValueError(f"freeze_module_prefix: no parameter begins with {prefix!r}; the first is {first!r}")
    # On every rank, whether it holds the parameter or not: one that went on would wait for the others.
    for names in entries:
        frozen = [name for name in names if name.startswith(tuple(prefixes))]
        if frozen and len(frozen) < len(names):
            raise ValueError(
                f"freeze_module_prefix: Megatron keeps {', '.join(names)} in one parameter; freeze all or none "
                f"of them, not only {', '.join(frozen)}"
            )
    for chunk in chunks:
        for held in held_by(chunk, ranks):
            if module_name(held.entry.tensors[0], kind).startswith(tuple(prefixes)):
                held.parameter.requires_grad_(False)
