"""See torchvision/__init__.py."""

from __future__ import annotations

from torchvision.absent import absent
from torchvision.transforms.v2 import functional

__all__ = ["functional"]


def __getattr__(name: str) -> type:
    return absent(__name__, name)
