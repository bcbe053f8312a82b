"""A configuration of ours while it is being written, and the step that brings one key of theirs into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from roll.configs.parsing.loader import PIPELINES
from roll.configs.schema.engine_config import EngineConfig
from roll.configs.schema.placement_plan import parse_device_mapping
from roll.configs.schema.strategy_config import STRATEGIES
from roll.configs.schema.strategy_options import StrategyConfig
from roll.workbench.migrate.overrides import NOTHING, at, scalar, unexpanded_in
from roll.workbench.migrate.report import KeyUse, MigrationReport
from roll.workbench.migrate.table import PeerKey

UNKNOWN: Any = object()
"""There is no such key."""


@dataclass
class Draft:
    """What has been written so far."""

    pipeline: str
    theirs: Mapping[str, Any]
    """The whole file, nested."""
    report: MigrationReport
    ours: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, KeyUse] = field(default_factory=dict)
    """The use that wrote a place."""
    job: str = ""
    """What starts the training there, where a script says it: a command of TRL, a script of OpenRLHF."""
    processes: Mapping[str, int] = field(default_factory=dict)
    """Processes that a launcher starts."""
    peer_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What they take for keys that nobody writes, by dotted key."""
    unresolved: list[tuple[KeyUse, str]] = field(default_factory=list)
    """Keys without a counterpart, with the places that the new file asks for."""
    unexpanded: list[tuple[str, KeyUse]] = field(default_factory=list)
    """Places whose values would have to be worked out."""
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
        return default if value is None or unexpanded_in(value) else value

    def hint(self, path: str) -> Any:
        """Return the type of a place of ours in this pipeline, or `UNKNOWN`; `Any` in a mapping that takes any key."""
        return _walk(PIPELINES[self.pipeline], path, self)[0]

    def knows(self, path: str) -> bool:
        """Return whether this pipeline has such a key."""
        return self.hint(path) is not UNKNOWN

    def default(self, path: str) -> Any:
        """Return what a place of ours is where nobody writes it, or `UNKNOWN`."""
        spec = _walk(PIPELINES[self.pipeline], path, self)[1]
        if spec is None or (spec.default is MISSING and spec.default_factory is MISSING):
            return UNKNOWN
        return spec.default if spec.default_factory is MISSING else spec.default_factory()

    @property
    def strategies(self) -> dict[str, str]:
        """Return backends by role: their `strategy_config` has that backend's keys."""
        return {role: name for role, section in self.ours.items()
                if isinstance(name := at(section, "strategy_args.strategy_name"), str)}  # fmt: skip

    def put(self, path: str, value: Any, use: KeyUse | None = None) -> None:
        """Write a value; texts become numbers and the like where the key has another type."""
        hint = self.hint(path)
        value = "???" if unexpanded_in(value) else value
        node = self.ours
        *sections, last = path.split(".")
        for word in sections:
            if not isinstance(node.get(word), dict):
                node[word] = {}
            node = node[word]
        node[last] = value if hint is UNKNOWN else coerced(hint, value)
        if use is not None:
            self.made_by[path] = use

    def ask(self, use: KeyUse, key_path: str) -> None:
        """Have the new file ask for a place, because a key that changes the training has no counterpart.

        Where this pipeline has no such place it asks for `exp_name`, which every one has.
        """
        self.unresolved.append((use, key_path if key_path and self.knows(key_path) else "exp_name"))

    def drop(self, path: str) -> None:
        """Take out a key, and sections that are empty without it."""
        above, _, last = path.rpartition(".")
        node = self.get(above) if above else self.ours
        if isinstance(node, dict) and last in node:
            del node[last]
            if not node and above:
                self.drop(above)

    def uses_below(self, path: str) -> list[KeyUse]:
        """Return uses that wrote this place or one below it."""
        uses = [use for key_path, use in self.made_by.items() if key_path == path or key_path.startswith(f"{path}.")]
        return list({id(use): use for use in uses}.values())

    def abandon(self, path: str, why: str) -> None:
        """Take out a section or key again, and count what wrote it as dropped for this reason."""
        for use in self.uses_below(path):
            use.ours = tuple(
                key_path for key_path in use.ours if key_path != path and not key_path.startswith(f"{path}.")
            )
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
    row: PeerKey
    use: KeyUse
    key_paths: tuple[str, ...]
    """Counterparts, with roles and names filled in."""

    @property
    def value(self) -> Any:
        """Return what the file says."""
        return self.use.value

    @property
    def key_path(self) -> str:
        """Return where the value goes."""
        return self.key_paths[0]

    @property
    def last(self) -> str:
        """Return the last word of their key."""
        return self.use.key.rpartition(".")[2]

    @property
    def role(self) -> str:
        """Return the first word of ours."""
        return self.key_path.split(".")[0]

    def put(self, value: Any, key_path: str | None = None) -> None:
        """Write a value at a place, the first if none is given; null where null is no value leaves the default."""
        key_path = key_path or self.key_path
        hint = self.draft.hint(key_path)
        if reason := self._reserved(key_path):
            self.dead(reason)
        elif hint is UNKNOWN:
            self.dead(f"pipeline {self.draft.pipeline} has no {key_path}")
        elif value is None and hint is not Any and type(None) not in get_args(hint):
            self.note("null leaves the default")
        else:
            self.draft.put(key_path, value, self.use)
            if key_path not in self.use.ours:
                self.use.ours = (*self.use.ours, key_path)

    def _reserved(self, key_path: str) -> str:
        """Return why an engine isn't told this, or empty."""
        role, dot, word = key_path.partition(".strategy_args.strategy_config.")
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
        self.draft.ask(self.use, self.key_path)

    def quiet(self, why: str) -> None:
        """Count it as without a counterpart, where the training is the same without it."""
        self.use.fate, self.use.note = "quiet", why


