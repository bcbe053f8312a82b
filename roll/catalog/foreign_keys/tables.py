"""All tables of foreign keys: by system, by pattern, by last word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from roll.catalog.foreign_keys import (
    alibaba_roll,
    alibaba_roll_roles,
    alibaba_roll_tasks,
    openrlhf,
    trl,
    verl,
    verl_jobs,
    verl_roles,
    verl_rollout,
)
from roll.catalog.foreign_keys.rows import ForeignKey


@dataclass(frozen=True, kw_only=True)
class System:
    """Another system."""

    name: str
    """As its project writes it."""
    groups: Mapping[str, Sequence[ForeignKey]]
    """Its keys by what they are about, in the order of docs/coming_from.md."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """What `<role>` stands for in its keys, by our roles."""

    @cached_property
    def rows(self) -> list[ForeignKey]:
        """All of them; of rows with the same key the first counts."""
        found: dict[str, ForeignKey] = {}
        for rows in self.groups.values():
            for row in rows:
                found.setdefault(row.key, row)
        return list(found.values())


SYSTEMS: dict[str, System] = {
    "roll": System(
        name="Alibaba's ROLL",
        groups={
            "The run": alibaba_roll.RUN,
            "The policy's optimisation": alibaba_roll.POLICY,
            "Roles": alibaba_roll_roles.PLACEMENT,
            "`model_args`": alibaba_roll_roles.MODEL,
            "`training_args`": alibaba_roll_roles.TRAINING,
            "`data_args`": alibaba_roll_roles.DATA,
            "`generating_args`": alibaba_roll_roles.SAMPLING,
            "`strategy_config`": alibaba_roll_roles.BACKENDS,
            "Prompts and validation": alibaba_roll_tasks.PROMPTS,
            "Rewards": alibaba_roll_tasks.REWARDS,
            "Environments": alibaba_roll_tasks.ENVS,
            "Managers of environments": alibaba_roll_tasks.MANAGERS,
            "Fine-tuning, preferences, distillation": alibaba_roll_tasks.OFFLINE,
        },
        roles=alibaba_roll_roles.ROLES,
    ),
    "verl": System(
        name="verl",
        groups={
            "`data`": verl.DATA,
            "`algorithm`": verl.ALGORITHM,
            "`actor_rollout_ref.model`": verl_roles.MODEL,
            "`actor_rollout_ref.actor`": verl_roles.ACTOR,
            "`actor_rollout_ref.ref`": verl_roles.REFERENCE,
            "`actor_rollout_ref.rollout`: sampling": verl_rollout.SAMPLING,
            "`actor_rollout_ref.rollout`: the engine": verl_rollout.ENGINE,
            "`critic`": verl_roles.CRITIC,
            "Rewards": verl.REWARDS,
            "`reward_model`": verl_roles.REWARD_MODEL,
            "`trainer`": verl.TRAINER,
        },
    ),
    "verl_sft": System(name="verl's sft_trainer", groups={"Keys": verl_jobs.SFT}),
    "verl_generation": System(name="verl's main_generation", groups={"Keys": verl_jobs.GENERATION}),
    "verl_evaluation": System(name="verl's main_eval", groups={"Keys": verl_jobs.EVALUATION}),
    "trl": System(
        name="TRL", groups={"Every trainer": trl.TRAINER, "GRPO": trl.GRPO, "Preferences, fine-tuning": trl.PREFERENCES}
    ),
    "openrlhf": System(name="OpenRLHF", groups={"Flags": openrlhf.FLAGS}),
}
"""By the name that `roll migrate --from` takes, or the job that is recognised."""

_OUR_ROLES = re.compile(
    r"^(actor_train|actor_infer|reference|critic|reward_model|reward_models\.<name>|teacher|teachers\.<name>|judge"
    r"|validation|<role>)(?=\.)"
)
_MANAGERS = ("train_env_manager", "val_env_manager")


def canonical(place: str) -> str:
    """Return a place of ours with every role as `<role>` and both managers of environments as `<manager>`."""
    place = _OUR_ROLES.sub("<role>", place.replace("[]", ""))
    first, dot, rest = place.partition(".")
    return f"<manager>{dot}{rest}" if first in _MANAGERS else place


@cache
def targets() -> frozenset[str]:
    """Places of ours, canonical, that are the counterpart of some key of another system."""
    rows = (row for system in SYSTEMS.values() for row in system.rows)
    return frozenset(canonical(place) for row in rows for place in row.to)


@cache
def by_leaf() -> Mapping[str, tuple[tuple[str, ForeignKey], ...]]:
    """Systems and rows by the last word of the key."""
    found: dict[str, list[tuple[str, ForeignKey]]] = {}
    for name, system in SYSTEMS.items():
        for row in system.rows:
            if row.key.strip("*. "):
                found.setdefault(row.leaf, []).append((name, row))
    return {leaf: tuple(rows) for leaf, rows in found.items()}


@cache
def by_section() -> Mapping[str, tuple[tuple[str, ForeignKey], ...]]:
    """Systems and rows by the word of a section right above the key, for one that was typed without what is in it."""
    found: dict[str, list[tuple[str, ForeignKey]]] = {}
    for name, system in SYSTEMS.items():
        for row in system.rows:
            words = [word for word in row.key.split(".") if word[0] not in "<*"]
            if len(words) > 2:
                found.setdefault(words[-2], []).append((name, row))
    return {word: tuple(rows) for word, rows in found.items()}


class Patterns:
    """Finds the row of a dotted path: a literal segment before a role, a role before a name, a name before the rest."""

    def __init__(self, rows: Iterable[ForeignKey], roles: Iterable[str] = ()) -> None:
        self._roles = frozenset(roles)
        self._tree: dict[str, dict] = {}  # type: ignore[type-arg]
        for row in rows:
            node = self._tree
            for part in row.key.split("."):
                node = node.setdefault(part, {})
            node.setdefault("", row)  # type: ignore[arg-type]

    def find(self, path: Sequence[str]) -> ForeignKey | None:
        """Return the row, or None."""
        return next(iter(self._find(self._tree, path)), None)

    def is_section(self, path: Sequence[str]) -> bool:
        """Return whether there are rows below this path."""
        return any(node.keys() - {""} for node in self._nodes(self._tree, path))

    def takes_whole(self, path: Sequence[str]) -> bool:
        """Return whether a section at this path is one key: it has a row, and no key below it has one of its own."""
        nodes = list(self._nodes(self._tree, path))
        return any("" in node for node in nodes) and not any(node.keys() - {"", "**"} for node in nodes)

    def _branches(self, node: dict, word: str) -> Iterator[dict]:  # type: ignore[type-arg]
        # A node's own row is at "", which a broken key (`a..b`) may name.
        for name, applies in ((word, bool(word)), ("<role>", word in self._roles), ("<manager>", word in _MANAGERS),
                              ("<name>", True)):  # fmt: skip
            if applies and name in node:
                yield node[name]

    def _find(self, node: dict, path: Sequence[str]) -> Iterator[ForeignKey]:  # type: ignore[type-arg]
        if not path:
            if "" in node:
                yield node[""]
            return
        for branch in self._branches(node, path[0]):
            yield from self._find(branch, path[1:])
        if "**" in node:
            rest = node["**"]
            if "" in rest:
                yield rest[""]
            for skipped in range(1, len(path)):  # `**.word`
                yield from self._find({key: below for key, below in rest.items() if key}, path[skipped:])

    def _nodes(self, node: dict, path: Sequence[str]) -> Iterator[dict]:  # type: ignore[type-arg]
        if not path:
            yield node
            return
        for branch in self._branches(node, path[0]):
            yield from self._nodes(branch, path[1:])


@cache
def patterns(system: str) -> Patterns:
    """Return the rows of a system, to be found by path."""
    return Patterns(SYSTEMS[system].rows, SYSTEMS[system].roles)
