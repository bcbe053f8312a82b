"""Keys of a command line, `key=value` as Hydra reads them and `--key value`, and `${a.b}` in them filled in."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from roll.workbench.migrate.shell_expansions import Word

NOTHING: Any = object()
"""Where there is no value."""
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_PLAIN = re.compile(r"[\w./-]*[A-Za-z_/][\w./-]*")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_BRACKETS = 500
_DEEPEST = 64
"""Words of a key."""
_WORDS = {"null": None, "none": None, "": None, "true": True, "false": False}


@dataclass(frozen=True)
class Unexpanded:
    """A value that would have to be run or worked out."""

    text: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclass
class Overrides:
    """What a command line says."""

    tree: dict[str, Any] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    """Keys with `~`."""
    conflicts: list[tuple[str, Any]] = field(default_factory=list)
    """Keys below a key that has a value itself."""
    unread: list[Word] = field(default_factory=list)
    """Words that are neither."""
    choices: list[tuple[str, Any]] = field(default_factory=list)
    """Hydra's choices of a file of defaults for a section that has overrides, `optim=fsdp optim.lr=1e-5`."""


def at(tree: Any, path: str, default: Any = None) -> Any:
    """Return what stands at a dotted path of a nested dict."""
    for word in path.split("."):
        if not isinstance(tree, Mapping) or word not in tree:
            return default
        tree = tree[word]
    return tree


def leaves_of(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key that has no keys below it, with its dotted path; an empty section counts as one."""
    for key, value in tree.items():
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, below)
        else:
            yield below, value


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first nested dict with what the second says."""
    result = dict(first)
    for key, value in second.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def unexpanded_in(value: Any) -> Unexpanded | None:
    """Return the first value inside that would have to be run or worked out."""
    if isinstance(value, Unexpanded):
        return value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((result for entry in inside if (result := unexpanded_in(entry))), None)


def read_overrides(words: Sequence[Word]) -> Overrides:
    """Return what `key=value`, `+key=value` and `~key` among the words say; the last of a key counts."""
    overrides = Overrides()
    pairs = [(word, match.groups() if (match := _OVERRIDE.fullmatch(word.text)) else ("", "", None)) for word in words]
    sections = {key.partition(".")[0] for _, (_, key, _) in pairs if "." in key}
    for word, (sign, key, value) in pairs:
        if sign == "~":
            overrides.deleted.append(key)
        elif key in sections and value is not None and re.fullmatch(r"\w+", value):
            overrides.choices.append((key, value))
            if key == "engine":
                _set(overrides, "engine.strategy", value)
        elif value is not None:
            _set(overrides, key, Unexpanded(value, word.unexpanded) if word.unexpanded else parsed(value))
        else:
            overrides.unread.append(word)
    return overrides


def read_flags(words: Sequence[Word]) -> Overrides:
    """Return what `--key value`, `--key=value`, `--key` and `--key one two` say; the last of a key counts."""
    overrides = Overrides()
    at_word = 0
    while at_word < len(words):
        match = _FLAG.fullmatch(words[at_word].text)
        at_word += 1
        if match is None:
            overrides.unread.append(words[at_word - 1])
            continue
        values: list[Word] = []
        if match[2] is not None:
            values = [Word(match[2], words[at_word - 1].unexpanded)]
        while match[2] is None and at_word < len(words) and not re.match(r"--?[A-Za-z]", words[at_word].text):
            word = words[at_word]
            if values and word.unexpanded and word.text.startswith("$"):
                break  # a variable after the value holds other options
            values.append(word)
            at_word += 1
        stopped = tuple(part for word in values for part in word.unexpanded)
        value: Any = [scalar(word.text) for word in values] if values else True
        value = value[0] if len(values) == 1 else value
        text = " ".join(word.text for word in values)
        _set(overrides, match[1].replace("-", "_"), Unexpanded(text, stopped) if stopped else value)
    return overrides


def _set(overrides: Overrides, key: str, value: Any) -> None:
    node = overrides.tree
    *sections, last = key.split(".")
    if len(sections) >= _DEEPEST:
        raise ValueError(f"the key {key[:60]}... has more than {_DEEPEST} words")
    for name in sections:
        below = node.setdefault(name, {})
        if not isinstance(below, dict):
            overrides.conflicts.append((key, value))
            return
        node = below
    if isinstance(node.get(last), dict) and isinstance(value, dict):
        node[last].update(value)
    else:
        if isinstance(below := node.get(last), dict):
            overrides.conflicts += [(f"{key}.{lost}", gone) for lost, gone in leaves_of(below)]
        node[last] = value


def scalar(text: str) -> Any:
    """Return the number, switch, null or JSON that a text is, else the text."""
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word) and len(word) < 400:
        number = float(word)
        return int(word) if word.lstrip("+-").replace("_", "").isdecimal() else number if abs(number) < 1e308 else text
    if word[:1] in "[{" and len(word) < 2**16:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(word)
    return text


