"""`openenv:URL`: an environment that an OpenEnv server plays."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from roll.envs.adapters.base import HubEnv, HubError, ended
from roll.envs.adapters.openenv_client import HttpSession, OpenEnvError, OpenEnvSession, WebSocketSession, fetched
from roll.envs.base import InvalidAction, Observation, StepResult
from roll.utils.importing import load_object

_REFUSED = ("VALIDATION_ERROR", "422")  # Codes of an action that doesn't fit the server's schema: nothing was done


class OpenEnvEnv(HubEnv):
    """An environment at an OpenEnv server.

    The text of an action becomes the one text field of the server's action; where it has several fields, the text is a
    JSON object of them. What an observation says is shown: its text if it has one field, else a line for each. Metrics:
    `success` in the last step.

    Args:
        transport: `websocket`: each episode is a session of its own. `http`: for servers without sessions, which play
            one episode at a time; with `env_workers: {world_size: 1, max_env_num_per_worker: 1}`.
        action_field: the field of the action that the text becomes. null: see above.
        parse: `file.py:function` of a text, giving the fields of an action; it raises `ValueError` for a text that is
            none, with a sentence for the policy.
        render: `file.py:function` of an observation's fields, giving the text of a turn.
        success_from: a sum of the episode's rewards from here on is a success.
        instructions: what the policy is told before the episode.
        timeout_s: seconds for an answer; below `env_workers.timeout_s`.
        token_env: name of the environment variable with a bearer token.
        options: further arguments of the server's reset.
    """

    scheme = "openenv"
    known_field: ClassVar[str | None] = None
    """The action's one text field, of a server that was asked for its schema."""
    was_asked: ClassVar[bool] = False

    def __init__(
        self,
        *,
        transport: Literal["websocket", "http"] = "websocket",
        action_field: str | None = None,
        parse: str | None = None,
        render: str | None = None,
        success_from: float = 1.0,
        instructions: str = "",
        timeout_s: float = 30.0,
        token_env: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not re.match(r"https?://[^/]", self.hub_id):
            raise HubError(f"{self.hub_id!r} isn't the address of a server; write openenv:http://host:port")
        if transport not in ("websocket", "http"):
            raise ValueError(f"transport: got {transport!r}, expected websocket or http")
        if reserved := sorted({"seed", "episode_id"} & options.keys()):
            raise ValueError(f"{reserved[0]}: each episode has its own; leave it out")
        self.load()
        self._base, self._timeout_s = self.hub_id.rstrip("/"), timeout_s
        self._open = WebSocketSession if transport == "websocket" else HttpSession
        self._headers = _authorization(token_env)
        self._parse = None if parse is None else load_object(parse, key="parse", kind="function")
        self._show = None if render is None else load_object(render, key="render", kind="function")
        self._field = action_field if action_field is not None or parse is not None else self._asked_field()
        self._success_from, self._options, self.instructions = success_from, options, instructions
        self._session: OpenEnvSession | None = None
        self._return = 0.0

    def begin(self, seed: int, options: Mapping[str, Any]) -> Observation:
        if self._session is None:
            self._session = self._open(self._base, self._headers, self._timeout_s)
        answer = self._session.reset({**self._options, **options, "seed": seed})
        self._return = 0.0
        observation, _, done = self._read(answer)
        if done:
            raise OpenEnvError(f"{self._base}: the episode is over at its reset (seed {seed})")
        return observation

    def act(self, action: str) -> StepResult:
        assert self._session is not None, "reset comes first"
        try:
            answer = self._session.step(self._action(action))
        except OpenEnvError as error:
            if error.code in _REFUSED:
                raise InvalidAction(f"the action doesn't fit: {error}") from None
            raise
        observation, reward, done = self._read(answer)
        self._return += reward
        if done:
            return ended(reward, success=self._return >= self._success_from)
        return StepResult(reward=reward, terminated=False, observation=observation)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _asked_field(self) -> str | None:
        """Return the one text field of the server's actions, asked for once per address and process."""
        cls = type(self)  # one for each address
        if not cls.was_asked:
            try:
                schema = fetched(f"{self._base}/schema", self._headers, self._timeout_s)
            except OpenEnvError as error:
                if error.code != "404":  # servers of before the schema's time
                    raise HubError(str(error)) from None
                schema = None
            cls.known_field, cls.was_asked = _text_field(schema), True
        return cls.known_field

    def _action(self, text: str) -> Mapping[str, Any]:
        if self._field is not None:
            return {self._field: text}
        try:
            fields = json.loads(text) if self._parse is None else self._parse(text)
        except (ValueError, RecursionError) as error:
            why = (
                str(error) if self._parse is not None else f"expected a JSON object with the action's fields ({error})"
            )
            raise InvalidAction(f"got {text[:60]!r}: {why}") from None
        if not isinstance(fields, dict):
            raise InvalidAction(f"got {text[:60]!r}, expected a JSON object with the action's fields")
        return fields

    def _read(self, answer: Any) -> tuple[Observation, float, bool]:
        match answer:
            case {"observation": dict(fields)}:
                reward, done = answer.get("reward"), answer.get("done", False)
            case _:
                raise OpenEnvError(
                    f"{self._base} answered {str(answer)[:200]!r}, expected observation, reward and done"
                )
        text = _as_text(fields) if self._show is None else self._show(fields)
        if not isinstance(text, str):
            raise TypeError(f"render: gave {text!r:.80}, expected text")
        if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
            raise OpenEnvError(f"{self._base} answered with reward {reward!r:.80}, expected a finite number as reward")
        if done is not None and not isinstance(done, bool):
            raise OpenEnvError(f"{self._base} answered with done {done!r:.80}, expected true or false")
        return Observation.of(text), float(reward or 0.0), bool(done)


def _authorization(token_env: str | None) -> dict[str, str]:
    if token_env is None:
        return {}
    if token_env not in os.environ:
        raise HubError(f"token_env: there is no environment variable {token_env}; set it, or leave token_env out")
    return {"Authorization": f"Bearer {os.environ[token_env]}"}


def _text_field(schema: Any) -> str | None:
    """Return the name of the only field besides `metadata`, if it is a text; of several, the only one that is
    required."""
    match schema:
        case {"action": {"properties": dict(properties), **rest}}:
            named = [name for name in properties if name != "metadata"]
            required = rest.get("required")
            if len(named) > 1 and isinstance(required, list):
                named = [name for name in named if name in required]
            if (
                len(named) == 1
                and isinstance(properties[named[0]], dict)
                and properties[named[0]].get("type") == "string"
            ):
                return str(named[0])
    return None


def _as_text(fields: Mapping[str, Any]) -> str:
    """Return an observation's fields as text, without those of the protocol."""
    shown = {
        name: value
        for name, value in fields.items()
        if name not in ("done", "reward", "metadata") and value not in (None, "", [], {})
    }
    if len(shown) == 1:
        (value,) = shown.values()
        return _plain(value)
    return "\n".join(f"{name}: {_plain(value)}" for name, value in shown.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
