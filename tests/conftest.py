"""Shared fixtures: tiny real models, and where the data beside the project is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import build_tiny_model

# Before torch starts its threads: two cores, and tests that compare bits.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the project; tests that need it skip where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared/data, which isn't here")
    return SHARED / "data"


@pytest.fixture(scope="session")
def stories260k(shared_data: Path) -> Path:
    """A real 0.26M-parameter Llama with its tokenizer."""
    return shared_data / "models" / "stories260k"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random tiny Llama."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def tiny_family(request, tmp_path_factory) -> Path:
    """A random tiny model of each family."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / request.param, request.param)
