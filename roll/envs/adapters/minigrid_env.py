"""`minigrid:ID`: the grid worlds of MiniGrid and BabyAI as text, one sign for a cell."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll.envs.adapters.gymnasium_env import GymnasiumEnv
from roll.envs.adapters.gymnasium_games import Game

_PLAIN = {"wall": "#", "empty": ".", "floor": ".", "goal": "G", "lava": "~", "unseen": "?"}
_FIXED = ("wall", "floor", "goal", "lava")
_COLOURED = {"key": "K", "ball": "B", "box": "X"}
_COLOURS = {"red": "r", "green": "g", "blue": "b", "purple": "p", "yellow": "y", "grey": "e"}
_AGENT = (">", "v", "<", "^")  # By MiniGrid's numbers of directions
_UP = 3  # In its own view the agent looks up
_USEFUL = (0, 1, 2, 3, 5)  # Left, Right, Forward, Pickup, Toggle: what a way to the goal is made of
_MAX_STATES = 4000

_GAME = Game(
    about="You are in a grid world, and reach what the mission says.\n"
    "Signs: # wall, . floor, G goal, ~ lava, ? not seen, K key, B ball, X box, D closed door, L locked door, O open "
    "door; the small letter is a colour: r red, g green, b blue, p purple, y yellow, e grey. You are the arrow and "
    "look where it points.\n"
    "Left and Right turn you. Forward walks. Pickup takes what is in front of you, Drop puts it down, Toggle opens and "
    "closes doors and boxes; a locked door needs the key of its colour.",
    actions=("Left", "Right", "Forward", "Pickup", "Drop", "Toggle", "Done"),
)


class MiniGridEnv(GymnasiumEnv):
    """A grid world of MiniGrid or BabyAI.

    Rewards are MiniGrid's: 1 - 0.9 * steps / max_steps for the mission, else 0. Metrics: `success`.

    Args:
        view: `agent`: the part of the grid that the agent sees, which is what MiniGrid observes; `full`: all of it.
        actions: names of the 7 actions.
        options: arguments of the environment, e.g. `max_steps`, `agent_view_size`.
    """

    scheme = "minigrid"

    def __init__(
        self,
        *,
        view: Literal["agent", "full"] = "agent",
        actions: Sequence[str] | None = None,
        instructions: str | None = None,
        **options: Any,
    ) -> None:
        if view not in ("agent", "full"):
            raise ValueError(f"view: got {view!r}, expected agent or full")
        self._view = view
        super().__init__(actions=actions, instructions=instructions, **options)

    def make(self, *_: Any, **options: Any) -> Any:
        import gymnasium

        # MiniGrid's own limit, max_steps, ends every environment; the checker only knows spaces that we don't show.
        return gymnasium.make(self.hub_id, disable_env_checker=True, **options)

    def game(self) -> Game:
        # Some have the first three actions only.
        return Game(about=_GAME.about, actions=_GAME.actions[: int(self._env.action_space.n)], show=self._as_text)

    def state(self, text: str) -> str:
        """Return all of the grid, also where the agent sees part of it."""
        env = self._env.unwrapped
        return f"{env.hash(32)} {_cell(env.carrying)} {env.mission}" if self._view == "agent" else text

    def solution(self, max_actions: int) -> Sequence[str] | None:
        """Return the shortest way to a reward, found by trying; None where the search would be too large.

        It turns, walks, picks up and toggles. Missions that need something to be put down aren't found.
        """
        useful = [action for action in _USEFUL if action < len(self.actions)]
        visited = {self._key(self._env.unwrapped)}
        queue: deque[tuple[Any, tuple[str, ...]]] = deque([(self._env.unwrapped, ())])
        while queue and len(visited) < _MAX_STATES:
            env, walk = queue.popleft()
            if len(walk) >= max_actions:
                return None
            for action in useful:
                after = _copied(env)
                _, reward, terminated, truncated, _ = after.step(action)
                if reward > 0:
                    return [*walk, self.actions[action]]
                if terminated or truncated or (key := self._key(after)) in visited:
                    continue
                visited.add(key)
                queue.append((after, (*walk, self.actions[action])))
        return None

    def _key(self, env: Any) -> tuple[Any, ...]:
        return env.grid.encode().tobytes(), tuple(map(int, env.agent_pos)), int(env.agent_dir), _cell(env.carrying)

    def _as_text(self, env: Any, _: Mapping[str, Any]) -> str:
        if self._view == "full":
            grid, visible, at, facing = env.grid, None, tuple(map(int, env.agent_pos)), int(env.agent_dir)
        else:
            grid, visible = env.gen_obs_grid()
            at, facing = (grid.width // 2, grid.height - 1), _UP
        rows = [
            [
                _AGENT[facing]
                if (x, y) == at
                else _cell(grid.get(x, y), visible=visible is None or bool(visible[x, y]))
                for x in range(grid.width)
            ]
            for y in range(grid.height)
        ]
        carried = f"{env.carrying.color} {env.carrying.type}" if env.carrying is not None else "nothing"
        board = "\n".join(" ".join(cell.ljust(2) for cell in row).rstrip() for row in rows)
        return f"Mission: {env.mission}\nYou carry: {carried}\n{board}"


def _copied(env: Any) -> Any:
    """Return a copy that can be stepped. It shares what never changes, and windows, which can't be copied."""
    fixed = [cell for cell in env.grid.grid if cell is not None and cell.type in _FIXED]
    shared = [*fixed, env.window, env.clock, env.observation_space, env.action_space, env.spec]
    return copy.deepcopy(env, {id(part): part for part in shared if part is not None})


def _cell(thing: Any, *, visible: bool = True) -> str:
    """Return the sign of what is in a cell: one letter, and one for its colour."""
    if thing is None or not visible:
        return _PLAIN["empty" if visible else "unseen"]
    if thing.type == "door":
        return ("O" if thing.is_open else "L" if thing.is_locked else "D") + _COLOURS[thing.color]
    if thing.type in _COLOURED:
        return _COLOURED[thing.type] + _COLOURS[thing.color]
    return _PLAIN.get(thing.type, thing.type)
