"""Pages of which a part is written from code."""

from __future__ import annotations


def with_part(page: str, begin: str, text: str, end: str) -> str:
    """Return `page` with what is between its markers replaced by `text`; raises `ValueError` if they aren't there."""
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the page needs the markers {begin!r} and {end!r}, in this order")
    return f"{before}{begin}\n\n{text}\n{end}{after}"
