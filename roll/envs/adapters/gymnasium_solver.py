"""The best way through a game whose transitions are a table, for demonstrations and as a baseline.

gymnasium's toy games have `P[state][action]`: a list of (probability, next state, reward, whether it ends there).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DISCOUNT = 0.99  # Below 1: of two ways to the same reward the shorter one is better
_TOLERANCE = 1e-8
_MAX_SWEEPS = 5000


def best_walk(
    env: Any,
    table: Mapping[int, Mapping[int, Any]],
    names: Sequence[str],
    max_actions: int,
    succeeded: Callable[[float, bool, Mapping[str, Any], float], bool],
) -> list[str] | None:
    """Return what the best policy does from here in a copy of the game; None where that is no success within
    `max_actions`.

    Args:
        env: gymnasium's environment, wrappers included; it isn't changed.
        table: `P`.
        names: of the actions 0, 1, ...
        succeeded: from the last reward, whether it terminated, its info and the sum of rewards to a success.
    """
    best = best_actions(table)
    copied, walk, gained = copy.deepcopy(env), list[str](), 0.0
    while len(walk) < max_actions:
        action = best[int(copied.unwrapped.s)]
        walk.append(names[action])
        _, reward, terminated, truncated, info = copied.step(action)
        gained += float(reward)
        if terminated or truncated:
            return walk if succeeded(float(reward), bool(terminated), info, gained) else None
    return None


def best_actions(table: Mapping[int, Mapping[int, Any]]) -> dict[int, int]:
    """Return, by state, the first action of the greatest value (value iteration, Sutton and Barto, section 4.4)."""
    import numpy as np

    states, actions = len(table), len(table[0])
    width = max(len(ways) for row in table.values() for ways in row.values())
    chance, reward, going_on = (np.zeros((states, actions, width)) for _ in range(3))
    to = np.zeros((states, actions, width), dtype=int)
    for state, row in table.items():
        for action, ways in row.items():
            for i, (probability, after, gain, over) in enumerate(ways):
                chance[state, action, i], to[state, action, i] = probability, after
                reward[state, action, i], going_on[state, action, i] = gain, not over
    values = np.zeros(states)
    for _ in range(_MAX_SWEEPS):
        worth = (chance * (reward + _DISCOUNT * going_on * values[to])).sum(-1)
        better = worth.max(-1)
        if np.abs(better - values).max() < _TOLERANCE:
            break
        values = better
    # Values that differ by rounding alone are equal: then the first action counts.
    return {state: int(np.argmax(worth[state] >= better[state] - 1e-6)) for state in range(states)}
