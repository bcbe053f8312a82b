"""What a student's distribution is compared with its teacher's by: values of `distill.divergence`."""

from __future__ import annotations

from collections.abc import Mapping

from roll.configs.catalog.entries import Entry, Option

_SHARE = {"gt": 0, "lt": 1}


def _built_in(name: str, options: Mapping[str, Option] | None = None) -> tuple[str, Entry]:
    return name, Entry(path=f"roll.algorithms.divergences:{name}", options=options or {})


DIVERGENCES: dict[str, Entry] = dict(
    [
        _built_in("reverse_kl"),
        _built_in("forward_kl"),
        _built_in("jensen_shannon", {"beta": Option(float, bounds=_SHARE, default=0.5)}),
        _built_in("skewed_forward_kl", {"skew": Option(float, bounds=_SHARE, default=0.1)}),
        _built_in("skewed_reverse_kl", {"skew": Option(float, bounds=_SHARE, default=0.1)}),
    ]
)
"""`(student_logprobs [..., K], teacher_logprobs [..., K], mask [...], *, options...) -> [...]`"""
