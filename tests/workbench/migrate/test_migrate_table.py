"""The tables of foreign keys: every key of ours has a row in them or is only here; every row names keys of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

import pytest
from only_here import ONLY_HERE

from roll.configs.parsing.loader import PIPELINES
from roll.configs.parsing.schema_places import hints_of, sections_of
from roll.configs.schema.strategy_config import STRATEGIES
from roll.workbench.migrate.table import canonical, patterns, systems, targets

WHAT_TO_DO = (
    "say where these keys come from: a row in roll/workbench/migrate/*.keys (the other project's key, then "
    "ours), or a word in tests/workbench/migrate/only_here.py if no other "
    "system has it"
)


def keys_below(cls: type, path: str = "") -> Iterator[str]:
    """Places of the keys that aren't sections."""
    for spec in fields(cls):
        below = f"{path}.{spec.name}" if path else spec.name
        inside = list(sections_of(hints_of(cls)[spec.name]))
        if spec.name == "strategy_config":
            inside = [(options, "") for options in set(STRATEGIES.values())]
        if inside:
            for section, suffix in inside:
                yield from keys_below(section, below + suffix)
        else:
            yield below


OURS = {canonical(place) for cls in PIPELINES.values() for place in keys_below(cls)}


def has_row(place: str) -> bool:
    # An open section has rows of its own keys.
    return place in targets() or any(target.startswith(f"{place}.") for target in targets())


def test_every_key_of_ours_has_a_row_or_is_only_here():
    without = sorted(place for place in OURS if not has_row(place) and place not in ONLY_HERE)
    assert not without, f"{WHAT_TO_DO}: {', '.join(without)}"


def test_what_is_only_here_exists_and_has_no_row():
    assert not sorted(ONLY_HERE - OURS), "remove from ONLY_HERE: there is no such key"
    assert not sorted(place for place in ONLY_HERE if has_row(place)), "remove from ONLY_HERE: it has a row"


@pytest.mark.parametrize("system", [name for name in systems() if name not in ("verl_generation", "verl_evaluation")])
def test_every_counterpart_is_a_key_of_ours(system: str):
    sections = {place[:end] for place in OURS for end in range(len(place)) if place[end] == "."}
    roles = {"reference", "critic", "teacher", "judge", "reward_model", "<role>"}
    # Mappings whose keys are those of an environment, of an engine, of DeepSpeed.
    open_ones = ("custom_envs.<name>.env_config.", "<role>.strategy_args.strategy_config.")
    wrong = [
        f"{row.key} -> {place}"
        for row in systems()[system].rows
        for place in row.to
        if canonical(place) not in OURS | sections | roles and not canonical(place).startswith(open_ones)
    ]
    assert not wrong


@pytest.mark.parametrize("system", systems())
def test_a_row_says_what_becomes_of_the_key(system: str):
    for row in systems()[system].rows:
        assert row.to or row.fate in ("dead", "absent"), row
        assert row.note or row.fate == "translated", f"{row.key}: why?"
        assert not row.note.endswith("."), row


def test_the_groups_of_a_system_name_a_key_once():
    for name in ("roll", "verl"):
        for title, rows in systems()[name].groups.items():
            twice = [key for key, count in Counter(row.key for row in rows).items() if count > 1]
            # Rows of the policy's model come before those of any model; of two the first counts.
            assert all(key.startswith("actor_rollout_ref.model.") for key in twice), title


def test_a_key_with_an_empty_part_is_looked_up_like_any_other():
    for name, system in systems().items():
        for row in system.rows:
            broken = [*row.key.split("."), "", "lr"]
            found = patterns(name).find(broken)
            assert found is None or "**" in found.key, found
