"""The best way over a frozen lake in a given time: for demonstrations, and as what policies are compared with."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from roll.envs.frozen_lake_map import Lake

IMPATIENCE = 1e-6
"""What a step costs, as a share of the chance to get there: of two ways that are as safe the shorter one is taken."""
NO_ACTION = -1


@lru_cache(maxsize=256)
def best_actions(lake: Lake, steps: int) -> np.ndarray:
    """The action that most likely leads to the goal in time, by backward induction over the steps left.

    Returns int8 [steps + 1, cells], read-only: row t holds numbers of `ACTIONS` for a player who has t steps left,
    `NO_ACTION` in holes, at the goal, and where the goal can't be reached in time. Ties go to the first action.
    """
    chances, reached = _tables(lake)
    signs = np.array([lake.sign(cell) for cell in range(lake.num_cells)])
    goal, over = signs == "G", (signs == "G") | (signs == "H")
    actions = np.full((steps + 1, lake.num_cells), NO_ACTION, dtype=np.int8)
    values = goal.astype(float)
    for left in range(1, steps + 1):
        by_action = (chances * values[reached]).sum(-1) * (1 - IMPATIENCE)
        best = np.round(by_action, 9).argmax(1)
        values = np.where(over, goal, by_action.max(1))
        actions[left] = np.where(over | (values == 0), NO_ACTION, best)
    actions.flags.writeable = False
    return actions


def _tables(lake: Lake) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and cells of all outcomes: [cells, 4 actions, outcomes]; missing ones have probability 0."""
    chances = np.zeros((lake.num_cells, 4, 3))
    reached = np.zeros((lake.num_cells, 4, 3), dtype=np.int64)
    for cell in range(lake.num_cells):
        for action in range(4):
            for i, (probability, after) in enumerate(lake.outcomes(cell, action)):
                chances[cell, action, i], reached[cell, action, i] = probability, after
    return chances, reached
