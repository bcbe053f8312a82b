"""`torch_compile`: the decoder layers of a Hugging Face model through torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that transformers itself names as the ones that stay on one device: decoder layers, mostly."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return (module for module in model.modules() if type(module).__name__ in names)


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile every decoder layer in place; parameters and modules keep their names.

    Layer by layer: equal layers share one compilation, and gradient checkpointing and FSDP, which wrap layers, stay
    outside. Sizes are dynamic. Raises `ValueError` if the model doesn't name its layers.
    """
    found = list(blocks(model))
    if not found:
        raise ValueError(f"torch_compile: {type(model).__name__} doesn't name its decoder layers (_no_split_modules)")
    for block in found:
        block.compile(dynamic=True, backend=backend)
