"""Keys that act only under a condition, which stands on their field (schema/acts_if.py), are refused without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from roll.configs.errors import Violation, problem
from roll.configs.schema.acts_if import BACKEND, ROLE, TRAINED, ActsIf
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import TrainConfig
from roll.configs.stand_in import STAND_IN, StandInUsed


def acts_if_rules(config: RunConfig) -> Iterator[Violation]:
    """Refuse every key that is set while one of its conditions doesn't hold, with the first of those."""
    for path, section in sections_below(config, ""):
        for spec in fields(section):
            # A key that is unusable, or hangs on one that is, has its message; the next may still earn its own.
            with contextlib.suppress(StandInUsed):
                yield from _unmet(config, path, section, spec)


def _unmet(config: RunConfig, path: str, section: Any, spec: Field[Any]) -> Iterator[Violation]:
    """Yield the first condition of a key that is set and doesn't hold."""
    conditions, value = spec.metadata.get("acts_if", ()), getattr(section, spec.name)
    if not conditions or value == _default(spec) or value in spec.metadata["idle"]:
        return
    key = f"{path}.{spec.name}" if path else spec.name
    for condition in conditions:
        actual = _actual(config, path, section, condition)
        if not condition.holds(actual):
            yield _violation(key, path, value, condition, actual)
            return


def sections_below(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every dataclass of the tree with its path."""
    yield path, section
    for spec in fields(section):
        value, below = getattr(section, spec.name), f"{path}.{spec.name}" if path else spec.name
        inside = {below: value}
        if value is STAND_IN:
            continue
        if isinstance(value, dict):
            inside = {f"{below}.{name}": entry for name, entry in value.items()}
        elif isinstance(value, tuple):
            inside = {f"{below}[{i}]": entry for i, entry in enumerate(value)}
        for key_path, entry in inside.items():
            if entry is not STAND_IN and is_dataclass(entry):
                yield from sections_below(entry, key_path)


def _default(spec: Field[Any]) -> Any:
    return spec.default_factory() if spec.default_factory is not MISSING else spec.default


def _actual(config: RunConfig, path: str, section: Any, condition: ActsIf) -> Any:
    role = path.split(".")[0]
    if role in ("reward_models", "teachers"):  # a role each
        role = ".".join(path.split(".")[:2])
    if condition.key == ROLE:
        several = {"reward_models": "reward_model", "teachers": "teacher"}
        return several.get(role.split(".")[0], role)
    if condition.key == TRAINED:
        return isinstance(config.sections.get(role), TrainConfig)
    if condition.key == BACKEND:
        return config.sections[role].strategy_args.strategy_name
    return getattr(config, condition.key[1:]) if condition.key.startswith("^") else getattr(section, condition.key)


def _violation(key: str, path: str, value: Any, condition: ActsIf, actual: Any) -> Violation:
    subject = str(actual) if condition.key == BACKEND else path.split(".")[0]
    not_for = f"not for {subject}"
    named = {BACKEND: f"not with {subject}", ROLE: not_for, TRAINED: not_for}.get(condition.key)
    top = condition.key.startswith("^") or not path
    key_path = condition.key.removeprefix("^") if top else f"{path}.{condition.key}"
    now = named or (f"and {key_path} is {_yaml(actual)}" if not condition.words else "")
    why = condition.why
    if not isinstance(why, str):
        why = next((text for start, text in why.items() if subject.startswith(start)), "")
    sentence = f"this key acts only {condition.phrase.replace('`', '')}"
    sentence += (f", {now}" if now else "") + (f": {why}" if why else "")
    if condition.fix or named:
        fix = condition.fix.replace("{section}", path) or "remove it"
    elif condition.unless:
        fix = "keep one of the two"
    else:
        wanted = condition.values[0] if condition.values else "true" if actual is False else "..."
        fix = f"{key_path}={wanted}, or remove it"
    if is_dataclass(value):
        return problem(key, sentence, fix)
    return problem(key, sentence, fix, list(value) if isinstance(value, tuple) else value)


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    if is_dataclass(value):
        return "there"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
