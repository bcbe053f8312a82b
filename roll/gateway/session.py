"""An episode as the one who answers an agent's calls: each response is a turn of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from roll.data.templates import TemplateError
from roll.gateway.base import ChatAnswer, ChatCall, Choice, ContextFull, RefusedCall, Session
from roll.gateway.budget import Budget, Insistence, LastAnswers
from roll.gateway.reading import ResponseReader
from roll.rollout.episode import Episode
from roll.strategies.base import Completion
from roll.types.chat import Message, ToolSpec
from roll.types.trajectory import EpisodeError

POLICY = "policy"
"""Name of the model that learns; `policy/<role>` says who speaks."""

T = TypeVar("T")
_MAX_GRAPHS = 64
_FINAL = ("insufficient_quota", "context_length_exceeded")
_ROLE = re.compile(r"[\w.-]{0,64}")


class GraphPosition(Protocol):
    """The position of a conversation in the graph of an episode (`Placement`)."""

    @property
    def parent(self) -> int | None:
        """Return the number of the turn that it continues; None: it begins a context."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Return tokens after the parent's."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Return all tokens of the prompt."""

    @property
    def change(self) -> str | None:
        """Return how what the client sent back differs from what was sampled, by class."""

    @property
    def retokenised(self) -> Callable[[], bool]:
        """Return, after a while, whether the text of the parent's response has other tokens than were sampled."""


class Graph(Protocol):
    """The conversations of an episode (`MessageGraph`)."""

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, continues: bool = False) -> Any:
        """Return where a conversation stands; with `continues` its last message begins the response. Raises
        `TemplateError`."""

    def grow(self, placement: Any, token_ids: Sequence[int], message: Message, *, number: int | None = None) -> int:
        """Note a response to what was placed, the message that the client is given of it, and its turn's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What an agent may do in an episode."""

    max_calls: int | None = None
    """Of the policy; null: no limit."""
    max_tokens: int | None = None
    """That the policy samples in the episode; null: no limit."""
    names: tuple[str, ...] = ()
    """Of the policy, besides `policy`."""
    any_name: bool = False
    """Whether every other name is the policy too."""
    models: Mapping[str, Session] = field(default_factory=dict)
    """Models that answer instead of the policy and aren't trained, by name."""
    side_models: frozenset[str] = frozenset()
    """Names of the policy in calls beside the task, which are neither trained nor counted."""
    side_prompts: tuple[str, ...] = ()
    """Texts of which one is in the system message of such a call."""


