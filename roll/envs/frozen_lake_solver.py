"""The best way over a frozen lake: for demonstrations, and as what a trained policy is compared with."""

from __future__ import annotations

import numpy as np

from roll.envs.frozen_lake_map import ACTIONS, Lake

DISCOUNT = 0.999
"""Of two ways that are as safe the shorter one is better; a bit of safety is worth many steps."""
_TOLERANCE = 1e-10


def solve(lake: Lake) -> tuple[str | None, ...]:
    """The best action in every cell; None in holes, at the goal, and where the goal can't be reached.

    Where the ice isn't slippery these are the shortest ways. Where it is, value iteration finds the actions that most
    likely lead to the goal.
    """
    values = _values(lake)
    chances, reached = _tables(lake)
    by_action = np.round((chances * values[reached]).sum(-1) * DISCOUNT, 9)  # ties go to the first action
    best = by_action.argmax(1)
    return tuple(
        ACTIONS[best[cell]] if lake.sign(cell) not in "GH" and by_action[cell, best[cell]] > 0 else None
        for cell in range(lake.num_cells)
    )


def success_probability(lake: Lake, policy: tuple[str | None, ...], steps: int) -> float:
    """How likely this policy is at the goal after so many steps."""
    chance = np.zeros(lake.num_cells)
    chance[lake.start] = 1.0
    for _ in range(steps):
        after = np.zeros(lake.num_cells)
        for cell in np.flatnonzero(chance):
            action = policy[cell]
            if action is None:
                after[cell] += chance[cell]
                continue
            for probability, reached in lake.outcomes(int(cell), ACTIONS.index(action)):
                after[reached] += chance[cell] * probability
        chance = after
    return float(sum(chance[cell] for cell in range(lake.num_cells) if lake.sign(cell) == "G"))


def _tables(lake: Lake) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and cells of all outcomes: [cells, 4 actions, outcomes]; missing ones have probability 0."""
    chances = np.zeros((lake.num_cells, 4, 3))
    reached = np.zeros((lake.num_cells, 4, 3), dtype=np.int64)
    for cell in range(lake.num_cells):
        for action in range(4):
            for i, (probability, after) in enumerate(lake.outcomes(cell, action)):
                chances[cell, action, i], reached[cell, action, i] = probability, after
    return chances, reached


def _values(lake: Lake) -> np.ndarray:
    """Discounted probability of reaching the goal from each cell, by value iteration."""
    chances, reached = _tables(lake)
    signs = np.array([lake.sign(cell) for cell in range(lake.num_cells)])
    goal, hole = signs == "G", signs == "H"
    values = goal.astype(float)
    while True:
        after = (chances * values[reached]).sum(-1).max(1) * DISCOUNT
        after[goal], after[hole] = 1.0, 0.0
        if np.abs(after - values).max() < _TOLERANCE:
            return after
        values = after
