"""The tables of foreign keys: every key of ours has a row in them or is only here; every row names keys of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase

import pytest
from only_here import ONLY_HERE

from roll.configs.parsing.loader import PIPELINES
from roll.configs.parsing.schema_places import hints_of, sections_of
from roll.configs.schema.strategy_config import STRATEGIES
from roll.workbench.migrate import peers
from roll.workbench.migrate.peers import leaves_of
from roll.workbench.migrate.table import NO_DEFAULT, canonical, is_earlier, patterns, systems, targets
from roll.workbench.migrate.translate import CONVERSIONS

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
        assert row.to or row.fate in ("dead", "quiet", "absent"), row
        assert row.note or row.fate == "translated", f"{row.key}: why?"
        assert not row.note.endswith("."), row


VERL_SECTIONS = ("algorithm.", "data.", "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "trainer.")


@pytest.mark.parametrize("system", ["trl", "verl", "openrlhf"])
def test_every_key_of_a_peers_own_has_a_row(system: str):
    # Those of transformers' TrainingArguments that no class of TRL's changes may do without: see peer_tables.py.
    jobs = {name: job for name, job in peers.table(system).items() if isinstance(job, Mapping)}
    if system == "verl":
        jobs = {name: [key for key, _ in leaves_of(jobs[name]) if key.startswith(VERL_SECTIONS)]
                for name in ("verl", "verl_megatron")}  # fmt: skip
    rows = patterns(system)
    without = {f"{name}: {key}" for name, keys in jobs.items() for key in keys for words in [key.split(".")]
               if name != "TrainingArguments" and not (rows.find(words) or rows.is_section(words))}  # fmt: skip
    assert not without, f"{len(without)} keys of {system} {peers.release(system)} have no row: {sorted(without)}"


def test_a_default_stands_in_one_place():
    twice = [f"{name}: {row.key} = {row.default_text}" for name, system in systems().items() if peers.table(name)
             for row in system.rows if row.default is not NO_DEFAULT]  # fmt: skip
    assert not twice, "the table of the release says it already"


def test_every_conversion_that_a_row_names_exists_and_says_what_it_does():
    for name in (name for name in systems() if name not in ("verl_generation", "verl_evaluation")):
        for row in systems()[name].rows:
            assert not row.how or CONVERSIONS[row.how].__doc__, f"{row.key} :{row.how}"


@pytest.mark.parametrize("system", systems())
def test_names_of_earlier_releases_are_rows_and_not_keys_of_the_release(system: str):
    old = [row.key for row in systems()[system].rows if is_earlier(system, row)]
    now = {key for job in peers.jobs(system).values() for key in job}
    assert not now.intersection(old)
    idle = [pattern for pattern in systems()[system].earlier if not any(fnmatchcase(key, pattern) for key in old)]
    assert not idle, "no row has such a key"


def test_a_section_that_is_like_another_one_has_its_keys_too():
    # DistillationConfig and RLOOConfig are stored as what differs from GRPOConfig, the Megatron job from the other one.
    trl, verl = peers.table("trl"), peers.table("verl")
    assert peers.jobs("trl")["RLOOConfig"]["num_generations"] == ("int | None", 2)
    assert peers.jobs("trl")["RLOOConfig"]["beta"] == ("float", 0.05) and "epsilon_high" in trl["RLOOConfig"]
    assert "mask_truncated_completions" in trl["GRPOConfig"] and "scale_rewards" not in trl["RLOOConfig"]
    assert "fsdp_config" in verl["verl"]["actor_rollout_ref"]["actor"]
    assert "fsdp_config" not in verl["verl_megatron"]["actor_rollout_ref"]["actor"]
    assert verl["verl_megatron"]["actor_rollout_ref"]["actor"]["clip_ratio"] == 0.2


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
