"""Faults at random: no reward lands on another request. `tests/evidence` has ten thousand of them."""

from __future__ import annotations

from reward_faults import play


def test_no_reward_lands_on_another_request() -> None:
    counters = play(300, seed=7, share=0.15, hangs=1)
    assert counters["discarded"] > 0
