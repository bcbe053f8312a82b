"""Stand-in for torchvision, which SGLang imports for image models and never uses for text."""

from __future__ import annotations

from torchvision import io, transforms

__version__ = "0.0.0"
__all__ = ["io", "transforms"]
