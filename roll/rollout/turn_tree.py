"""The turns of an episode under way: a tree, in which each continues the context of another or begins one.

    0 -- 1 -- 2        turns by number, in the order in which they were asked for;
         +--- 4 -- 5   2 and 4 both continue 1, and 3 began a context of its own
    3

Several may be asked for at once. A turn is part of the tree when its response is there, whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from roll.types.trajectory import Turn

if TYPE_CHECKING:
    from roll.types.picture import Picture


class TurnTree:
    """Turns by number."""

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}
        self._parents: dict[int, int | None] = {}
        self._asked = 0
        self.last: int | None = None
        """Number of the turn whose response came last."""

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, number: int) -> Turn:
        return self._turns[number]

    def __contains__(self, number: object) -> bool:
        return number in self._turns

    def take_number(self) -> int:
        """Return the number of a turn that is asked for now; it isn't given twice, whatever becomes of the turn."""
        self._asked += 1
        return self._asked - 1

    @property
    def next_number(self) -> int:
        """Return what `take_number` will return."""
        return self._asked

    def add(self, number: int, turn: Turn, parent: int | None) -> None:
        """Note a turn with its response; `parent` is the one whose context it continues."""
        assert parent is None or parent in self._turns, f"turn {number} continues turn {parent}, which isn't there"
        self._turns[number], self._parents[number], self.last = turn, parent, number

    def update(self, number: int, turn: Turn) -> None:
        """Replace a turn by one of the same tokens."""
        self._turns[number] = turn

    def tokens(self, number: int | None) -> tuple[int, ...]:
        """Return prompts and responses from where its context begins to the end of a turn; nothing for None."""
        walk = []
        while number is not None:
            walk.append(self._turns[number])
            number = self._parents[number]
        return tuple(
            chain.from_iterable(part for turn in reversed(walk) for part in (turn.prompt_ids, turn.response_ids))
        )

    def pictures(self, number: int | None) -> tuple[Picture, ...]:
        """Return what the tokens up to the end of a turn show, in the order of their places."""
        shown: tuple[Picture, ...] = ()
        at = number
        while at is not None:
            shown, at = (*self._turns[at].pictures, *shown), self._parents[at]
        return shown

    def completion(self, number: int) -> tuple[int, ...]:
        """Return what follows the first prompt of a turn's context, up to the end of the turn."""
        first = number
        while (parent := self._parents[first]) is not None:
            first = parent
        if first == number:
            return tuple(self._turns[number].response_ids)
        return self.tokens(number)[len(self._turns[first].prompt_ids) :]

    def stored(self) -> tuple[Turn, ...]:
        """Return the turns depth first, as `Trajectory` holds them: a turn's continuations in the order of numbers."""
        index_of: dict[int | None, int] = {None: -1}
        stored: list[Turn] = []
        for position, number in enumerate(self._depth_first()):
            turn, parent = self._turns[number], self._parents[number]
            index_of[number] = position
            follows = index_of[parent] == position - 1
            stored.append(
                turn.replace(
                    resets_context=(parent is None and position > 0) or turn.resets_context,
                    after=None if follows or parent is None else index_of[parent],
                )
            )
        return tuple(stored)

    def _depth_first(self) -> Iterator[int]:
        children: dict[int | None, list[int]] = {}
        for number in sorted(self._turns, reverse=True):
            children.setdefault(self._parents[number], []).append(number)
        stack = list(children.get(None, ()))
        while stack:
            number = stack.pop()
            yield number
            stack += children.get(number, ())