def parsed(text: str) -> Any:
    """Return the value that Hydra reads in a text, else what YAML does, else the text."""
    text = text.strip()
    if len(text) > 2**16 or sum(map(text.count, "[{(")) > _BRACKETS:  # parsers take minutes for them in each other
        return text
    if text in ("null", "None", ""):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _PLAIN.fullmatch(text) and text.lower() not in (*_WORDS, "nan", "inf") and text[0] not in "-+.0123456789":
        return text  # without the second that Hydra's parser takes to be imported
    if _NUMBER.fullmatch(text) and "_" not in text:
        return scalar(text)
    from hydra.core.override_parser.overrides_parser import OverridesParser

    # Its parser has many ways to say no, and what isn't its notation is a text.
    with contextlib.suppress(Exception):
        override = OverridesParser.create().parse_override(f"key={text}")
        return [part for part in text.split(",") if part] if override.is_sweep_override() else override.value()
    try:
        # With aliases a short text can be a billion values.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            return text
        value = yaml.safe_load(text)
        return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else text
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


_INNER = re.compile(r"\$\{([^${}]*)\}")
_PATH = re.compile(r"\.*[A-Za-z_][\w.\-/]*|\.+")
_ENVIRONMENT = ("oc.env:", "now:")
"""Resolvers that ours has too."""
_MAX_VALUES = 50_000
_LONGEST = 2**20


class Filler:
    """Fills in references of a tree, without OmegaConf's resolvers: what would compute anything stays, and is named."""

    def __init__(self, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._trees = (tree, defaults)
        self._values = 0
        self._active: list[str] = []
        self.sections: dict[str, str] = {}
        """References that stand for a whole section, by the key that has them."""
        self.used: set[str] = set()
        """Keys that were referred to."""

    def fill(self, node: Any, path: str = "") -> Any:
        """Return the node with its references filled in; `Unexpanded` where one can't be."""
        self._values += 1
        if self._values > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES} values once its references are filled in")
        if isinstance(node, Mapping):
            return {str(key): self.fill(value, f"{path}.{key}" if path else str(key)) for key, value in node.items()}
        if isinstance(node, list):
            return [self.fill(value, f"{path}.{i}") for i, value in enumerate(node)]
        return self._text(node, path) if isinstance(node, str) and "${" in node else node

    def _text(self, text: str, path: str) -> Any:
        stays: list[str] = []
        for _ in range(64):
            match = _INNER.search(text)
            if match is None:
                break
            value = self._reference(match[1], match[0], path)
            if _INNER.fullmatch(text.strip()):
                if isinstance(value, Mapping):
                    self.sections[path] = text
                return value
            if isinstance(value, Unexpanded):
                return Unexpanded(text, value.parts)
            if isinstance(value, (Mapping, list)):
                return Unexpanded(text, (f"{match[0]} is a section",))
            if isinstance(value, str) and "${" in value:
                stays.append(value)
                value = f"\0{len(stays) - 1}\0"
            word = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            text = text[: match.start()] + word + text[match.end() :]
            if len(text) > _LONGEST:
                raise ValueError(f"a text grows beyond {_LONGEST:,} characters once its references are filled in")
        for i in range(len(stays) - 1, -1, -1):
            text = text.replace(f"\0{i}\0", stays[i])
        return text

    def _reference(self, inside: str, raw: str, path: str) -> Any:
        if inside.startswith(_ENVIRONMENT):
            return raw
        target, _, default = inside.removeprefix("oc.select:").partition(",")
        selects = inside.startswith("oc.select:")
        if not selects and not _PATH.fullmatch(inside.strip()):
            return Unexpanded(raw, (raw,))
        value, key_path = self._find((target if selects else inside).strip(), path)
        if value is NOTHING:
            return parsed(default.strip(" \"'")) if selects else Unexpanded(raw, (f"{raw}: there is no such key",))
        self.used.add(key_path)
        if key_path in self._active or len(self._active) > 64:
            return Unexpanded(raw, (f"{raw}: it refers to itself",))
        self._active.append(key_path)
        try:
            return self.fill(value, key_path)
        finally:
            self._active.pop()

    def _find(self, target: str, path: str) -> tuple[Any, str]:
        """Return the value that a reference names, with its own path; dots in front lead outwards from the key."""
        if dots := len(target) - len(target.lstrip(".")):
            target = ".".join([*path.split(".")[:-dots], *([rest] if (rest := target.lstrip(".")) else [])])
        value = next((result for tree in self._trees if (result := at(tree, target, NOTHING)) is not NOTHING), NOTHING)
        return value, target
