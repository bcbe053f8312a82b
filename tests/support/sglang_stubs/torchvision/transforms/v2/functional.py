"""See torchvision/__init__.py."""

from __future__ import annotations

from torchvision.absent import absent


def __getattr__(name: str) -> type:
    return absent(__name__, name)
