"""The traceback that a process hands over."""

from __future__ import annotations

from roll.processes.child import short_traceback


def test_what_an_environment_raises_is_whole_and_only_the_endless_is_cut():
    def raised(length):
        try:
            raise ValueError("first " + "x" * length + " middle " + "x" * length + " last")
        except ValueError:
            return short_traceback(skip=0)

    assert all(word in raised(4_000) for word in ("first", "middle", "last")), "of some screens, nothing is cut"
    assert len(raised(10**6)) < 25_000
    assert "[...]" in raised(10**6)
