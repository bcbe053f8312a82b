"""From a plain tree (dicts, lists, scalars) to a dataclass, strictly, collecting every violation."""

from __future__ import annotations

import math
import operator
import types
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from roll.configs.catalog.entries import OWN_PATH, Entry
from roll.configs.errors import NO_VALUE, Violation, did_you_mean, nearest, problem
from roll.configs.parsing.key_hints import OTHER_PIPELINE_KEYS, UNSUPPORTED_VALUES
from roll.configs.parsing.other_projects import explainer
from roll.configs.parsing.schema_places import hints_of, homes_of
from roll.configs.parsing.yaml_files import path_problem, value_problem
from roll.configs.stand_in import STAND_IN, StandInUsed

T = TypeVar("T")

_BAD: Any = object()
"""Result of a conversion that failed and has said so."""
UNRESOLVED: Any = _BAD
"""In a tree: a value that couldn't be worked out, which has been said."""
_TESTS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
_SYMBOLS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
OFFLINE_PIPELINES = ("sft", "dpo", "reward_model")
_HINTED = 40
"""Unknown keys that are compared with all known ones; for a file that is something else entirely it takes minutes."""
_LARGEST = 2**31 - 1
"""Largest whole number but for seeds: beyond it nothing can be counted, and much of what is below would overflow."""
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def build(
    cls: type[T], tree: Mapping[str, Any], path: str = "", *, pipelines: Mapping[str, type] | None = None
) -> tuple[T | None, list[Violation]]:
    """Return an instance of dataclass `cls` and all violations.

    `pipelines` are the classes that `cls` is one of: keys of the others are refused with the name of theirs.

    The instance is None when a value is unusable or missing. With unknown keys alone it is given, so that
    rules between fields can be checked in the same pass.
    """
    result, violations, sound = build_partly(cls, tree, path, pipelines=pipelines)
    return (result if sound else None), violations


def build_partly(
    cls: type[T], tree: Mapping[str, Any], path: str = "", *, pipelines: Mapping[str, type] | None = None
) -> tuple[T | None, list[Violation], bool]:
    """Do the same with `STAND_IN` for every value that is unusable or missing, and whether there is none of them."""
    builder = _Builder(cls, pipelines)
    result = builder.section(cls, tree, path)
    return (None if result is _BAD else result), builder.violations, builder.sound


