"""The parts of pages that are written from code: built with the site, and in no committed file.

A page has such a part where it has

    <!-- built: configuration -->
    How a reader of the repository gets at it.
    <!-- end -->

`site_pages.py` puts the part in place of these lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import coming_from
import config_reference
import endpoint_fields
import families_page
import metrics_page
import models_page

PARTS: dict[str, Callable[[], str]] = {
    "configuration": config_reference.reference,
    "metrics": metrics_page.markdown_table,
    "coming_from": coming_from.tables,
    "endpoint_fields": endpoint_fields.markdown_tables,
    "families": families_page.markdown_table,
    "models": models_page.markdown_table,
}
_MARKER = re.compile(r"^<!-- built: (\S+) -->$", re.MULTILINE)
_END = "<!-- end -->"


def part_names(page: str) -> list[str]:
    """Return the names of a page's built parts, in their order."""
    return _MARKER.findall(page)


def with_parts(page: str) -> str:
    """Return a page's text with its built parts; raise `ValueError` for an unknown name or a part without an end."""
    pieces = _MARKER.split(page)  # text, name, text, name, text
    built = [pieces[0]]
    for name, rest in zip(pieces[1::2], pieces[2::2], strict=True):
        if name not in PARTS:
            raise ValueError(f"there is no built part {name!r}; there are {', '.join(PARTS)}")
        _, end, after = rest.partition(f"\n{_END}\n")
        if not end:
            raise ValueError(f"the built part {name!r} needs a line {_END!r} after it")
        built += [PARTS[name]().strip("\n"), "\n", after]
    return "".join(built)
