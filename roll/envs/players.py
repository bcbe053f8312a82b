"""Who plays the roles of an environment of several agents, and those that are played by a script.

    reset, step              ScriptedRoles              Env
    of the policy's  ------> plays the scripted  -----> everybody's actions, one after another
    roles <----------------- roles in between    <-----

Scripted players live in the environment's process: what they do follows from the seed and the actions before, so an
episode can be played again as any other.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.env_table import ENDPOINT, PLAYERS, POLICY
from roll.configs.catalog.signatures import signature_of
from roll.configs.errors import did_you_mean
from roll.configs.schema.env_config import CustomEnv, RoleConfig
from roll.envs.base import Env, InvalidAction, Observation, StepResult
from roll.envs.wrappers import checked_observation, checked_result
from roll.utils.seeding import stable_hash

_TRIES = 100
"""Invalid actions in a row after which a scripted player is at its end."""


class Player(ABC):
    """Plays a role by a script; one instance per environment, which plays one episode at a time."""

    @abstractmethod
    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        """Return an action of the environment's own.

        Args:
            observation: what the role is shown.
            env: the environment, for `sample_action`, `solution` or more; it mustn't be changed.
            rng: of this role in this episode. Other randomness makes episodes that can't be played again.
        """


class RandomPlayer(Player):
    """Draws from the actions that there are."""

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:  # noqa: ARG002
        action = env.sample_action(rng)
        if action is None and not env.actions:
            raise ValueError(
                f"player random: {type(env).__name__} can't draw an action; give it sample_action() or actions "
                "(roll/envs/base.py), or choose another player"
            )
        return rng.choice(env.actions) if action is None else action


class SolutionPlayer(Player):
    """Takes the first action of the environment's `solution`: the best one, where the environment knows it.

    Args:
        mistakes: share of its actions that are drawn at random instead.
    """

    def __init__(self, *, mistakes: float = 0.0) -> None:
        if not 0 <= mistakes <= 1:
            raise ValueError(f"mistakes: got {mistakes!r}, expected a share from 0 to 1")
        self._mistakes = mistakes
        self._random = RandomPlayer()

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        if rng.random() < self._mistakes:
            return self._random.act(observation, env, rng)
        actions = env.solution(1)
        if not actions:
            raise ValueError(
                f"player solution: {type(env).__name__}.solution() gives no action here; choose another player"
            )
        return actions[0]


def players_of(section: CustomEnv, roles: Sequence[str], seed: int) -> dict[str, RoleConfig]:
    """Return who plays each role in the episodes of this seed. The policy plays what nobody else does."""
    players = [section.roles.get(role, RoleConfig()) for role in roles]
    shift = stable_hash("roles", seed) % len(roles) if section.swap_roles and roles else 0
    return {role: players[(i + shift) % len(players)] for i, role in enumerate(roles)}


def role_problems(section: CustomEnv, env_type: str, roles: Sequence[str]) -> list[tuple[str, str]]:
    """Return (key below the section, what is wrong with it): roles that the environment doesn't have, and players that
    there aren't, or that don't take their options. Imports players of the user's own."""
    problems = []
    for role, role_config in section.roles.items():
        if role not in roles:
            has = f"{env_type} has no such role; it has {', '.join(roles) or 'none: a single agent plays it'}"
            near = did_you_mean(role, roles)
            problems.append((f"roles.{role}", f"{has}. {near}" if near.startswith("did") else has))
        if role_config.scripted:
            problems += [(f"roles.{role}.{key}", reason) for key, reason in _player_problems(role_config)]
    if section.swap_roles and len(roles) < 2:
        problems.append(("swap_roles", f"{env_type} has no roles to swap: a single agent plays it"))
    return problems