class EpisodeSession(Session):
    """Answers the calls of one episode; see `Session`.

    A call becomes a turn that continues the one whose conversation it continues, or begins a branch. Calls may be under
    way at once.
    """

    def __init__(
        self,
        episode: Episode,
        graph: Graph,
        reading: ResponseReader,
        settings: SessionSettings | None = None,
        *,
        new_graph: Callable[[Mapping[str, Any]], Graph] | None = None,
    ) -> None:
        self._episode = episode
        self._graph = graph
        self._graphs: dict[str, Graph] = {}  # Of calls with template variables of their own: they share no context
        self._new_graph = new_graph
        self._reading = reading
        self._settings = settings or SessionSettings()
        self._budget = Budget(self._settings.max_calls, self._settings.max_tokens)
        self._beside = Budget(self._settings.max_calls, None)  # Of calls beside the task: as many, by themselves
        self._answers = LastAnswers()
        self.insists = Insistence()
        """Whether the agent asks on though there is nothing left."""
        self._num_calls = 0  # Tool calls of all answers: their ids are unique in the episode
        self._unchanged: list[Callable[[], bool]] = []  # `GraphPosition.retokenised` of calls that changed nothing
        self._context_full = ""
        self._orders = itertools.count()  # Of calls
        self._full_at = 0  # The last call that was refused for its context
        self.last_answer: Message | None = None
        """The policy's response that came last."""
        self.roles: set[str] = set()
        """Who spoke."""

    @property
    def calls(self) -> int:
        """Return calls that the policy has answered or is answering; not those that were refused or cancelled."""
        return self._budget.calls

    @property
    def sampled_tokens(self) -> int:
        """Return tokens of the policy's answers."""
        return self._budget.sampled_tokens

    @property
    def spent(self) -> str:
        """Return why a call was refused for its budget, or for its context's length when none that was asked later went
        well; empty: none was."""
        return self._budget.spent or self._context_full

    @property
    def models(self) -> Sequence[str]:
        """See `Session`."""
        return (POLICY, *self._settings.names, *self._settings.models, *sorted(self._settings.side_models))

    @property
    def side_calls(self) -> int:
        """Return answered calls beside the task."""
        return self._beside.calls

    async def complete(self, call: ChatCall) -> ChatAnswer:
        """See `Session`."""
        other = self._settings.models.get(call.model)
        if other is not None:
            return await other.complete(call)
        call = self._reading.with_effort(call)
        beside = self._is_beside(call)
        role = "" if beside else self._role(call.model)
        self._check_sampling(call)
        if (answer := self._answers.lost(call)) is not None:
            return answer
        try:
            answer = await (self._answered_beside(call) if beside else self._answered(call, role))
        except RefusedCall as refused:
            if refused.code in _FINAL and not beside:
                self.insists.refused(refused)
            raise
        self._answers.add(call, answer)
        return answer

    async def _answered(self, call: ChatCall, role: str) -> ChatAnswer:
        placement = self._placed(call)
        order = next(self._orders)
        limit = self._budget.left(call.n, self._episode.params.max_new_tokens)
        if len(placement.context_ids) >= self._episode.max_sequence_length:
            full = ContextFull(len(placement.context_ids), self._episode.max_sequence_length)
            self._context_full, self._full_at = str(full), order
            raise full
        if placement.change is not None:
            self._episode.count(f"agent/mismatch_{placement.change}")
        else:
            self._unchanged.append(placement.retokenised)
        changes = self._reading.changes(call, self._episode.params)
        changes["max_new_tokens"] = min(limit, changes.get("max_new_tokens", limit))
        with self._budget.call(call.n * changes["max_new_tokens"]) as sampled:
            choices = await all_of([self._choice(call, placement, role, changes, sampled) for _ in range(call.n)])
        if order > self._full_at:  # the agent has made room
            self._context_full = ""
            self.insists.made_room()
        return ChatAnswer(choices=tuple(choices), prompt_tokens=len(placement.context_ids))

    def _is_beside(self, call: ChatCall) -> bool:
        """Return whether a call is one beside the task."""
        texts = self._settings.side_prompts
        systems = [message.content for message in call.messages if message.role == "system"] if texts else []
        return call.model in self._settings.side_models or any(text in system for system in systems for text in texts)

    async def _answered_beside(self, call: ChatCall) -> ChatAnswer:
        prompt = self._placed(call).context_ids
        limit = self._beside.left(call.n, self._episode.params.max_new_tokens)
        if len(prompt) >= self._episode.max_sequence_length:
            raise ContextFull(len(prompt), self._episode.max_sequence_length)
        changes = {"max_new_tokens": limit, **self._reading.changes(call, self._episode.params)}

        async def choice() -> Choice:
            return self._read(call, await self._generated(prompt, call, recorded=False, reset_context=True, **changes))

        with self._beside.call(0) as sampled:
            choices = await all_of([choice() for _ in range(call.n)])
            sampled += [len(choice.token_ids) for choice in choices]
        self._episode.count("agent/side_calls")
        return ChatAnswer(choices=tuple(choices), prompt_tokens=len(prompt))

    def count_retokenised(self) -> None:
        """Count the calls that went on from a response whose text has other tokens. At the end of the episode: to
        tokenise every response takes a third of what a call costs otherwise, and no client has to wait for it."""
        if retokenised := sum(ask() for ask in self._unchanged):
            self._episode.count("agent/mismatch_retokenised", retokenised)
        self._unchanged.clear()

    async def count(self, call: ChatCall) -> int:
        """See `Session`."""
        other = self._settings.models.get(call.model)
        if other is not None:
            return await other.count(call)
        return len(self._placed(self._reading.with_effort(call)).context_ids)

    async def _choice(
        self, call: ChatCall, placement: GraphPosition, role: str, changes: Mapping[str, Any], sampled: list[int]
    ) -> Choice:
        completion = await self._generated(
            placement.prompt_ids,
            call,
            reset_context=placement.parent is None,
            after=placement.parent,
            role=role,
            **changes,
        )
        sampled.append(completion.num_tokens)
        number = self._episode.number_of(completion)
        choice = self._read(call, completion)
        self._graph_of(call).grow(placement, completion.token_ids, choice.message, number=number)
        self.last_answer = choice.message
        self.roles.add(role)
        return choice

    async def _generated(self, prompt: Sequence[int], call: ChatCall, **options: Any) -> Completion:
        try:
            return await self._episode.generate(prompt, salt=call.seed, **options)
        except EpisodeError as error:
            raise RefusedCall(409, f"the episode was given up: {error}", code="session_closed") from None

    def _read(self, call: ChatCall, completion: Completion) -> Choice:
        choice = self._reading.choice(call, completion, num_calls=self._num_calls)
        self._num_calls = max((int(made.id[4:]) + 1 for made in choice.message.tool_calls), default=self._num_calls)
        return choice

    def _role(self, model: str) -> str:
        """Return who speaks, by the name of a model."""
        name, _, role = model.partition("/")
        if name == POLICY and _ROLE.fullmatch(role):
            return role
        if model in self._settings.names or self._settings.any_name:
            return ""
        raise RefusedCall(
            404,
            f"there is no model {model[:80]!r}, but {', '.join(self.models)}. Give one of them, or have whoever "
            "runs this endpoint add 'model' to ignore_fields, which makes every other name the policy's",
            "model",
            code="model_not_found",
        )

    def _check_sampling(self, call: ChatCall) -> None:
        """Refuse to sample otherwise than the run does: log-probs would be those of another distribution."""
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            asked, run = getattr(call, name), getattr(self._episode.params, name)
            if name == "top_k" and asked is not None and asked < 1:
                asked = -1
            if asked is not None and asked != run:
                raise RefusedCall(
                    400,
                    f"{name}: got {asked:g}, and this episode is sampled with {run:g}: what is trained must be drawn "
                    f"as the run draws. Leave it out, or have whoever runs it add {name!r} to ignore_fields",
                    name,
                )

    def _graph_of(self, call: ChatCall) -> Graph:
        """Return the conversations that a call may go on from: those with the same template variables."""
        if not call.template_variables:
            return self._graph
        key = json.dumps(call.template_variables, sort_keys=True)
        if key not in self._graphs:
            if self._new_graph is None:
                raise TemplateError("chat_template_kwargs can't be changed here")
            if len(self._graphs) >= _MAX_GRAPHS:
                raise TemplateError(f"chat_template_kwargs: an episode may use {_MAX_GRAPHS} different ones")
            self._graphs[key] = self._new_graph(call.template_variables)
        return self._graphs[key]

    def _placed(self, call: ChatCall) -> Any:
        try:
            graph = self._graph_of(call)
        except TemplateError as error:
            raise RefusedCall(400, str(error), "chat_template_kwargs") from None
        try:
            placement = graph.place(call.messages, call.tools, continues=call.continues)
        except TemplateError as error:
            raise RefusedCall(400, str(error), "messages") from None
        if not placement.context_ids:
            raise RefusedCall(400, "messages: say nothing, so that the prompt has no tokens", "messages")
        return placement


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run at once; when one fails or this is cancelled, all of them end."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
