"""Episodes of several roles: what each is paid, and roles that a frozen model behind a chat service plays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from roll.configs.schema.env_config import RoleConfig
from roll.envs.base import Message, StepResult
from roll.types.trajectory import EpisodeError
from roll.utils.json_service import Endpoint, EndpointFailed, endpoint_url, service_key

SEPARATE = "separate"


class PaidEpisode(Protocol):
    """What the ledger needs of an `Episode`."""

    def pay(self, turn: int, reward: float, metrics: Mapping[str, float]) -> None:
        """Add to a turn's reward and metrics."""

    def finish(self, reward: float, *, role_rewards: Mapping[str, float]) -> None:
        """Score the episode."""


class RoleLedger:
    """Pays the policy's roles: what a step is worth to a role joins the role's last turn, whoever acted.

    `separate`: a role gets the step's `reward` and its own of `role_rewards`, and so does `Trajectory.role_rewards`;
    the episode's reward is the mean over roles. `shared`: the step's reward and the sum of `role_rewards` of the
    policy's roles, once, to the turn that acted last; there are no `role_rewards`.

    Args:
        trained: the roles that the policy plays.
    """

    def __init__(self, episode: PaidEpisode, trained: Sequence[str], role_rewards: str) -> None:
        self._episode = episode
        self._separate = role_rewards == SEPARATE
        self._totals = dict.fromkeys(trained, 0.0)
        self._early = dict.fromkeys(trained, 0.0)  # Paid before the role's first turn
        self._turns: dict[str, int] = {}  # The last one of each role, by its number
        self._latest: str | None = None  # Role of the policy that acted last
        if self._separate:
            self._score()

    def settle(self, role: str, turn: int | None, result: StepResult) -> None:
        """Note a step of `role`; `turn` is the number of the policy's turn, which has been paid `result.reward`."""
        if turn is not None:
            self._turns[role], self._latest = turn, role
        if self._separate:
            for name in self._totals:
                amount = result.reward + result.role_rewards.get(name, 0.0)
                self._totals[name] += amount
                self._pay(name, amount - (result.reward if turn is not None and name == role else 0.0))
            self._score()
        else:
            own = sum(result.role_rewards.get(name, 0.0) for name in self._totals)
            self._pay(self._latest or next(iter(self._totals)), own + (result.reward if turn is None else 0.0))
        for name, last in self._turns.items():
            if (success := result.metrics.get(f"success/{name}")) is not None:
                self._episode.pay(last, 0.0, {"success": success})

    def _pay(self, role: str, amount: float) -> None:
        if role not in self._turns:
            self._early[role] += amount
            return
        amount, self._early[role] = amount + self._early[role], 0.0
        if amount:
            self._episode.pay(self._turns[role], amount, {})

    def _score(self) -> None:
        """Pay the turns the sum over roles, but for those that haven't acted yet."""
        paid = sum(self._totals.values()) - sum(self._early.values())
        mean = fmean(self._totals.values()) if self._totals else 0.0
        self._episode.finish(mean - paid, role_rewards=self._totals)


class ChatService:
    """A frozen model behind an OpenAI-compatible service.

    Raises:
        ValueError: the key's variable isn't set, or nothing listens at the address.
    """

    def __init__(self, path: str, role: RoleConfig, environ: Mapping[str, str] = os.environ) -> None:
        """Read a role; `path`: of its section, for messages."""
        assert role.endpoint is not None, "rules refuse an endpoint without an address"
        key = service_key(path, role.endpoint, role.api_key_env, environ)
        self._role, self._key = role, key
        self._who = f"{role.model} at {role.endpoint} ({path})"

    async def respond(self, messages: Sequence[Message], *, max_tokens: int, seed: int) -> str:
        """Return the text of a response; raises `EpisodeError`."""
        role = self._role
        assert role.endpoint is not None
        body: dict[str, Any] = {
            "model": role.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": max_tokens,
            "seed": seed,
            **role.request_args,
        }
        endpoint = Endpoint(
            endpoint_url(role.endpoint, "/chat/completions"),
            who=self._who,
            key=self._key,
            timeout=role.request_timeout_s,
            retries=role.request_retries,
            delay=1.0,
            connections=1,
        )
        try:
            reply = await endpoint.ask({name: value for name, value in body.items() if value is not None})
        except EndpointFailed as error:
            raise EpisodeError("env_error", str(error)) from None
        finally:
            await endpoint.close()
        match reply:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                return text
        raise EpisodeError("env_error", endpoint.clean(f"{self._who} gave no message with text: {reply!r:.300}"))