def _player_problems(role_config: RoleConfig) -> list[tuple[str, str]]:
    try:
        player_class = implementation(PLAYERS, role_config.player, key="player", kind="class")
    except ValueError as error:
        known = f"{POLICY}, {ENDPOINT}, {', '.join(PLAYERS)}"
        text = str(error).removeprefix("player: ").replace(f"known: {', '.join(PLAYERS)}", f"known: {known}")
        return [("player", text)]
    if not inspect.isclass(player_class) or not issubclass(player_class, Player) or inspect.isabstract(player_class):
        return [
            ("player", f"{role_config.player} is not a player; derive a class with act() from roll.envs.players.Player")
        ]
    wrong = [
        (f"player_config.{arg}", reason)
        for arg, reason in signature_of(player_class, skip=0).problems(role_config.player_config)
    ]
    if wrong:
        return wrong
    try:
        player_class(**role_config.player_config)
    except (TypeError, ValueError) as error:
        return [("player_config", f"{role_config.player} refuses it: {error}")]
    return []


class ScriptedRoles(Env):
    """The environment as the roles meet it that no script plays: their actions only.

    What scripted roles are paid is dropped; their steps' rewards for the others, parts and metrics join those of the
    step before them, or of the first one where they begin.
    """

    def __init__(self, env: Env, section: CustomEnv) -> None:
        self._env = env
        self._section = section
        self._scripts: dict[str, tuple[Player, random.Random]] = {}
        self._before: list[StepResult] = []  # Steps of scripts that began
        self.instructions, self.actions, self.roles = env.instructions, env.actions, env.roles

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._scripts = {
            role: (_made(role_config), random.Random(stable_hash("player", role, seed)))
            for role, role_config in players_of(self._section, self.roles, seed).items()
            if role_config.scripted
        }
        observation: Observation | None = checked_observation(self._env, "reset", self._env.reset(seed, options))
        self.instructions = self._env.instructions
        self._before = []
        while observation is not None and observation.role in self._scripts:
            self._before.append(self._scripted(observation))
            observation = self._before[-1].observation
        if observation is None:
            raise ValueError(f"{type(self._env).__name__} was over before a role acted that no script plays")
        return observation

    def step(self, action: str) -> StepResult:
        result = checked_result(self._env, self._env.step(action))
        done, self._before = [*self._before, result], []
        while (shown := done[-1].observation) is not None and shown.role in self._scripts:
            done.append(self._scripted(shown))
        return self._together(done)

    def render(self) -> Any:
        return self._env.render()

    def solution(self, max_actions: int) -> Sequence[str] | None:
        return self._env.solution(max_actions)

    def sample_action(self, rng: random.Random) -> str | None:
        return self._env.sample_action(rng)

    def close(self) -> None:
        self._env.close()

    def _scripted(self, observation: Observation) -> StepResult:
        player, rng = self._scripts[observation.role]
        for _ in range(_TRIES):
            action = player.act(observation, self._env, rng)
            try:
                return checked_result(self._env, self._env.step(action))
            except InvalidAction as error:
                reason = str(error)
        raise ValueError(
            f"{type(player).__name__}, which plays {observation.role}, chose {_TRIES} invalid actions in a row, the "
            f"last {action!r}: {reason}"
        )

    def _together(self, done: Sequence[StepResult]) -> StepResult:
        first, *later = done
        parts, metrics = dict(first.reward_parts), dict(first.metrics)
        paid = dict(first.role_rewards)
        for result in later:
            for sums, values in ((parts, result.reward_parts), (metrics, result.metrics), (paid, result.role_rewards)):
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + value
        return replace(
            done[-1],
            reward=sum(result.reward for result in done),
            reward_parts=parts,
            metrics={name: value for name, value in metrics.items() if not self._of_script(name, "success/")},
            role_rewards={role: value for role, value in paid.items() if role not in self._scripts},
        )

    def _of_script(self, name: str, prefix: str) -> bool:
        return name.startswith(prefix) and name.removeprefix(prefix) in self._scripts


def _made(role_config: RoleConfig) -> Player:
    player = implementation(PLAYERS, role_config.player, key="player", kind="class")(**role_config.player_config)
    assert isinstance(player, Player), "refused when the environment was loaded"
    return player
