"""Players of roles that aren't the policy's: values of `custom_envs.<tag>.roles.<role>.player`."""

from __future__ import annotations

from roll.configs.catalog.entries import Entry

POLICY, ENDPOINT = "policy", "endpoint"
"""The model that is trained, and one behind a chat service. Others play in the environment's process."""

PLAYERS: dict[str, Entry] = {
    "random": Entry(path="roll.envs.players:RandomPlayer"),
    "solution": Entry(path="roll.envs.players:SolutionPlayer"),
}
"""Classes of `roll.envs.players.Player` by name."""
