"""`gymnasium:ID`: environments of gymnasium's interface, with text for observations and actions."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, get_args

from roll.envs.adapters import spaces
from roll.envs.adapters.base import HubEnv, HubError, ended
from roll.envs.adapters.gymnasium_games import GAMES, Game, Success
from roll.envs.adapters.gymnasium_solver import best_walk
from roll.envs.base import InvalidAction, Observation, StepResult
from roll.utils.importing import load_object


class GymnasiumEnv(HubEnv):
    """An environment of gymnasium, told in text.

    gymnasium's own games have boards and names of their own; other observations are shown as their numbers, and the
    actions of a Discrete space are called by theirs. Rewards are the environment's. What the environment truncates
    (`max_episode_steps`) is truncated. Metrics: `success` in the last step.

    Args:
        render: `file.py:function` of the unwrapped environment, an observation and its info, giving the text of a turn;
            for observations that are too large for text, e.g. pictures.
        parse: `file.py:function` of the unwrapped environment and a text, giving an action; it raises `ValueError` for
            a text that is none, with a sentence for the policy.
        actions: names of the actions of a Discrete space.
        instructions: what the policy is told before the game.
        success: what makes the end a success: `reward`, the last reward is positive; `terminated`, it ended by itself;
            `truncated`, it lasted until it was stopped; a number, the return from here on. An `is_success` or `success`
            that the environment puts into its info comes first. null: what fits the game, else `reward`.
        options: arguments of `gymnasium.make`, e.g. `is_slippery`, `max_episode_steps`.
    """

    scheme = "gymnasium"

    def __init__(
        self,
        *,
        render: str | None = None,
        parse: str | None = None,
        actions: Sequence[str] | None = None,
        instructions: str | None = None,
        success: str | float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(success, str) and success not in get_args(Success):
            raise ValueError(f"success: got {success!r}, expected one of {', '.join(get_args(Success))}, or a number")
        self._package = self.load()
        self._env = self.made(**options)
        self._game = self.game()
        self._show = self._shower(render)
        self._parse = None if parse is None else load_object(parse, key="parse", kind="function")
        self.actions = self._names(actions)
        self._read: Callable[[str], Any] | None = None
        if not self.actions and self._parse is None:
            self._read = spaces.reader(self._env.action_space)
            if self._read is None:
                kind = spaces.kind_of(self._env.action_space)
                raise HubError(
                    f"its actions are a {kind} space, of which no text is known; give parse: file.py:function"
                )
        self._success: str | float = self._game.success if success is None else success
        self.instructions = self._about() if instructions is None else instructions
        self._drawn_from: Any = None
        self._return = 0.0
        self._observation: Any = None

    def make(self, *_: Any, **options: Any) -> Any:
        return self._package.make(self.hub_id, **options)

    def game(self) -> Game:
        """Return what is known of the game."""
        spec = self._env.spec
        return GAMES.get(spec.name if spec is not None and not spec.namespace else "", Game(about=""))

    def begin(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._env.action_space.seed(seed)
        observation, info = self._env.reset(seed=seed, options=dict(options) or None)
        self._return = 0.0
        return self._observe(observation, info)

    def act(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = self._env.step(self._action(action))
        reward = float(reward)
        self._return += reward
        shown = self._observe(observation, info)
        if terminated or truncated:
            success = self._succeeded(reward, bool(terminated), info)
            return ended(reward, success=success, terminated=bool(terminated))
        return StepResult(reward=reward, terminated=False, observation=shown)

    def state(self, text: str) -> str:
        """Return the name of the state in which the text is shown."""
        return text

    def solution(self, max_actions: int) -> Sequence[str] | None:
        """Return the best way from here by the table of all transitions, where the game has one (gymnasium's toy
        games)."""
        env = self._env.unwrapped
        table = getattr(env, "P", None)
        if not isinstance(table, Mapping) or not self.actions or not isinstance(getattr(env, "s", None), Integral):
            return None
        with self._random.lent():
            return best_walk(self._env, table, self.actions, max_actions, self._succeeded)

    def sample_action(self, rng: random.Random) -> str | None:
        if self._read is None:
            return None
        if self._drawn_from is None:
            self._drawn_from = copy.deepcopy(self._env.action_space)  # whose own numbers the episode may need
        return spaces.drawn(self._drawn_from, rng)

    def render(self) -> Any:
        return self._env.render() if self._env.render_mode in ("rgb_array", "ansi") else None

    def close(self) -> None:
        self._env.close()

    def _action(self, text: str) -> Any:
        if self._parse is not None:
            try:
                return self._parse(self._env.unwrapped, text)
            except ValueError as error:
                raise InvalidAction(str(error)) from None
        if self._read is not None:
            return self._read(text)
        if text not in self.actions:
            raise InvalidAction(f"got {text[:60]!r}, expected one of {', '.join(self.actions)}")
        return self.actions.index(text) + int(self._env.action_space.start)

    def _observe(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        text = self._show(observation, info)
        if not isinstance(text, str):
            raise TypeError(f"render: gave {text!r:.80}, expected text")
        return Observation.of(text, self.state(text))

    def _shower(self, render: str | None) -> Callable[[Any, Mapping[str, Any]], str]:
        env, game, space = self._env.unwrapped, self._game, self._env.observation_space
        if render is not None:
            function = load_object(render, key="render", kind="function")
            return lambda observation, info: function(env, observation, info)
        if (show := game.show) is not None:
            return lambda observation, _: show(env, observation)
        if why := spaces.unreadable(space):
            raise HubError(f"its observation is {why}; give render: file.py:function, which makes a text of it")
        return lambda observation, _: spaces.as_text(space, observation, game.numbers)

    def _names(self, actions: Sequence[str] | None) -> tuple[str, ...]:
        space = self._env.action_space
        if spaces.kind_of(space) != "Discrete":
            if actions is not None:
                raise ValueError("actions: only those of a Discrete space have names; leave it out")
            return ()
        if self._parse is not None:
            return ()
        count = int(space.n)
        names = tuple(actions) if actions is not None else self._game.actions
        if actions is not None and (len(names) != count or len(set(map(str.casefold, names))) != count):
            raise ValueError(f"actions: got {list(names)}, expected {count} different names, one for each action")
        first = int(space.start)
        return names if len(names) == count else tuple(str(first + i) for i in range(count))

    def _about(self) -> str:
        about = self._game.about
        if self._read is not None:
            how = spaces.how_to_act(self._env.action_space)
        else:
            how = f"Actions: {', '.join(self.actions)}." if self.actions else ""
        return "\n".join(part for part in (about, how) if part)

    def _succeeded(self, reward: float, terminated: bool, info: Mapping[str, Any], gained: float | None = None) -> bool:
        for name in ("is_success", "success"):
            if name in info:
                return bool(info[name])
        if not isinstance(self._success, str):
            return math.fsum((self._return,) if gained is None else (gained,)) >= self._success
        if self._success == "reward":
            return reward > 0
        return terminated == (self._success == "terminated")
