"""See torchvision/__init__.py."""

from __future__ import annotations

from enum import Enum

from torchvision.absent import absent


class InterpolationMode(Enum):
    """Values of configurations, which are read at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from torchvision.transforms import functional, v2  # noqa: E402

__all__ = ["InterpolationMode", "functional", "v2"]


def __getattr__(name: str) -> type:
    return absent(__name__, name)
