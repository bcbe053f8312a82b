"""LoRA on Megatron: peft says which layers get adapters and how they begin, and these stand beside Megatron's layers.

A transformers model without memory is the form that peft looks at, so keys, names, new adapters, folders and messages
are those of the other backends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.byte_account import count_gathered
from roll.strategies.base import NamedWeights, TrainSpec
from roll.strategies.hf.lora import SAMPLED, Adapters, add_adapters, peft_name
from roll.strategies.megatron.lora_layers import Factors, LinearAdapters, shares_of
from roll.strategies.megatron.mapping import HfTensor, MappedParameter
from roll.strategies.megatron.megatron_weights import Ranks, all_entries, held_by, module_name
from roll.strategies.megatron.pieces import Rectangle
from roll.strategies.megatron.source import open_weights
from roll.strategies.state_files import StateFiles

if TYPE_CHECKING:
    from roll.strategies.megatron.megatron_model import TokenGPT

OWNERS = {"policy": "lm.", "value": "backbone.", "reward": "classifier."}
"""What checkpoints of every backend put before the names of a role's module."""
_ADAPTED = ("self_attention.", "mlp.linear_fc")


class MegatronAdapters:
    """The adapters of all chunks of this rank: off for a while, merged, gathered, written."""

    def __init__(self, chunks: Sequence[TokenGPT], form: nn.Module, spec: TrainSpec, source: str | Path) -> None:
        """Put adapters beside the layers of `chunks`, and freeze everything else but a scalar head.

        `form`: the transformers model on the meta device. Raises `ValueError` as `add_adapters` does, and for layers
        that can't have adapters here.
        """
        self._kind, self._ranks = chunks[0].kind, Ranks.here()
        _give_sizes(form)
        base = partial(_first_values, source, form)
        add_adapters(form, spec, base)
        self.peft = Adapters(form, spec.worker.model_args, base)
        self._check(spec.role, chunks[0])
        self._of: dict[nn.Parameter, LinearAdapters] = {}
        for chunk in chunks:
            self._put(chunk)
        form.to("meta")  # the chunks have their own copies
        self._factors: dict[str, Factors] = {
            factors.name: factors for linear in self._of.values() for factors in linear.parts
        }

    def _check(self, role: str, chunk: TokenGPT) -> None:
        """Raise on all ranks alike, whatever layers they hold."""
        table, left = self._ranks.table(chunk), set(self.peft.layers)
        for entry in all_entries(table, self._kind):
            if not entry.parameters[0].startswith(_ADAPTED):
                continue
            for i, name in self._adapted(entry):
                left.discard(name)
                ranks = dist.get_world_size(self._ranks.tensor)
                if not all(shares_of(entry, i, rank, ranks) for rank in range(ranks)):
                    raise ValueError(
                        f"{role}: lora_target: with tensor_model_parallel_size = {ranks} some ranks hold nothing of "
                        f"{name}; use at most {chunk.arch.kv_heads}, the key heads, or leave {name.rsplit('.', 1)[-1]} "
                        "out"
                    )
        if left:
            raise ValueError(
                f"{role}: lora_target: on Megatron experts, shared ones too, and routers get no adapters, and "
                f"{min(left)} is one; choose among q_proj, k_proj, v_proj and o_proj, or use fsdp2_train"
            )

    def _adapted(self, entry: MappedParameter) -> list[tuple[int, str]]:
        """Return (number in the entry, name of the layer) of each of its tensors that gets adapters."""
        names = [module_name(tensor, self._kind).removesuffix(".weight") for tensor in entry.tensors]
        return [(i, name) for i, name in enumerate(names) if name in self.peft.layers]

    def _put(self, chunk: TokenGPT) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        group, split = self._ranks.tensor, chunk.config.sequence_parallel
        linears = {
            module.weight: module
            for module in chunk.modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        }
        chunk.requires_grad_(False)
        if self._kind != "policy" and chunk.post_process:
            chunk.value_head.requires_grad_(True)
        placed = []
        for held in held_by(chunk, self._ranks):
            adapted = []
            for i, name in self._adapted(held.entry):
                layer = self.peft.layers[name]
                (a,), (b,) = (tuple(each.parameters()) for each in (layer.lora_A, layer.lora_B))
                shares = shares_of(held.entry, i, dist.get_rank(group), dist.get_world_size(group))
                (scaling,) = layer.scaling.values()
                factors = Factors(name, a.detach(), b.detach(), scaling, shares, by_rows=held.entry.dim == 0)
                factors.mark(sequence_parallel=split)
                adapted.append(factors)
            if adapted:
                linear = LinearAdapters(adapted, held.parameter, split=split)
                linears[held.parameter].register_forward_hook(linear)
                self._of[held.parameter] = linear
                placed.append(linear)
        chunk.adapters = nn.ModuleList(placed)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its base model."""
        for linear in self._of.values():
            linear.enabled = False
        try:
            yield
        finally:
            for linear in self._of.values():
                linear.enabled = True

    @torch.no_grad()
    def merged(self, parameter: nn.Parameter, matrix: Tensor) -> Tensor:
        """Return a parameter's weight with its adapters merged in, float32; the weight itself where there are none."""
        return self._of[parameter].merged(matrix) if parameter in self._of else matrix

    def weights(self) -> NamedWeights:
        """Yield whole matrices under peft's names, float32, B scaled; a collective of the model's ranks."""
        for name, layer in self.peft.layers.items():
            (scaling,) = layer.scaling.values()
            yield peft_name(name, "A"), self.full_matrix(name, "A")
            yield peft_name(name, "B"), scaling * self.full_matrix(name, "B")

    @torch.no_grad()
    def full_matrix(self, name: str, matrix: str) -> Tensor:
        """Return matrix `A` or `B` of a layer on every rank; each adds its part to zeros."""
        from megatron.core import parallel_state

        layer = self.peft.layers[name]
        (like,) = (layer.lora_A if matrix == "A" else layer.lora_B).parameters()
        device = next(iter(self._of)).device
        full = torch.zeros(like.shape, device=device)
        if name in self._factors and self._writes(self._factors[name], matrix):
            factors = self._factors[name]
            flat = (factors.a if matrix == "A" else factors.b).detach().view(-1)
            for part in factors.rectangles(matrix, ""):
                window = tuple(slice(a, a + n) for a, n in zip(part.begins, part.sizes, strict=True))
                full[window] = flat.as_strided(part.sizes, part.strides, flat.storage_offset() + part.offset)
        group = parallel_state.get_model_parallel_group()
        if dist.get_world_size(group) > 1:
            count_gathered(full.nbytes)
            dist.all_reduce(full, group=group)
        return full

    def _writes(self, factors: Factors, matrix: str) -> bool:
        """Return whether no other tensor-parallel rank has the same."""
        return factors.divided(matrix) or dist.get_rank(self._ranks.tensor) == 0

    def places(self) -> Iterator[tuple[str, nn.Parameter, list[Rectangle], bool]]:
        """Yield (name, parameter, its place in checkpoints, whether this rank writes it) of this rank's factors."""
        for name, factors in self._factors.items():
            for matrix, parameter in (("A", factors.a), ("B", factors.b)):
                key = f"{OWNERS[self._kind]}{name}.lora_{matrix}.default.weight"
                yield key, parameter, factors.rectangles(matrix, key), self._writes(factors, matrix)

    def export(self, folder: Path, *, writes: bool, files: StateFiles) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` loads onto the base model; every rank calls."""
        tensors = {}
        for name in self.peft.layers:
            for matrix in "AB":
                full = self.full_matrix(name, matrix)
                if writes:
                    tensors[peft_name(name, matrix)] = full.to("cpu")
        if writes:
            files.folder(folder, partial(self.peft.write_folder, tensors))


def _give_sizes(form: nn.Module) -> None:
    """Give linear layers weights on the CPU that take no memory: adapters are made where their layer's weight is."""
    for module in form.modules():
        if isinstance(module, nn.Linear):
            zero = torch.zeros((), dtype=module.weight.dtype)
            module.weight = nn.Parameter(zero.expand(module.weight.shape), requires_grad=False)


def _first_values(source: str | Path, form: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the first rows of layers' weights, as many as it takes for `SAMPLED` numbers."""
    values = {}
    with open_weights(source) as weights:
        for name in names:
            shape = tuple(form.get_parameter(f"{name}.weight").shape)
            tensor = HfTensor(f"{name.removeprefix('model.')}.weight", shape)
            weights.check(tensor, 0)
            rows = min(shape[0], -(-SAMPLED // shape[1]))
            values[name] = weights.read(tensor, None, 0, 0, rows)
    return values
