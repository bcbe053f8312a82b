"""What runs in the process of `remote_env.py`: environments by number, and a method of one for each request."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from roll.envs.base import Env, InvalidAction, ResetNeeded
from roll.envs.env_messages import pack_observation, pack_step
from roll.envs.env_registry import EnvLoadError, bare_env
from roll.envs.wrappers import checked_observation, checked_result
from roll.isolation.processes.child import short_traceback


class BareHandler:
    """Answers with `ok` and plain values, or with what went wrong: `unmade`, `invalid`, `over`, `error`, and a text."""

    def __init__(self, _: None) -> None:
        self._envs: dict[int, Env] = {}

    def answer(self, request: tuple[Any, ...], _: Callable[[], None]) -> tuple[Any, ...]:
        """Return what the method gave."""
        try:
            return ("ok", *self._do(*request))
        except InvalidAction as error:
            return "invalid", str(error)
        except ResetNeeded as error:
            return "over", str(error)
        except EnvLoadError as error:
            return "unmade", str(error)
        except BaseException as error:  # noqa: BLE001 - the boundary: the parent raises it with this text
            return "error", f"{type(error).__name__}: {error}\n{short_traceback(skip=2)}"

    def _do(self, kind: str, number: int, *arguments: Any) -> tuple[Any, ...]:
        if kind == "make":
            made = self._envs[number] = bare_env(pickle.loads(arguments[0]))
            return made.instructions, list(made.actions), list(made.roles), made.reads_responses
        if kind == "close":
            if number in self._envs:
                self._envs.pop(number).close()
            return ()
        if number not in self._envs:
            raise RuntimeError("the environment is gone: its process ended, and another was started")
        env = self._envs[number]
        match kind:
            case "reset":
                seed, options = arguments
                observation = checked_observation(env, "reset", env.reset(seed, pickle.loads(options)))
                return pack_observation(observation), env.instructions
            case "step":
                return (pack_step(checked_result(env, env.step(arguments[0]))),)
            case "solution":
                actions = env.solution(arguments[0])
                return (None if actions is None else [str(action) for action in actions],)
            case "render":
                return _drawn(env.render())
        raise AssertionError(kind)


def _drawn(picture: Any) -> tuple[Any, ...]:
    if picture is None:
        return ("nothing",)
    if isinstance(picture, str):
        return "text", picture
    return "picture", [int(length) for length in picture.shape], picture.tobytes()