class _Builder:
    def __init__(self, root: type, pipelines: Mapping[str, type] | None = None) -> None:
        self.violations: list[Violation] = []
        self.sound = True
        """Whether every value could be used."""
        self._unknown_keys = 0
        self._root = root
        self._pipelines = dict(pipelines or {})

    def section(self, cls: type, tree: Any, path: str) -> Any:
        if tree is UNRESOLVED:
            return _BAD
        if not isinstance(tree, Mapping):
            return self._wrong(path, tree, "a section with keys", _null_fix(tree, path))
        known = {f.name: f for f in fields(cls)}
        tree = _canonical(self._closed(self._split_names(tree, path, known), path, known), known)
        for key in tree:
            if key not in known:
                self._unknown(str(key), tree[key], path, known)
        values: dict[str, Any] = {}
        hints = hints_of(cls)
        for name, spec in known.items():
            below = f"{path}.{name}" if path else name
            if name in tree:
                if "args_of" in spec.metadata:
                    values[name] = self._arguments(spec, tree, known[spec.metadata["args_of"]].default, below)
                elif "args_by_name" in spec.metadata:
                    values[name] = self._arguments_by_name(spec.metadata["args_by_name"], tree[name], below)
                else:
                    values[name] = self._field(spec, hints[name], tree, below)
            elif spec.default is MISSING and spec.default_factory is MISSING:
                values[name] = self._wrong(
                    below, NO_VALUE, f"{describe(hints[name])}; this key is required", f"add {below}"
                )
        if any(value is _BAD for value in values.values()):
            self.sound = False
            values = {name: STAND_IN if value is _BAD else value for name, value in values.items()}
        try:
            return cls(**values)
        except StandInUsed:
            return _BAD

    def _split_names(self, tree: Mapping[str, Any], path: str, known: Mapping[str, Field[Any]]) -> Mapping[str, Any]:
        """Return the section with `key: {name: x, option: y}` as `key: x` and the options under the key that takes
        them."""
        for name, spec in known.items():
            home, value = spec.metadata.get("args"), tree.get(name)
            many = spec.metadata.get("one_or_many", False)
            entries = value if isinstance(value, (list, tuple)) and many else [value]
            if home is None or not any(isinstance(entry, Mapping) for entry in entries):
                continue
            below, names, args = f"{path}.{name}" if path else name, [], {}
            home_path = f"{path}.{home}" if path else home
            if many and not isinstance(tree.get(home, {}), Mapping):
                self._wrong(home_path, tree[home], "a section with keys", _null_fix(tree[home], home_path))
                tree = {**tree, home: {}}
            for entry in entries:
                if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
                    args[entry["name"]] = {key: option for key, option in entry.items() if key != "name"}
                    entry = entry["name"]
                if isinstance(entry, Mapping):
                    self._wrong(below, dict(entry), "a name, or a section with a name and options", "add name: ...")
                else:
                    names.append(entry)
            tree = {key: value for key, value in tree.items() if key != name}
            both = args.keys() & tree.get(home, {}).keys() if many else tree.get(home)
            if both:
                self._wrong(home_path, tree[home], f"options in one place; {name} has some too")
            if many:
                tree |= {name: names, home: {**tree.get(home, {}), **args}}
            elif names:
                tree |= {name: names[0], home: args[names[0]]}
        return tree

    def _arguments(self, spec: Field[Any], tree: Mapping[str, Any], default: Any, path: str) -> Any:
        """Return the options of the entry that the sibling names, each of its declared type."""
        chosen = tree.get(spec.metadata["args_of"], default)
        entry = spec.metadata["entries"].get(chosen) if isinstance(chosen, str) else None
        return self._options(entry, chosen, tree[spec.name], path)

    def _arguments_by_name(self, entries: Mapping[str, Entry], value: Any, path: str) -> Any:
        values = self.convert(dict[str, Any], value, path)
        if values is _BAD:
            return _BAD
        # null is what a section says that has no keys.
        by_name = {n: self._options(entries.get(n), n, v, f"{path}.{n}") for n, v in values.items() if v is not None}
        return _BAD if any(options is _BAD for options in by_name.values()) else by_name

    def _options(self, entry: Entry | None, chosen: str, value: Any, path: str) -> Any:
        values = self.convert(dict[str, Any], value, path)
        if values is _BAD or entry is None:
            return values  # one of the user's own is compared with its signature where it is found
        result = {}
        for name, entry_value in values.items():
            option, below = entry.options.get(name), f"{path}.{name}"
            if option is None:
                known = f"an option of {chosen}, which has {', '.join(entry.options) or 'none'}"
                result[name] = self._wrong(below, entry_value, known, did_you_mean(name, entry.options) or "remove it")
                continue
            result[name] = self.convert(option.hint, entry_value, below)
            if result[name] is not _BAD:
                result[name] = self._bounded(result[name], option.bounds, below)
        return _BAD if any(option is _BAD for option in result.values()) else result

    def _closed(self, tree: Mapping[str, Any], path: str, known: Mapping[str, Field[Any]]) -> Mapping[str, Any]:
        """Return an open section with its undeclared keys moved into the mapping that takes them up."""
        home = next((name for name, spec in known.items() if spec.metadata.get("open")), None)
        loose = {key: value for key, value in tree.items() if key not in known}
        inside = tree.get(home, {}) if home is not None else None
        if home is None or not loose or not isinstance(inside, Mapping):
            return tree
        for key in sorted(str(key) for key in loose.keys() & inside.keys()):
            self._wrong(f"{path}.{key}", loose[key], f"it once; {home} has it too", "keep one of the two")
        return {**{key: value for key, value in tree.items() if key in known}, home: {**inside, **loose}}

    def _field(self, spec: Field[Any], hint: Any, tree: Mapping[str, Any], path: str) -> Any:
        meta, value = spec.metadata, tree[spec.name]
        if value is UNRESOLVED:
            return _BAD
        refused = _later_value(spec.name, value)
        if refused:
            self.violations.append(problem(path, f"this value isn't supported: {refused}", value=value))
            return _BAD
        if "typed_by" in meta:
            value = {} if value is None else value  # the backend's defaults, as an empty section
            chosen = tree.get(meta["typed_by"])
            own = isinstance(chosen, str) and OWN_PATH.match(chosen)
            if not isinstance(chosen, str) or (chosen not in meta["table"] and not own):
                return _BAD  # reported at the sibling's own path
            return self.convert(meta["own_table"] if own else meta["table"][chosen], value, path)
        if "sections_by" in meta:
            sections = [meta["sections"][name] for name in meta["sections"] if name == tree.get(meta["sections_by"])]
            return self.convert(next(iter(sections), dict[str, Any]), value, path)
        if "choices" in meta and not meta["own"] and value != "???" and value not in tuple(meta["choices"]):
            known = tuple(meta["choices"])
            return self._wrong(path, value, f"one of {', '.join(known)}", nearest(str(value), known))
        if "parser" in meta:
            return self._parse(meta["parser"], meta["expected"], hint, value, path)
        if meta.get("one_or_many") and value is not None and not isinstance(value, (list, tuple, Mapping)):
            commas = meta.get("commas", False) and isinstance(value, str)
            value = [part.strip() for part in value.split(",")] if commas else [value]
        result = self.convert(hint, value, path)
        if result is _BAD:
            return _BAD
        if "choices" in meta and result is not None and result not in meta["choices"] and not OWN_PATH.match(result):
            near = nearest(result, meta["choices"])
            return self._wrong(path, result, f"one of {', '.join(meta['choices'])}" + (f"; {near}" if near else ""))
        return self._bounded(result, meta.get("bounds", {}), path)

    def _parse(self, parser: Callable[[Any], Any], expected: str, hint: Any, value: Any, path: str) -> Any:
        if value is None and type(None) in get_args(hint):
            return None
        try:
            return parser(value)
        except (ValueError, TypeError) as error:  # a list within the list is no number
            return self._wrong(path, value, f"{expected}; {error}")

    def _bounded(self, value: Any, bounds: Mapping[str, float], path: str) -> Any:
        if value is None or all(_TESTS[name](value, bound) for name, bound in bounds.items()):
            return value
        limits = " and ".join(f"{_SYMBOLS[name]} {bound}" for name, bound in bounds.items())
        return self._wrong(path, value, f"a number {limits}")

    def convert(self, hint: Any, value: Any, path: str) -> Any:
        """Return `value` as the type `hint`, or `_BAD` after recording why not."""
        if value is UNRESOLVED:
            return _BAD
        if value == "???":
            return self._wrong(path, NO_VALUE, f"{describe(hint)} in place of ???", f"give it: {path}=...")
        origin, args = get_origin(hint), get_args(hint)
        if hint is Any:
            refused = value_problem(value)
            return self._wrong(path, value, refused) if refused else value
        if origin in (Union, types.UnionType):
            return self._union(args, value, path)
        if is_dataclass(hint):
            return self.section(hint, value, path)  # type: ignore[arg-type]
        if origin is dict:
            return self._dict(args[1], value, path)
        if value is None:
            return self._wrong(path, value, describe(hint), "remove the key for its default; it can't be null")
        if origin is tuple:
            return self._tuple(args[0], value, path)
        if origin is Literal:
            value = "off" if value is False and "off" in args else value  # which YAML reads as false
            if any(choice == value and type(choice) is type(value) for choice in args):
                return value
            return self._wrong(path, value, describe(hint), nearest(str(value), map(str, args)))
        return self._scalar(hint, value, path)

    def _union(self, args: tuple[Any, ...], value: Any, path: str) -> Any:
        if value is None and type(None) in args:
            return None
        members = [member for member in args if member is not type(None)]
        if len(members) == 1 and value is not None:
            return self.convert(members[0], value, path)
        for member in members:
            trial = _Builder(self._root, self._pipelines)
            result = trial.convert(member, value, path)
            if result is not _BAD and trial.sound:
                return result
        return self._wrong(path, value, " or ".join(describe(member) for member in args))

    def _dict(self, item: Any, value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self._wrong(path, value, "a section with keys", _null_fix(value, path))
        odd = [key for key in value if not isinstance(key, str)]
        if item is Any and (refused := value_problem(value)):
            return self._wrong(path, value, refused)
        if odd:
            return self._wrong(path, odd[0], "text as a key", f"quote it: '{odd[0]}'")
        result = {key: self.convert(item, entry, f"{path}.{key}") for key, entry in value.items()}
        return _BAD if any(entry is _BAD for entry in result.values()) else result

    def _tuple(self, item: Any, value: Any, path: str) -> Any:
        if not isinstance(value, (list, tuple)):
            return self._wrong(path, value, "a list", f"write [{value}]")
        result = tuple(self.convert(item, entry, f"{path}[{i}]") for i, entry in enumerate(value))
        return _BAD if any(entry is _BAD for entry in result) else result

    def _scalar(self, hint: Any, value: Any, path: str) -> Any:
        if hint is float and type(value) is int and abs(value) < 10**300:
            return float(value)
        if type(value) is not hint:
            return self._wrong(path, value, describe(hint), _scalar_fix(hint, value))
        if hint is float and not math.isfinite(value):
            return self._wrong(path, value, "a finite number")
        limit = 2**63 - 1 if path.endswith("seed") else _LARGEST
        if hint is int and not -limit - 1 <= value <= limit:
            return self._wrong(path, value, f"a whole number up to {limit}")
        refused = path_problem(path, value) if hint is str else ""
        return self._wrong(path, value, refused) if refused else value

    def _wrong(self, path: str, value: Any, expected: str, fix: str = "") -> Any:
        self.violations.append(Violation(path, expected, fix, value))
        return _BAD

    def _unknown(self, key: str, value: Any, path: str, known: Mapping[str, Any]) -> None:
        below = f"{path}.{key}" if path else key
        where = f"a key of {path}" if path else "a key at the top level"
        elsewhere = sorted(homes_of(self._root).get(key, ()), key=lambda home: not home.startswith(f"{path}."))
        own = next((name for name, cls in self._pipelines.items() if cls is self._root), "")
        instead = OTHER_PIPELINE_KEYS.get(own, {}).get(key)
        words = tuple(below.split("."))
        others = [name for name, cls in self._pipelines.items() if below in homes_of(cls).get(key, ())]
        known_elsewhere = bool(others or instead)
        if isinstance(value, Mapping) and value and not known_elsewhere and explainer().is_foreign_section(words):
            self._foreign(words, value, where)
            return
        if not instead and (hint := explainer().exact_hint(below, offline=own in OFFLINE_PIPELINES)):
            fix = hint
        elif others:
            *firsts, last = others
            fix = f"remove it: a key of pipeline: {', '.join(firsts)}{' and ' if firsts else ''}{last}"
            fix += f"; {instead}" if instead else ""
        elif instead:
            fix = f"remove it: {instead}"
        elif key == "pretrain" and "model_args" in known:
            fix = f"write {path}.model_args.model_name_or_path"
        elif elsewhere and not explainer().is_foreign_section(words):
            fix = f"{key!r} belongs at {' or '.join(elsewhere[:3])}{explainer().also(words, elsewhere)}"
        elif hint := self._foreign_hint(below) or explainer().section_hint(words):
            fix = hint
        else:
            self._unknown_keys += 1
            near = did_you_mean(key, known) if self._unknown_keys <= _HINTED else ""
            fix = near or "remove it, or see docs/configuration.md"
        self._wrong(below, value, where, fix)

    def _foreign_hint(self, path: str) -> str:
        """Return what the tables of other systems say of a key."""
        own = next((name for name, cls in self._pipelines.items() if cls is self._root), "")
        role = path.split(".")[0] if "." in path else ""
        return explainer().foreign_hint(path, role, offline=own in OFFLINE_PIPELINES)

    def _foreign(self, words: tuple[str, ...], section: Mapping[str, Any], where: str) -> None:
        """Refuse every key below a section of another system, each with its place here."""
        for path, value in _leaves_below(section, words):
            key = ".".join(path)
            self._wrong(key, value, where, self._foreign_hint(key) or explainer().section_hint(words[:1]))


def _leaves_below(value: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every key below a section that has a value, with its path."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves_below(below, (*words, str(key)))
    else:
        yield words, value


def _canonical(tree: Mapping[str, Any], known: Mapping[str, Field[Any]]) -> Mapping[str, Any]:
    """Return the section with other projects' names of values replaced by those used here."""
    also = {name: spec.metadata["also"] for name, spec in known.items() if "also" in spec.metadata and name in tree}
    texts = {name: tree[name] for name in also if isinstance(tree[name], str)}
    return {**tree, **{name: also[name].get(value, value) for name, value in texts.items()}}


def _later_value(name: str, value: Any) -> str:
    reasons = UNSUPPORTED_VALUES.get(name, {})
    values = value if isinstance(value, (list, tuple)) else [value]
    return next((reasons[entry] for entry in values if isinstance(entry, str) and entry in reasons), "")


def describe(hint: Any) -> str:
    """Describe a type in a YAML author's words."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _NAMES:
        return _NAMES[hint]
    if hint is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in args)
    return "a list" if origin is tuple else "a section with keys"


def _null_fix(value: Any, path: str) -> str:
    return f"{path} has no value in the file; indent its keys below it, or remove it" if value is None else ""


def _scalar_fix(hint: Any, value: Any) -> str:
    if hint is str and isinstance(value, (int, float)):
        return f"quote it: '{value}'"
    if hint is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and hint in (int, float, bool):
        plain = value.strip().lower()
        if hint is bool:
            return "write it without quotes" if plain in ("true", "false") else ""
        return "write it without quotes" if _is_number(plain) else ""
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def type_problem(hint: Any, value: Any) -> str:
    """Return why `value` isn't of the type `hint`, as "got ..., expected ..."; empty if it is, or nobody can tell."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(_fits(member, value) for member in members):
        return ""
    return f"got {value!r:.80}, expected {' or '.join(_described(member) for member in members)}"


def _fits(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin is abc.Sequence:
        item = next(iter(get_args(hint)), Any)
        return isinstance(value, (list, tuple)) and not any(type_problem(item, entry) for entry in value)
    if origin is abc.Mapping:
        return isinstance(value, Mapping)
    if hint is type(None):
        return value is None
    if hint not in _NAMES and origin is not Literal:
        return True  # a type that YAML has no word for
    return _Builder(object).convert(hint, value, "") is not _BAD


def _described(hint: Any) -> str:
    return {abc.Sequence: "a list", abc.Mapping: "a section with keys"}.get(get_origin(hint)) or describe(hint)
