"""What other packages would print on every run, prevented where it is about to happen."""

from __future__ import annotations

import os


def default_deepspeed_to_cpu() -> None:
    """Call before transformers saves a model: that imports DeepSpeed, where it is installed.

    Left to itself, DeepSpeed looks for an accelerator and warns on stdout when there is none.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
