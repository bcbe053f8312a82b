"""`${a.b}` in a tree filled in, without OmegaConf's resolvers: what would compute anything stays, and is named."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from roll.workbench.migrate.draft import NOTHING, at
from roll.workbench.migrate.overrides import Unexpanded, parsed

_INNER = re.compile(r"\$\{([^${}]*)\}")
_PATH = re.compile(r"\.*[A-Za-z_][\w.\-/]*|\.+")
_KEPT = ("oc.env:", "now:")
"""Resolvers that ours has too."""
_MOST = 50_000
_LONGEST = 2**20


class Filler:
    """Fills in references of a tree."""

    def __init__(self, tree: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
        self._tree, self._variables = tree, variables
        self._values = 0
        self._active: list[str] = []
        self.sections: dict[str, str] = {}
        """References that stand for a whole section, by the key that has them."""
        self.used: set[str] = set()
        """First words of what was referred to."""

    def fill(self, node: Any, path: str = "") -> Any:
        """Return the node with its references filled in; `Unexpanded` where one can't be."""
        self._values += 1
        if self._values > _MOST:
            raise ValueError(f"it has more than {_MOST} values once its references are filled in")
        if isinstance(node, Mapping):
            return {str(key): self.fill(value, f"{path}.{key}" if path else str(key)) for key, value in node.items()}
        if isinstance(node, list):
            return [self.fill(value, f"{path}.{i}") for i, value in enumerate(node)]
        if isinstance(node, str) and "${" in node:
            return self._text(node, path)
        return node

    def _text(self, text: str, path: str) -> Any:
        whole = _INNER.fullmatch(text.strip())
        if whole:
            value = self._reference(whole.group(1), text, path)
            if isinstance(value, Mapping):
                self.sections[path] = text
            return value
        kept: list[str] = []
        for _ in range(64):
            match = _INNER.search(text)
            if match is None:
                break
            value = self._reference(match.group(1), match.group(), path)
            if isinstance(value, Unexpanded):
                return Unexpanded(text, value.parts)
            if isinstance(value, (Mapping, list)):
                return Unexpanded(text, (f"{match.group()} is a section",))
            if (isinstance(value, str) and value.startswith("${")) or (isinstance(value, str) and "${" in value):
                kept.append(value)
                value = f"\0{len(kept) - 1}\0"
            word = {None: "", True: "true", False: "false"}[value] if value is None or value is True or value is False \
                else str(value)  # fmt: skip
            text = text[: match.start()] + word + text[match.end() :]
            if len(text) > _LONGEST:
                raise ValueError(f"a text grows beyond {_LONGEST:,} characters once its references are filled in")
            if _INNER.fullmatch(text.strip()):
                return self._text(text, path)
        for i in range(len(kept) - 1, -1, -1):
            text = text.replace(f"\0{i}\0", kept[i])
        return text

    def _reference(self, inside: str, raw: str, path: str) -> Any:
        if inside.startswith(_KEPT):
            return raw
        if inside.startswith("oc.select:"):
            target, _, default = inside.removeprefix("oc.select:").partition(",")
            found = self._find(target.strip(), path)
            if found is not NOTHING:
                return self._filled(found, raw)
            return parsed(default.strip().strip("\"'")) if default.strip() else None
        if not _PATH.fullmatch(inside.strip()):
            return Unexpanded(raw, (raw,))
        found = self._find(inside.strip(), path)
        if found is NOTHING:
            return Unexpanded(raw, (f"{raw}: there is no such key",))
        return self._filled(found, raw)

    def _filled(self, found: tuple[Any, str], raw: str) -> Any:
        value, place = found
        self.used.add(place.split(".")[0])
        if place in self._active or len(self._active) > 64:
            return Unexpanded(raw, (f"{raw}: it refers to itself",))
        self._active.append(place)
        try:
            return self.fill(copy.deepcopy(value), place)
        finally:
            self._active.pop()

    def _find(self, target: str, path: str) -> Any:
        """The value that a reference names, with its own path; dots in front lead outwards from the key."""
        dots = len(target) - len(target.lstrip("."))
        if dots:
            base = path.split(".")[:-dots]
            target = ".".join([*base, target.lstrip(".")]) if target.strip(".") else ".".join(base)
        for tree in (self._tree, self._variables):
            value = at(tree, target, NOTHING)
            if value is not NOTHING:
                return value, target
        return NOTHING
