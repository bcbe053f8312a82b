"""`textarena:ID`: the games of TextArena, for one player or for several, who are roles.

TextArena (https://pypi.org/project/textarena/) keeps what a player was told as a list of messages and hands on those
that are new.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from roll.envs.adapters.base import HubEnv, HubError, ended
from roll.envs.base import InvalidAction, Observation, StepResult
from roll.utils.importing import load_object

_EXAMPLE = re.compile(r"\[[\w ,.+-]{1,30}\]")
_DIGIT = re.compile(r"\d")
_MAX_DIGITS = 1000
_TOO_MANY_DIGITS = re.compile(rf"\d{{{_MAX_DIGITS + 1}}}")
GAME = -1  # TextArena's id of the game itself, as the sender of a message


class TextArenaGame:
    """One game of TextArena, of any number of players: whose turn it is, what they are told, how it ended."""

    def __init__(self, game: Any, players: int, seed: int) -> None:
        """Begin it. `game`: what `textarena.make` gave, not played before."""
        self._game = game
        self.inner = _unobserved(game)
        """The game's own class, without wrappers."""
        self._last_actions: dict[int, str] = {}
        game.reset(num_players=players, seed=seed)

    @property
    def player(self) -> int:
        """Whose turn it is, from 0."""
        return int(self._game.state.current_player_id)

    def news(self) -> str:
        """Return what the player whose turn it is hasn't been told yet; their own actions aren't repeated."""
        player, messages = self.inner.get_observation()
        names = self._game.state.role_mapping
        lines = []
        for sender, text, *kind in messages:
            # Some games send a player's action in their own name.
            own = sender == player or (sender == GAME and self._last_actions.get(player, "") in (text, text[1:-1]))
            if own and kind and kind[0].name == "PLAYER_ACTION":
                continue
            lines.append(text if sender == GAME else f"[{names.get(sender, f'Player {sender}')}] {text}")
        return "\n".join(line.strip("\n") for line in lines).strip() or "(nothing new)"

    def view(self) -> str:
        """Return what the wrappers of the id show the player whose turn it is: the prompt and what came since, or a
        board."""
        return str(self._game.get_observation()[1]).strip()

    def step(self, action: str) -> bool:
        """Do an action of the player whose turn it is; whether the game is over."""
        self._last_actions[self.player] = action
        return bool(self._game.step(action)[0])

    def outcome(self) -> tuple[dict[int, float], dict[int, Mapping[str, Any]]]:
        """Rewards and details by player, after the end. Some games put the reason of a forbidden move in the place of
        the reward: it is 0 then."""
        rewards, details = self._game.close()
        paid = {int(player): value for player, value in (rewards or {}).items()}
        numbers = {player: float(value) if isinstance(value, (int, float)) else 0.0 for player, value in paid.items()}
        return numbers, dict(details or {})


class TextArenaEnv(HubEnv):
    """A game of TextArena.

    Any text is an action; the game finds the move in it (mostly in square brackets, which are added to a text without
    any). The reward comes with the last step and is the game's own: 1 for a game won, less or nothing for one that
    isn't. A move that the rules forbid is answered by the game, which ends it the second time in a row. Metrics:
    `success`, `invalid_end` (it was ended for a forbidden move).

    With several players the roles are `player_0`, `player_1`, ..., each is paid what the game gives it, and it is
    `success/<role>` and `invalid_end` (somebody's forbidden move ended it).

    Args:
        players: who play it; 2 or more make it an environment of several roles.
        view: what a turn shows. `new`: the messages since the last one. `wrapped`: what the id's own observation
            wrappers show, which repeat the prompt; with `history_length: 0`.
        render: `file.py:function` of the unwrapped game and that text, giving the text of a turn instead.
        success_from: rewards from here on are games won.
        options: arguments of the game, e.g. `max_number`.
    """

    scheme = "textarena"
    reads_responses = True
    started_for: ClassVar[frozenset[int]] = frozenset()
    """Numbers of players that the game was seen to begin with."""

    def __init__(
        self,
        *,
        players: int = 1,
        view: Literal["new", "wrapped"] = "new",
        render: str | None = None,
        success_from: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if view not in ("new", "wrapped"):
            raise ValueError(f"view: got {view!r}, expected new or wrapped")
        if not isinstance(players, int) or players < 1:
            raise ValueError(f"players: got {players!r}, expected a whole number of at least 1")
        self._players = players
        self.roles = tuple(f"player_{number}" for number in range(players)) if players > 1 else ()
        self._view, self._success_from, self._options = view, success_from, options
        self._show = None if render is None else load_object(render, key="render", kind="function")
        self._package = self.load()
        self._fresh: Any = self._made()
        self._game: TextArenaGame | None = None
        self._examples: list[str] = []
        if players not in self.__class__.started_for:  # a class for each id: it is found out once
            with self._random.lent():
                self._started(0)
            self.__class__.started_for |= {players}

    def begin(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.no_options(options)
        self._game = self._started(seed)
        observation = self._observe(self._game)
        self._examples = sorted(set(_EXAMPLE.findall(observation.text)))
        return observation

    def sample_action(self, rng: random.Random) -> str | None:
        """Draw a move as the rules write it: what stands in square brackets there, with other digits perhaps."""
        if self.actions or not self._examples:
            return None

        def other(digit: re.Match[str]) -> str:
            return digit[0] if rng.random() < 0.5 else str(rng.randrange(10))

        return _DIGIT.sub(other, rng.choice(self._examples))

    def act(self, action: str) -> StepResult:
        assert self._game is not None, "reset comes first"
        if _TOO_MANY_DIGITS.search(action):  # games make a number of them, which Python refuses
            raise InvalidAction(f"got a number of more than {_MAX_DIGITS} digits")
        if not self._game.step(action):
            return StepResult(reward=0.0, terminated=False, observation=self._observe(self._game))
        rewards, details = self._game.outcome()
        metrics = {"invalid_end": float(any(detail.get("invalid_move") for detail in details.values()))}
        if not self.roles:
            reward = rewards.get(0, 0.0)
            return ended(reward, success=reward >= self._success_from, metrics=metrics)
        paid = {role: rewards.get(number, 0.0) for number, role in enumerate(self.roles)}
        metrics |= {f"success/{role}": float(reward >= self._success_from) for role, reward in paid.items()}
        return StepResult(reward=0.0, terminated=True, role_rewards=paid, metrics=metrics)

    def make(self, *_: Any, **options: Any) -> Any:
        return self._package.make(self.hub_id, **options)

    def _started(self, seed: int) -> TextArenaGame:
        game, self._fresh = self._fresh or self._made(), None  # some wrappers remember what was played before
        try:
            return TextArenaGame(game, self._players, seed)
        except AssertionError as error:
            number = "one player" if self._players == 1 else f"{self._players} players"
            raise HubError(
                f"it isn't for {number}: {error}; set env_config.players to as many as it is for "
                "(docs/environment_hubs.md, docs/multi_agent.md)"
            ) from None

    def _made(self) -> Any:
        return self.made(known=self._package.envs.registration.ENV_REGISTRY, **self._options)

    def _observe(self, game: TextArenaGame) -> Observation:
        role = self.roles[game.player] if self.roles else ""
        text = game.news() if self._view == "new" else game.view()
        if self._show is not None:
            text = self._show(game.inner, text)
            if not isinstance(text, str):
                raise TypeError(f"render: gave {text!r:.80}, expected text")
        return Observation.of(text, role=role)


def _unobserved(game: Any) -> Any:
    """Return the game without the wrappers that keep what it showed."""
    while hasattr(game, "env"):
        game = game.env
    return game
