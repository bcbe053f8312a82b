"""Models whose weights come in after they are sharded: no rank ever holds a whole one.

The module is built with its parameters on the meta device. They get memory of the host that nobody has written to,
which the system hands out page by page when it is written: a module that is never filled takes next to none. Sharding
copies this rank's part of a layer and drops the layer; then each rank reads its part from the safetensors files, cast
as transformers casts what it loads. What isn't in the files (adapters, a value head, buffers that aren't saved) is
there from the beginning, as in a module that was loaded whole.

Proofs that need a forward pass run on a small copy of the model, with two layers and random weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roll.configs.catalog.family_table import family_of
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import TrainSpec
from roll.strategies.hf.checkpoint_names import CheckpointNames
from roll.strategies.hf.description import generation_config
from roll.strategies.hf.first_layers import parameters_on_meta, small_config
from roll.strategies.training.picture_folder import language_names
from roll.strategies.training.pretrained import (
    attention_option,
    language_model_class,
    load_config,
    named_tensors,
    weights_folder,
)
from roll.strategies.training.safetensor_files import StoredTensors, safetensors_files
from roll.utils.memory import return_freed_memory

logger = logging.getLogger(__name__)

_READ_BYTES = 32 << 20  # of a tensor at a time, in the type that it is stored in
_SPELT = {torch.bfloat16: "BF16", torch.float16: "F16"}
_SAMPLED = 1024  # values at the start of each weight that adapters remember their base model by

PartsOf: TypeAlias = Callable[[Any], Iterable[tuple[Tensor, int]]]
"""From a tensor of a sharded module to what this rank has of it: pieces without gaps, and the number of the first
element of each in the order of rows."""


class StreamedWeights:
    """The weights of a model in files, and the empty module that they belong to."""

    def __init__(self, args: ModelArgs, kind: Any, stored: torch.dtype, files: StoredTensors) -> None:
        """Describe a model; raises `_Unusual` for one that has to be loaded by transformers."""
        self._args = args
        self._kind = kind
        self._stored = stored
        self._files = files
        self._config = load_config(args)
        by_itself = family_of(self._config.model_type).pictures is None  # else its tower is loaded, too
        self._language = language_names(files.shapes) if by_itself else None
        self.module: nn.Module = self._empty()
        """The transformers module, in eval mode; its parameters and saved buffers hold nothing yet."""
        self._names = CheckpointNames(self.module)
        self._sources = {name: self._found(name, tensor) for name, tensor in named_tensors(self.module)}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(self.module)}
        self._check_tied()
        self.small: Any = self._small_copy()
        """A transformers module that computes as `module` does, of few layers with random weights."""
        _reserve(self.module)
        if args.uses_lora:
            self._fill_beginnings()

    @classmethod
    def open(cls, spec: TrainSpec, stored: torch.dtype) -> StreamedWeights | None:
        """Return the weights of a role's policy or value model; None for one that has to be loaded whole.

        So are reward models, models without safetensors, and those whose files hold something else than their modules:
        quantised ones, ones with tensors that transformers would invent or put together in ways we don't know.
        """
        from transformers import AutoModel

        args = spec.worker.model_args
        kind = {"policy": language_model_class(load_config(args)), "value": AutoModel}.get(spec.kind)
        files = [] if kind is None else safetensors_files(weights_folder(args))
        if not files:
            return None
        try:
            return cls(args, kind, stored, StoredTensors(files))
        except _Unusual as error:
            logger.info("%s: every rank loads the whole of %s: %s", spec.role, args.model_name_or_path, error)
            return None

    def _empty(self) -> nn.Module:
        if getattr(self._config, "quantization_config", None) is not None:
            raise _Unusual("it is quantised")
        with parameters_on_meta():
            module = self._from_config(self._config)
        keeps_fp32 = any(getattr(module, f"_keep_in_fp32_modules{which}", None) for which in ("", "_strict"))
        if keeps_fp32 and self._stored != torch.float32:
            raise _Unusual("some of its weights are kept in float32")
        if module.can_generate():
            module.generation_config = generation_config(self._args, module)
        return module.eval()

    def _from_config(self, config: Any) -> Any:
        options = attention_option(self._args, config)
        trusts = self._args.trust_remote_code
        return self._kind.from_config(config, dtype=self._stored, trust_remote_code=trusts, **options)

    # --- names -----------------------------------------------------------------------------------------------------

    def _found(self, name: str, tensor: Tensor) -> list[str]:
        """Return the stored tensor that is a tensor of the module, or those that its rows consist of, in order."""
        plain = self._stored_name(name)
        shape = tuple(tensor.shape)
        if plain is not None and self._files.shapes[plain] == shape:
            return [plain]
        try:
            parts = self._names.stored(name, tensor)  # tensors of experts are stacked in modules, and apart in files
        except ValueError as error:
            raise _Unusual(str(error)) from error
        sources = []
        for part, part_shape in parts:
            stored = self._stored_name(part)
            if stored is None or self._files.shapes[stored] != part_shape:
                raise _Unusual(f"its files have no {name} of shape {shape}")
            sources.append(stored)
        return sources

    def _stored_name(self, name: str) -> str | None:
        """Name in the files: that of the module, or of one with or without a head around the same backbone, which may
        be a part of a picture model."""
        prefix, stored = f"{self.module.base_model_prefix}.", self._files.shapes
        options: Iterable[str] = (name, prefix + name, name.removeprefix(prefix))
        if self._language is not None:
            options = tuple(map(self._language.stored, options))
        return next((option for option in options if option in stored), None)

    def _check_tied(self) -> None:
        """Raise `_Unusual` where a file has other values for one of two tied tensors."""
        name_of = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            other, mine = self._stored_name(name), self._sources[name_of[id(parameter)]]
            if other is None or [other] == mine:
                continue
            if len(mine) != 1 or not self._same(mine[0], other):
                raise _Unusual(f"{name} is tied, and has values of its own in the files")

    def _same(self, one: str, other: str) -> bool:
        rows, step = self._files.shapes[one][0], self._rows_at_once(self._files.shapes[one])
        starts = range(0, rows, step)
        pairs = ((self._files.read(one, i, i + step), self._files.read(other, i, i + step)) for i in starts)
        return self._files.shapes[one] == self._files.shapes[other] and all(torch.equal(a, b) for a, b in pairs)

    @staticmethod
    def _rows_at_once(shape: tuple[int, ...]) -> int:
        return max(1, _READ_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))

    # --- values ----------------------------------------------------------------------------------------------------

    def _fill_beginnings(self) -> None:
        """Read the first values of each weight: base models are told apart by them."""
        for name, parameter in self.module.named_parameters():
            if parameter.dim() == 2:
                rows = min(len(parameter), -(-_SAMPLED // parameter.shape[1]))
                self.read(name, parameter[:rows], 0)

    def waiting(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield what the files have of `model`, which was `module` and may be sharded, or have adapters, now."""
        for name, tensor in named_tensors(model):
            if _plain(name) in self._sources:
                yield name, tensor

    def fill(self, model: nn.Module, parts: PartsOf | None = None) -> None:
        """Read this rank's part of every weight of a sharded `model`: of a DTensor, or what `parts` says."""
        for name, tensor in self.waiting(model):
            for part, start in (parts or _local)(tensor):
                self.read(name, part, start)
        return_freed_memory()

    def rounded(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a weight, which trains in float32, may lose something in `dtype`."""
        stored = {self._files.types[source] for source in self._sources[_plain(name)]}
        return dtype != torch.float32 and stored != {_SPELT.get(dtype)}

    @torch.no_grad()
    def read(self, name: str, local: Tensor, start: int) -> None:
        """Fill `local` with the numbers of a weight, from number `start` on in the order of rows."""
        sources, shape, flat = self._sources[_plain(name)], self._shapes[_plain(name)], local.detach().view(-1)
        if not shape:
            flat.copy_(self._files.read(sources[0]).view(-1))
            return
        width = math.prod(shape[1:])
        # Stacked experts are read one by one, of so many parts each.
        parts_per_expert = len(sources) // shape[0] if len(sources) > 1 else 0
        step = 1 if parts_per_expert else self._rows_at_once(shape)
        stop = start + len(flat)
        for first in range(start // width, -(-stop // width), step):
            last = min(first + step, -(-stop // width))
            begin, end = max(start, first * width), min(stop, last * width)
            if parts_per_expert:
                parts = sources[first * parts_per_expert : (first + 1) * parts_per_expert]
                numbers = self._numbers(parts, begin - first * width, end - first * width)
            elif last - first == 1 and len(shape) > 2:  # rows of one expert
                columns = math.prod(shape[2:])
                low, high = begin // columns - first * shape[1], -(-end // columns) - first * shape[1]
                rows = self._files.read(sources[0], first, last, within=slice(low, high)).reshape(-1)
                numbers = rows[begin % columns :][: end - begin]
            else:
                rows = self._files.read(sources[0], first, last).reshape(-1)
                numbers = rows[begin - first * width : end - first * width]
            flat[begin - start : end - start].copy_(numbers)

    def _numbers(self, parts: Sequence[str], begin: int, end: int) -> Tensor:
        """Return some of the numbers of stored matrices that lie one below the other, and read no other rows."""
        columns = math.prod(self._files.shapes[parts[0]][1:])
        first, last, pieces, above = begin // columns, -(-end // columns), [], 0
        for part in parts:
            rows = self._files.shapes[part][0]
            low, high = max(first - above, 0), min(last - above, rows)
            if low < high:
                pieces.append(self._files.read(part, low, high).reshape(-1))
            above += rows
        return torch.cat(pieces)[begin - first * columns : end - first * columns]

    def _small_copy(self) -> Any:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                return self._from_config(small_config(self._config)).eval()
        except Exception as error:
            raise _Unusual(f"a small copy of it can't be built: {error}") from error


class _Unusual(Exception):
    """Files from which transformers makes something that isn't known here."""


def _reserve(module: nn.Module) -> None:
    """Give parameters on the meta device memory that isn't written to; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                each._parameters[name] = made[id(parameter)]


def _local(tensor: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield what this rank has of a perhaps sharded tensor; see `PartsOf`."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not hasattr(tensor, "full_tensor"):
        yield tensor.detach(), 0
        return
    local: Tensor = tensor.detach().to_local()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not any(offset[1:]) and local.shape[1:] == tensor.shape[1:]:
        yield local, offset[0] * math.prod(tensor.shape[1:]) if offset else 0
        return
    # Some rows of each expert.
    expert, row = math.prod(tensor.shape[1:]), math.prod(tensor.shape[2:])
    yield from ((rows, number * expert + offset[1] * row) for number, rows in enumerate(local))


def _plain(name: str) -> str:
    """Return the name of a tensor in the module without adapters."""
    return name.replace(".base_layer.", ".")
