"""The traceback that a process hands over."""

from __future__ import annotations

from roll.isolation.processes.child import short_traceback


def test_what_an_environment_raises_is_whole_and_only_the_endless_is_cut():
    def raised(length):
        words = [str(number) for number in (111, 222, 333)]  # in no line of source that the traceback shows
        try:
            raise ValueError(("x" * length).join(words))
        except ValueError:
            return short_traceback(skip=0)

    assert all(f"{word}" in raised(4_000) for word in ("x222x", "x333")), "of some screens, nothing is cut"
    assert len(raised(10**6)) < 25_000
    assert "[...]" in raised(10**6)
