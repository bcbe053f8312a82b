"""A configuration of ours while it is being written, and the step that brings one key of theirs into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.configs.parsing.loader import PIPELINES
from roll.configs.schema.engine_config import EngineConfig
from roll.configs.schema.strategy_config import STRATEGIES
from roll.workbench.migrate.key_types import UNKNOWN, coerced, default_at, hint_at, takes_null
from roll.workbench.migrate.report import Report, Use
from roll.workbench.migrate.table import Row

NOTHING: Any = object()
"""Where there is no value."""


def at(tree: Any, path: str, default: Any = None) -> Any:
    """Return what stands at a dotted path of a nested dict."""
    for word in path.split("."):
        if not isinstance(tree, Mapping) or word not in tree:
            return default
        tree = tree[word]
    return tree


def leaves_of(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that has no keys below it, with its dotted path; an empty section counts as one."""
    for key, value in tree.items():
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, below)
        else:
            yield below, value


@dataclass
class Draft:
    """What has been written so far."""

    pipeline: str
    theirs: Mapping[str, Any]
    """The whole file, nested."""
    report: Report
    ours: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, Use] = field(default_factory=dict)
    """The use that wrote a place."""
    memo: dict[str, Any] = field(default_factory=dict)
    """What a conversion leaves for the end, when all keys are there."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return what stands at a place of ours."""
        return at(self.ours, path, default)

    def has(self, path: str) -> bool:
        """Return whether something stands there."""
        return self.get(path, NOTHING) is not NOTHING

    def their(self, path: str, default: Any = None) -> Any:
        """Return what the file says."""
        value = at(self.theirs, path, default)
        return default if value is None else value

    def hint(self, path: str) -> Any:
        """Return the type of a place of ours in this pipeline, or `UNKNOWN`."""
        return hint_at(PIPELINES[self.pipeline], path, self.strategies)

    def knows(self, path: str) -> bool:
        """Return whether this pipeline has such a key."""
        return self.hint(path) is not UNKNOWN

    def default(self, path: str) -> Any:
        """Return what a place of ours is where nobody writes it, or `UNKNOWN`."""
        return default_at(PIPELINES[self.pipeline], path, self.strategies)

    @property
    def strategies(self) -> dict[str, str]:
        """Backends by role."""
        return {role: name for role, section in self.ours.items()
                if isinstance(name := at(section, "strategy_args.strategy_name"), str)}  # fmt: skip

    def put(self, path: str, value: Any, use: Use | None = None) -> None:
        """Write a value; texts become numbers and the like where the key has another type."""
        hint = self.hint(path)
        node = self.ours
        *sections, last = path.split(".")
        for word in sections:
            if not isinstance(node.get(word), dict):
                node[word] = {}
            node = node[word]
        node[last] = value if hint is UNKNOWN else coerced(hint, value)
        if use is not None:
            self.made_by[path] = use

    def ask(self, use: Use, place: str) -> None:
        """Have the new file ask for a place, because a key that changes the training has no counterpart.

        Where this pipeline has no such place it asks for `exp_name`, which every one has.
        """
        self.memo.setdefault("asked", []).append((use, place if place and self.knows(place) else "exp_name"))

    def drop(self, path: str) -> None:
        """Take out a key, and sections that are empty without it."""
        words = path.split(".")
        node: Any = self.ours
        nodes = []
        for word in words:
            if not isinstance(node, dict) or word not in node:
                return
            nodes.append(node)
            node = node[word]
        for depth in range(len(words) - 1, -1, -1):
            del nodes[depth][words[depth]]
            if nodes[depth]:
                break

    def uses_below(self, path: str) -> list[Use]:
        """Uses that wrote this place or one below it."""
        found = [use for place, use in self.made_by.items() if place == path or place.startswith(f"{path}.")]
        return list({id(use): use for use in found}.values())

    def abandon(self, path: str, why: str) -> None:
        """Take out a section or key again, and count what wrote it as dropped for this reason."""
        for use in self.uses_below(path):
            use.ours = tuple(place for place in use.ours if place != path and not place.startswith(f"{path}."))
            if use in self.report.filled:
                self.report.filled.remove(use)
            elif not use.ours:
                use.fate, use.note = "dead", why
        self.made_by = {p: u for p, u in self.made_by.items() if p != path and not p.startswith(f"{path}.")}
        self.drop(path)


@dataclass
class Step:
    """One key of theirs on its way; conversions work on it."""

    draft: Draft
    row: Row
    use: Use
    places: tuple[str, ...]
    """Counterparts, with roles and names filled in."""

    @property
    def value(self) -> Any:
        """What the file says."""
        return self.use.value

    @property
    def place(self) -> str:
        """Where the value goes."""
        return self.places[0]

    @property
    def last(self) -> str:
        """Last word of their key."""
        return self.use.key.rpartition(".")[2]

    @property
    def role(self) -> str:
        """First word of ours."""
        return self.place.split(".")[0]

    def put(self, value: Any, place: str | None = None) -> None:
        """Write a value at a place, the first if none is given; null where null is no value leaves the default."""
        place = place or self.place
        hint = self.draft.hint(place)
        if reason := self._reserved(place):
            self.dead(reason)
        elif hint is UNKNOWN:
            self.dead(f"pipeline {self.draft.pipeline} has no {place}")
        elif value is None and not takes_null(hint):
            self.note("null leaves the default")
        else:
            self.draft.put(place, value, self.use)
            if place not in self.use.ours:
                self.use.ours = (*self.use.ours, place)

    def _reserved(self, place: str) -> str:
        """Why an engine isn't told this, or empty."""
        role, dot, word = place.partition(".strategy_args.strategy_config.")
        options: Any = STRATEGIES.get(self.draft.strategies.get(role, "")) if dot else None
        if options is None or not issubclass(options, EngineConfig):
            return ""
        return str(options.reserved.get(word, "") or options.gone.get(word, ""))

    def note(self, text: str) -> None:
        """Say something more about it."""
        self.use.note = text

    def decide(self, note: str) -> None:
        """Count it as decided."""
        self.use.fate, self.use.note = "decided", note

    def dead(self, why: str) -> None:
        """Count it as dropped."""
        self.use.fate, self.use.note = "dead", why

    def absent(self, why: str) -> None:
        """Count it as without a counterpart though it changes the training: the new file asks for the place."""
        self.use.fate, self.use.note = "absent", why
        self.draft.ask(self.use, self.place)

    def quiet(self, why: str) -> None:
        """Count it as without a counterpart, where the training is the same without it."""
        self.use.fate, self.use.note = "quiet", why
