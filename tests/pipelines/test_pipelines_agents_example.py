"""The example with the plain `openai` client, from its warm start on."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from toy import metrics_of

from roll.cli.train import start_pipeline

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_toy_is_played_and_trained_from_its_warm_start_on(tmp_path, monkeypatch):
    """Whether it is learnt, with several seeds, is evidence: benchmarks/agentic_learning.py."""
    monkeypatch.chdir(EXAMPLES.parent)
    job = ["--config_path", str(EXAMPLES / "agents"), "--config_name", "agentic_openai", f"output_dir={tmp_path}"]
    settings = ["max_steps=6", "val_before_train=false", "eval_steps=0", "track_with=jsonl"]
    assert start_pipeline([*job, *settings], EXAMPLES) == 0
    rows = metrics_of(tmp_path / "logs")
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards) > 0.4, "the warm start knows something, and isn't forgotten"
    assert sum(row["agent/crashes"] + row["agent/timeouts"] + row["agent/never_called"] for row in rows) == 0
    assert max(row["mismatch/kl"] for row in rows) < 1e-9
    assert all(row["agent/calls"] > 2 * 64 for row in rows)
