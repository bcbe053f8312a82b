"""The tables of docs/configuration.md: every key, written from the configuration classes themselves."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from roll.configs.catalog.entries import Entry
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.loss_table import LOSSES
from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.catalog.tracker_table import TRACKERS
from roll.configs.parsing.build_config import describe
from roll.configs.parsing.loader import PIPELINES
from roll.configs.parsing.schema_places import sections_of
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.offline_config import OfflineConfig
from roll.configs.schema.preference_config import DPOConfig, PreferenceConfig, RewardTrainingConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import DistillConfig, RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.sft_config import SFTConfig

_TOP: dict[type, str] = {
    RunConfig: "every pipeline",
    RLConfig: "`pipeline: rlvr`, `agentic` and `distill`",
    RLVRConfig: "`pipeline: rlvr` and `distill`",
    AgenticConfig: "`pipeline: agentic`",
    DistillConfig: "`pipeline: distill`",
    OfflineConfig: "`pipeline: sft`, `dpo` and `reward_model`",
    SFTConfig: "`pipeline: sft`",
    PreferenceConfig: "`pipeline: dpo` and `reward_model`",
    DPOConfig: "`pipeline: dpo`",
    RewardTrainingConfig: "`pipeline: reward_model`",
}
"""The classes of all pipelines and what these derive from, which comes first."""


def reference() -> str:
    """Return the tables: the top level, then every kind of section once, with all places where it may stand."""
    paths: dict[type, list[str]] = {}
    visited: set[tuple[str, str, str]] = set()
    pipelines = ", ".join(f"`{name}`" for name in PIPELINES)
    parts = [f"Every file says which `pipeline` it is for: {pipelines}."]
    for cls in PIPELINES.values():
        _collect(cls, "", paths)
    for cls, title in _TOP.items():
        texts = docstrings(cls)
        # A key that two pipelines have may mean something else in each, or have another default.
        rows = {s.name: (s.name, texts[s.name], _default(s)) for s in fields(cls) if s.name != "pipeline"}
        own = [spec for spec in fields(cls) if spec.name in rows and rows[spec.name] not in visited]
        visited.update(rows.values())
        if own:
            parts += [f"\n## Top level of {title}\n", *_table(cls, own)]
    owners = _owners()
    shared = [path for where in paths.values() for path in where]
    for cls, where in paths.items():
        titles = [f"{path}{owners[cls, path] if shared.count(path) > 1 else ''}" for path in where]
        parts.append(f"\n## {', '.join(titles)}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n")
        parts.extend(_table(cls, fields(cls)) if fields(cls) else ["No keys."])
    tables: dict[str, tuple[str, Mapping[str, Entry]]] = {
        "track_with": ("tracker_kwargs.<name>", TRACKERS),
        "adv_estimator": ("adv_estimator_args", ESTIMATORS),
        "policy_loss": ("policy_loss_args", LOSSES),
        "loss_type": ("loss_type_args", PREFERENCE_LOSSES),
    }
    for key, (home, entries) in tables.items():
        parts += [f"\n## Options of `{key}`\n", *_options(key, home, entries)]
    return "\n".join(parts).rstrip() + "\n"


def _owners() -> dict[tuple[type, str], str]:
    """Return the pipelines of each section, for places that are different sections in different pipelines."""
    result: dict[tuple[type, str], list[str]] = {}
    for name, cls in PIPELINES.items():
        paths: dict[type, list[str]] = {}
        _collect(cls, "", paths)
        for section, where in paths.items():
            for path in where:
                result.setdefault((section, path), []).append(name)
    return {key: f" of `pipeline: {'` and `'.join(names)}`" for key, names in result.items()}


def docstrings(cls: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, inherited fields included."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            texts.update(_own_docstrings(base))
    return texts


def line_of(spec: Field[Any]) -> str:
    """Return what the reference page says of a field's conditions; empty for one that always acts."""
    conditions = spec.metadata.get("acts_if", ())
    return f" Acts only {' and '.join(condition.phrase for condition in conditions)}." if conditions else ""


@cache
def _own_docstrings(cls: type) -> Mapping[str, str]:
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            texts[statement.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return texts


def _collect(cls: type, path: str, paths: dict[type, list[str]]) -> None:
    hints = get_type_hints(cls)
    for spec in fields(cls):
        key = f"{path}.{spec.name}" if path else spec.name
        sections = [(section, f"`{key}{suffix}`") for section, suffix in sections_of(hints[spec.name])]
        if "table" in spec.metadata:
            sections = [(section, f"`{spec.name}` of `{name}`") for name, section in spec.metadata["table"].items()]
            sections.append((spec.metadata["own_table"], f"`{spec.name}` of your own"))
        for section, section_path in sections:
            known = paths.setdefault(section, [])
            known.extend([section_path] if section_path not in known else [])
            _collect(section, section_path.split("`")[1], paths)


def _table(cls: type, shown: Sequence[Field[Any]]) -> Iterator[str]:
    hints, texts = get_type_hints(cls), docstrings(cls)
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    for spec in shown:
        meaning = _cell(texts[spec.name] + line_of(spec))
        yield f"| `{spec.name}` | {_value(spec, hints[spec.name])} | {_default(spec)} | {meaning} |"


def _options(key: str, home: str, entries: Mapping[str, Entry]) -> Iterator[str]:
    yield f"Under `{home}`, or beside the name: `{key}: {{name: ..., option: ...}}`.\n"
    yield f"| `{key}` | option | value | default |\n|---|---|---|---|"
    for name, entry in entries.items():
        for option, spec in entry.options.items():
            default = f"by the key `{spec.key}`" if spec.key else f"`{_yaml(spec.default)}`"
            yield f"| `{name}` | `{option}` | {_bounded(describe(spec.hint), spec.bounds)} | {default} |"


def _value(spec: Field[Any], hint: Any) -> str:
    also = ", ".join(f"{name} = {ours}" for name, ours in spec.metadata.get("also", {}).items())
    return _plain_value(spec, hint) + (f" (also {also})" if also else "")


def _plain_value(spec: Field[Any], hint: Any) -> str:
    if "choices" in spec.metadata:
        names = ", ".join(f"`{name}`" for name in spec.metadata["choices"])
        return _cell(f"{names}, or your own" if spec.metadata["own"] else names)
    if "expected" in spec.metadata:
        return _cell(spec.metadata["expected"])
    many = ", or one of its entries" if spec.metadata.get("one_or_many") else ""
    return _bounded(describe(hint), spec.metadata.get("bounds", {})) + many


def _bounded(text: str, limits: Mapping[str, float]) -> str:
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = " and ".join(f"{symbols[k]} {v}" for k, v in limits.items())
    return _cell(f"{text}{' ' if bounds else ''}{bounds}")


def _default(spec: Field[Any]) -> str:
    if spec.default is not MISSING:
        return f"`{_yaml(spec.default)}`"
    if spec.default_factory is MISSING:
        return "required"
    made = spec.default_factory()
    return "see its keys" if is_dataclass(made) else f"`{_yaml(made)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(_yaml(entry) for entry in value)}]"
    return json.dumps(value) if isinstance(value, str) and "\n" in value else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
