"""The example with the plain `openai` client, from its warm start on."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from toy import metrics_of

from roll.cli.train import start_pipeline

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_toy_is_learnt_a_little_in_a_few_steps(tmp_path, monkeypatch):
    """The whole curve, of three seeds, is evidence: benchmarks/agentic_learning.py."""
    monkeypatch.chdir(EXAMPLES.parent)
    job = ["--config_path", str(EXAMPLES / "agents"), "--config_name", "agentic_openai", f"output_dir={tmp_path}"]
    settings = ["max_steps=12", "val_before_train=false", "eval_steps=0", "track_with=jsonl"]
    assert start_pipeline([*job, *settings], EXAMPLES) == 0
    rows = metrics_of(tmp_path / "logs")
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards[:3]) > 0.3, "the warm start knows something"
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) - 0.1, "and doesn't forget it"
    assert sum(row["agent/crashes"] + row["agent/timeouts"] + row["agent/never_called"] for row in rows) == 0
    assert max(row["mismatch/kl"] for row in rows) < 1e-9
    assert all(row["agent/calls"] > 2 * 64 for row in rows)
