"""10,000 fuzzed turns of agents against each engine that is installed: what was sampled is what is trained."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TURNS = os.environ.get("ROLL_EVIDENCE_TURNS", "10000")
SGLANG = ROOT / ".venv-sglang" / "bin" / "python"


def run(python: str | Path, engine: str) -> None:
    benchmark = ROOT / "benchmarks" / "agent_token_identity.py"
    command = [str(python), str(benchmark), "--engines", engine, "--turns", TURNS]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("engine", ["hf_infer", "vllm"])
def test_token_identity(engine: str):
    if engine != "hf_infer" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}, which isn't installed")
    run(sys.executable, engine)


@pytest.mark.skipif(not SGLANG.exists(), reason="needs SGLang: make install-sglang-cpu")
def test_token_identity_under_sglang():
    run(SGLANG, "sglang")
