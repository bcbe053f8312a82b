"""Names that can be imported and not used."""

from __future__ import annotations


def absent(module: str, name: str) -> type:
    """A class that raises when it is constructed."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{module}.{name} needs the real torchvision, not this stand-in")

    return type(name, (), {"__init__": refuse})
