"""Ten thousand requests with faults injected at random: no reward ever lands on another one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "rewards"))

import pytest
from reward_faults import play


@pytest.mark.timeout(3600)
def test_no_reward_of_ten_thousand_lands_on_another_request() -> None:
    counters = play(10_000, seed=11, share=0.3, hangs=10)
    assert counters["discarded"] > 100
    assert counters["timeout"] == 10
