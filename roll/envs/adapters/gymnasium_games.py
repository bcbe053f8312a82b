"""What the policy is told of gymnasium's own games: rules, names of actions and numbers, boards, what a success is.

Sources: the pages of the environments in gymnasium's documentation, and their classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Success = Literal["reward", "terminated", "truncated"]
"""What makes the end of an episode a success: a positive last reward; that it ended by itself; that it lasted."""


@dataclass(frozen=True, kw_only=True)
class Game:
    """A game that this project knows."""

    about: str
    actions: tuple[str, ...] = ()
    """Names of the numbers of a Discrete action space, in their order."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers of an observation."""
    show: Callable[[Any, Any], str] | None = None
    """From the unwrapped environment and an observation to text."""
    success: Success = "reward"


def _cliff(env: Any, cell: int) -> str:
    rows, columns = env.shape
    signs = [["_"] * columns for _ in range(rows)]
    signs[-1][1:-1] = "C" * (columns - 2)
    signs[-1][-1] = "G"
    signs[cell // columns][cell % columns] = "P"
    return "\n".join(" ".join(row) for row in signs)


def _lake(env: Any, cell: int) -> str:
    signs = {"S": "_", "F": "_", "H": "O", "G": "G"}
    rows = [[signs[sign.decode()] for sign in row] for row in env.desc]
    rows[cell // env.ncol][cell % env.ncol] = "P"
    return "\n".join(" ".join(row) for row in rows)


def _taxi(env: Any, state: int) -> str:
    row, column, passenger, destination = env.decode(state)
    signs = [[sign.decode() for sign in line] for line in env.desc]
    signs[row + 1][2 * column + 1] = "T"
    where = "in the taxi" if passenger == 4 else f"at {'RGYB'[passenger]}"
    board = "\n".join("".join(line) for line in signs)
    return f"{board}\nThe passenger is {where} and wants to go to {'RGYB'[destination]}."


def _blackjack(_: Any, hand: Any) -> str:
    mine, dealers, ace = hand
    return f"Your cards: {mine}{' with a usable ace' if ace else ''}. The dealer shows {dealers}."


_LAKE = Game(
    about="Walk over the ice to the goal without falling into a hole.\nP you, _ ice, O hole, G goal.",
    actions=("Left", "Down", "Right", "Up"),
    show=_lake,
)
_CLIFF = Game(
    about="Walk to the goal. Every step costs 1. Stepping off the cliff costs 100 and takes you back to the start.\n"
    "P you, _ ground, C cliff, G goal.",
    actions=("Up", "Right", "Down", "Left"),
    show=_cliff,
    success="terminated",
)

GAMES: dict[str, Game] = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "Taxi": Game(
        about="Drive the taxi to the passenger, pick them up, drive to where they want to go, drop them off.\n"
        "T taxi, R G Y B places, | wall, : open. A step costs 1, a wrong pickup or drop-off 10; arriving gives 20.",
        actions=("South", "North", "East", "West", "Pickup", "Dropoff"),
        show=_taxi,
    ),
    "Blackjack": Game(
        about="Get closer to 21 than the dealer without going over it.", actions=("Stick", "Hit"), show=_blackjack
    ),
    "CartPole": Game(
        about="Keep the pole on the cart upright by pushing the cart.",
        actions=("Left", "Right"),
        numbers=("position", "velocity", "angle", "angular velocity"),
        success="truncated",
    ),
    "MountainCar": Game(
        about="Get the car up the hill on the right, at position 0.5.",
        actions=("Left", "Coast", "Right"),
        numbers=("position", "velocity"),
        success="terminated",
    ),
    "MountainCarContinuous": Game(
        about="Get the car up the hill on the right, at position 0.45, with little force.",
        numbers=("position", "velocity"),
        success="terminated",
    ),
    "Acrobot": Game(
        about="Swing the free end of the two links above the line, by a torque on the joint between them.",
        actions=("-1", "0", "1"),
        numbers=("cos angle 1", "sin angle 1", "cos angle 2", "sin angle 2", "velocity 1", "velocity 2"),
        success="terminated",
    ),
    "Pendulum": Game(
        about="Swing the pendulum up and keep it there, by a torque on its joint.",
        numbers=("x", "y", "angular velocity"),
        success="truncated",
    ),
}
"""By id without version."""
