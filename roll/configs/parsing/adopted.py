"""What people who come from ROLL write and what is meant by it: taken as it is meant, with a note, before keys are
checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.catalog.tracker_table import TRACKERS
from roll.configs.parsing.other_projects import explainer
from roll.configs.parsing.roll_presets import SCORING

_SCORES = ("reference", "teacher", "reward_model")
_FOLDERS = ("log_dir", "logdir", "dir")


def adopted(plain: Mapping[str, Any], declared: frozenset[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the tree with such keys as they are meant, and a note about each. `declared`: keys of the top level."""
    tree = dict(plain)
    notes: list[str] = []
    for role in _SCORES:
        tree[role] = _scoring(tree.get(role), role, notes) if isinstance(tree.get(role), Mapping) else tree.get(role)
    tree = {key: value for key, value in tree.items() if key in plain}
    _tracking(tree, notes)
    return _without_empty(tree, (), declared, notes), notes


def _scoring(section: Any, role: str, notes: list[str]) -> Any:
    """Rename the backend of a role that only scores, if it is one that trains or generates."""
    args = section.get("strategy_args")
    name = args.get("strategy_name") if isinstance(args, Mapping) else None
    if name != "hf_infer":
        return section
    notes.append(f"{role}.strategy_args.strategy_name: hf_infer is {SCORING[name]} for a role that scores")
    return {**section, "strategy_args": {**args, "strategy_name": SCORING[name]}}


def _tracking(tree: dict[str, Any], notes: list[str]) -> None:
    """Move options of a tracker that stand without its name below it, and a project's name."""
    names = tree.get("track_with")
    names = [names] if isinstance(names, str) else names if isinstance(names, (list, tuple)) else []
    options = tree.get("tracker_kwargs")
    flat = dict(options) if isinstance(options, Mapping) else {}
    if isinstance(tree.get("project_name"), str):
        flat.setdefault("project", tree.pop("project_name"))
        notes.append("project_name: it is tracker_kwargs.<tracker>.project, for trackers that have projects")
    options_by_name: dict[str, Any] = {}
    for key, value in flat.items():
        if key in TRACKERS or key in names or isinstance(value, Mapping):
            options_by_name[key] = {**value, **options_by_name.get(key, {})} if isinstance(value, Mapping) else value
            continue
        takers = [name for name in names if isinstance(name, str) and name in TRACKERS
                  and key in TRACKERS[name].options]  # fmt: skip
        for name in takers:
            options_by_name[name] = {key: value, **(options_by_name.get(name) or {})}
        if takers:
            notes.append(f"tracker_kwargs.{key}: it is tracker_kwargs.{takers[0]}.{key}")
        elif key in _FOLDERS and isinstance(value, str):
            used = "logging_dir" in tree
            tree.setdefault("logging_dir", value)
            notes.append(f"tracker_kwargs.{key}: trackers write below logging_dir{', which is given' if used else ''}")
        elif key != "project":
            options_by_name[key] = value  # refused where keys are checked
    if options_by_name or isinstance(options, Mapping):
        tree["tracker_kwargs"] = options_by_name


def _without_empty(tree: Any, path: tuple[str, ...], declared: frozenset[str], notes: list[str]) -> dict[str, Any]:
    """Remove keys of ROLL that nothing here needs and that have no value: `model_type: ~`."""
    result = {}
    for key, value in tree.items():
        below = (*path, str(key))
        asked = value is None and len(below) > 1 and below[0] in declared
        if asked and (why := explainer().unneeded(below)):
            notes.append(f"{'.'.join(below)}: null, and nothing here needs it: {why}")
        elif isinstance(value, Mapping) and value and below[0] in declared:
            result[key] = _without_empty(value, below, declared, notes)
        else:
            result[key] = value
    return result
