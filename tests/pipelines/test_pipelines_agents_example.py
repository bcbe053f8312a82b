"""The example with the plain `openai` client, from its warm start on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean

from toy import metrics_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_toy_is_played_and_trained_from_its_warm_start_on(tmp_path, monkeypatch):
    """Whether it is learnt, with several seeds, is evidence: benchmarks/agentic_learning.py."""
    monkeypatch.chdir(EXAMPLES.parent)
    job = ["--config_path", str(EXAMPLES / "agents"), "--config_name", "agentic_openai", f"output_dir={tmp_path}"]
    settings = ["max_steps=3", "val_before_train=false", "eval_steps=0", "track_with=jsonl"]
    # In a process of its own: the example has a module `toy`, and so have these tests.
    subprocess.run([sys.executable, str(EXAMPLES / "start_pipeline.py"), *job, *settings], check=True)
    rows = metrics_of(tmp_path / "logs")
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards) > 0.4, "the warm start knows something, and isn't forgotten"
    assert sum(row["agent/crashes"] + row["agent/timeouts"] + row["agent/never_called"] for row in rows) == 0
    assert max(row["mismatch/kl"] for row in rows) < 1e-9
    assert all(row["agent/calls"] > 2 * 64 for row in rows)
