"""How a field says more than its type: bounds, one value or a list, a parser, options of what a sibling names.

Metadata that only one field has stands there: `choices` (a text is one of these, or with `own` a path of the user's
own), `also` (other projects' names of its values, each with the name here), `typed_by` (a sibling whose value picks the
section's dataclass out of `table`; `own_table` is a path's), `sections_by` (a sibling whose value may pick one out of
`sections`, in place of a plain mapping), and `open` (a mapping takes up the keys that its section doesn't declare).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from roll.configs.catalog.entries import Entry
from roll.configs.schema.acts_if import ActsIf, acting


def number(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    acts_if: tuple[ActsIf, ...] = (),
) -> Any:
    """Declare a number within bounds; a null that the type allows passes."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    return acting(default, *acts_if, bounds={k: v for k, v in bounds.items() if v is not None})


def one_or_many(
    default: tuple[Any, ...] = (), *, args: str | None = None, commas: bool = False, acts_if: tuple[ActsIf, ...] = ()
) -> Any:
    """Declare a tuple that a YAML author may also write as a single value, with `commas` also as one text with commas.

    With `args` its entries are names, as in `named`, and that field holds options by name.
    """
    more: dict[str, Any] = {"commas": commas, **({"args": args} if args else {})}
    return acting(default, *acts_if, one_or_many=True, **more)


def parsed(default: Any, parser: Callable[[Any], Any], expected: str) -> Any:
    """Declare a value in a notation of its own; `parser` raises `ValueError` for what it doesn't understand."""
    return field(default=default, metadata={"parser": parser, "expected": expected})


def named(default: str, *, args: str) -> Any:
    """Declare a name that a YAML author may also write as `{name: ..., option: ...}`; the options go to the field
    `args`."""
    return field(default=default, metadata={"args": args})


def args_of(sibling: str, entries: Mapping[str, Entry]) -> Any:
    """Return the options of what the field `sibling` names, typed by its entry; those of the user's own are taken as
    they are."""
    return field(default_factory=dict, metadata={"args_of": sibling, "entries": entries})


def args_by_name(entries: Mapping[str, Entry]) -> Any:
    """Return the options by name, typed by the entry of that name; those of the user's own are taken as they are."""
    return field(default_factory=dict, metadata={"args_by_name": entries})
