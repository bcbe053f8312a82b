"""The parameters of a role as its backend builds them: which train, in which type, with adapters or without."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roll.configs.schema.worker_config import ALL_LINEAR, ModelArgs
from roll.workbench.planning.architecture import Architecture, UnknownModel
from roll.workbench.planning.recurrent import Weight

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of one number."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a Hugging Face module."""

    name: str
    shape: tuple[int, ...]
    width: int
    """Bytes of one number, as it is kept."""
    trains: bool
    block: int | None
    """Its decoder layer, which FSDP shards as a whole; None: embedding, last norm, head."""

    @property
    def size(self) -> int:
        """Return numbers in it."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return bytes of the whole tensor."""
        return self.size * self.width


def role_parameters(arch: Architecture, args: ModelArgs, kind: str, *, trains: bool, role: str) -> list[Parameter]:
    """Return the parameters of a role on `fsdp2_*`, `deepspeed_*` or `hf_infer`, in the order of its module.

    Trained weights are kept in float32; those of other roles, and the frozen ones under adapters, in `dtype`. Adapters
    and a critic's head are float32. Raises `UnknownModel` for adapters whose size only their folder says.
    """
    lora = trains and args.uses_lora
    if lora and not args.lora_rank:
        raise UnknownModel(
            f"{role}.model_args.adapter_name_or_path: the plan doesn't read adapters; give lora_rank as well, which "
            "they have anyway"
        )
    stored = 4 if trains and not lora else BYTES[args.dtype]
    targets = () if tuple(args.lora_target) == (ALL_LINEAR,) else tuple(args.lora_target)
    frozen = tuple(args.freeze_module_prefix)
    prefix = "" if kind == "value" else "model."
    made = []
    for block, name, weight in _named(arch, kind, prefix):
        head = name in ("value_head.weight", "score.weight")
        width = 4 if head and (kind == "value" or trains) else stored
        adapted = lora and weight.linear and _is_target(name.removesuffix(".weight"), targets)
        learns = trains and (head if lora else not (frozen and name.startswith(frozen)) or name == "value_head.weight")
        made.append(Parameter(name, weight.shape, width, learns, block))
        if adapted:
            out, into = weight.shape
            base = name.removesuffix(".weight")
            made.append(Parameter(f"{base}.lora_A.weight", (args.lora_rank, into), 4, True, block))
            made.append(Parameter(f"{base}.lora_B.weight", (out, args.lora_rank), 4, True, block))
    return made


def _named(arch: Architecture, kind: str, prefix: str) -> Iterator[tuple[int | None, str, Weight]]:
    """Yield (layer, whole name, weight) of every parameter in the order of the module."""
    yield None, f"{prefix}{arch.embedding.name}", arch.embedding
    for number in range(arch.layers):
        for weight in arch.layer(number):
            yield number, f"{prefix}layers.{number}.{weight.name}", weight
    yield None, f"{prefix}{arch.final_norm.name}", arch.final_norm
    for weight in arch.head(kind):
        yield None, weight.name, weight


def _is_target(layer: str, targets: tuple[str, ...]) -> bool:
    return not targets or any(layer == target or layer.endswith(f".{target}") for target in targets)