def slots_of(draft: Draft, role: str) -> tuple[int, ...]:
    """Return the slots of a role; empty where they aren't given, or are no slots."""
    mapping = draft.get(f"{role}.device_mapping")
    try:
        return parse_device_mapping(mapping) if mapping is not None else ()
    except (ValueError, TypeError):
        return ()


def data_parallel(draft: Draft, role: str) -> int:
    """Return the ranks of a role that work on different rows, as far as they are known."""
    ranks = len(slots_of(draft, role)) or draft.get(f"{role}.world_size") or 1
    options = draft.get(f"{role}.strategy_args.strategy_config", {})
    sizes = [draft.get(f"{role}.model_args.{key}", 1) for key in ("ulysses_size", "ring_attention_size")]
    if draft.strategies.get(role, "").startswith("megatron") and isinstance(options, dict):
        sizes += [options.get(f"{key}_parallel_size", 1) for key in ("tensor_model", "pipeline_model", "context")]
    together = math.prod(size for size in sizes if isinstance(size, int))
    return max(1, ranks // max(1, together)) if isinstance(ranks, int) else 1


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _fields(cls: type) -> dict[str, Field[Any]]:
    return {spec.name: spec for spec in fields(cls)}


def _walk(cls: type, path: str, draft: Draft) -> tuple[Any, Field[Any] | None]:
    """Return the type of a key of the configuration `cls`, and its field where it is one of a section."""
    hint: Any = cls
    spec: Field[Any] | None = None
    role: list[str] = []
    for word in path.split("."):
        if hint is Any:
            return Any, None
        section = section_of(hint)
        mapping = next((member for member in members_of(hint) if get_origin(member) is dict), None)
        if mapping is not None and (section is None or word not in _fields(section)):
            hint, spec = get_args(mapping)[1], None
        else:
            if section is StrategyConfig:
                section = STRATEGIES.get(draft.strategies.get(".".join(role[:-2]), ""), StrategyConfig)
            if section is None:
                return UNKNOWN, None
            if word not in _fields(section):
                is_open = any(spec.metadata.get("open") for spec in _fields(section).values())
                return (Any if is_open or section is StrategyConfig else UNKNOWN), None
            hint, spec = _hints(section)[word], _fields(section)[word]
        role.append(word)
    return hint, spec


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the types that a union has, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, type(int | str)) else (hint,)


def section_of(hint: Any) -> type | None:
    """Return the dataclass that a type allows."""
    return next((member for member in members_of(hint) if is_dataclass(member) and isinstance(member, type)), None)


def is_section(hint: Any) -> bool:
    """Return whether a key of this type has keys of its own."""
    return section_of(hint) is not None


def coerced(hint: Any, value: Any) -> Any:
    """Return the value as the type says, where it is another notation of the same: `"1e-6"`, `"True"`, `8.0`."""
    members = members_of(hint)
    if isinstance(value, str) and str not in members:
        read = None if value.strip() in ("~", "") else scalar(value)
        if (isinstance(read, bool) and bool in members) or (read is None and type(None) in members):
            return read
        number = read if isinstance(read, (int, float)) and not isinstance(read, bool) else None
        if number is not None and (float in members or (int in members and number == int(number))):
            return number if int not in members else int(number)
    if isinstance(value, bool):
        return str(value).lower() if members == (str,) else value
    if isinstance(value, float) and int in members and float not in members and value.is_integer():
        return int(value)
    if isinstance(value, (int, float)) and str in members and not {int, float} & set(members):
        return str(value)
    if isinstance(value, Mapping) and get_origin(hint) is dict:
        return {str(key): coerced(get_args(hint)[1], entry) for key, entry in value.items()}
    return value


def say_curves(draft: Draft, whose: str) -> None:
    """Say in what the start differs, which no key changes."""
    decisions = draft.report.decisions
    for role in ("actor_train", "critic"):
        args = f"{role}.training_args"
        if draft.get(f"{args}.warmup_steps") or draft.get(f"{args}.warmup_ratio"):
            decisions.append(
                f"{args}: a warm-up of w steps rises from 1 / (w + 1) of the peak here, and in {whose} from 0, so that "
                "its first update changes nothing" + ("; a share is rounded up here, down in verl" * (whose == "verl"))
            )
    if draft.has("critic"):
        decisions.append(f"critic: the head for values starts at 0, in {whose} at random")
