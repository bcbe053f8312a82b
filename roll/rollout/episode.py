"""An episode under way: prompts and responses of the policy, answers of the environment, the score."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from roll.envs.base import Observation, StepResult
from roll.rollout.agent import Agent
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_key import Action, EpisodeEnv, EpisodeKey, add_up, numbers_of, state_of
from roll.rollout.fire import sampled
from roll.rollout.routed import routed_before
from roll.rollout.turn_tree import TurnTree
from roll.strategies.base import Completion, Request, SamplingParams
from roll.tracking import spans
from roll.types.trajectory import EpisodeError, Status, Task, Trajectory, Turn

if TYPE_CHECKING:
    from roll.types.picture import Picture

_BESIDE = 1 << 20
"""Numbers of responses that are no turns, beyond those of turns."""


class Rollout(Protocol):
    """How episodes of a task are played. A class of the user's can take the place of `AgentRollout` for a domain."""

    async def play(self, episode: Episode) -> None:
        """Play one episode by `episode.generate` and `episode.step_env`; concurrent calls share the object."""


class Episode:
    """One episode under way. Tokens are carried: each turn adds to the context of another, or begins one.

    `task` and `params` say what is played and how tokens are drawn, `max_sequence_length` is the length of a context.
    Several calls of `generate` may be under way at once; the turns that they become are a tree (`turn_tree.py`).
    """

    def __init__(
        self,
        engines: EngineDriver,
        agent: Agent,
        env: EpisodeEnv,
        task: Task,
        key: EpisodeKey,
        params: SamplingParams,
        max_sequence_length: int,
    ) -> None:
        self.task = task
        self.params = params
        self._engines = engines
        self._agent = agent
        self._env = env
        self._key = key
        self._name = key.name(task)
        self.max_sequence_length = max_sequence_length
        self._turns = TurnTree()
        self._first_prompt: tuple[tuple[int, ...], tuple[Picture, ...]] = ((), ())  # And what it shows
        self._numbers: dict[str, int] = {}  # Of turns, by the ids of their completions
        self._beside = itertools.count()  # Of responses that are no turns
        self._under_way = 0  # Calls of `generate`
        self._over = False
        self._state = ""
        self._unanswered: int | None = None  # Turn of the last response, until the environment was asked
        self._score = 0.0  # Beyond what its turns were paid
        self._score_parts: dict[str, float] = {}
        self._role_rewards: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._parts: dict[str, float] = {}
        self._spans: dict[str, float] = {}
        self._status: Status = "ok"
        self._error = ""
        self._truncated = False
        self._answer: str | None = None
        self._success: float | None = None
        self._explanations: list[str] = []
        self.scored = False  # By the environment or by `finish`
        self.trace = ""  # Its name in a recording; empty: there is none

    @property
    def name(self) -> str:
        """Return a name that is unique within the run."""
        return self._name

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return prompts and responses from where the context begins to the response that came last."""
        return self.tokens_of(self._turns.last)

    def tokens_of(self, turn: int | None) -> tuple[int, ...]:
        """Return prompts and responses up to the end of a turn, by its number; nothing for None."""
        return self._turns.tokens(turn)

    def number_of(self, completion: Completion) -> int:
        """Return the number of a response's turn, for `generate(after=...)`."""
        return self._numbers[completion.id]

    @property
    def room(self) -> int:
        """Return tokens that the context can still take."""
        return self.max_sequence_length - len(self.tokens)

    async def reset(self) -> Observation:
        """Begin; what the environment shows first."""
        self._engines.mark_busy(self._name, f"reset of {self._env.waits_for}")
        with spans.span("reset"):
            observation = await self._env.reset(self.task)
        self._state = state_of(observation)
        return observation

    async def first_prompt(self) -> tuple[int, ...]:
        """Begin; token ids of the task's prompt. Raises `PromptTooLong`, which ends the episode."""
        prompt = self._agent.start(self.task, await self.reset())
        self._first_prompt = (prompt, self.task.pictures)
        return prompt

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that is put between responses, as it stands: no chat template."""
        return self._agent.encode(text)

    def text(self, completion: Completion) -> str:
        """Return what a response says."""
        return self._agent.decode_response(completion.token_ids, self.params.stop_strings)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        reset_context: bool = False,
        after: int | None = None,
        role: str = "",
        salt: int | None = None,
        patient: bool = False,
        recorded: bool = True,
        **changes: Any,
    ) -> Completion:
        """Return one response to a context plus `prompt_ids`, which may be empty.

        Turns have numbers, from 0, in the order of the calls; they are the keys of the randomness. A call that is
        cancelled stops its request and leaves no turn, or came too late and leaves a whole one.

        Args:
            prompt_ids: tokens to add first; the policy isn't trained on them.
            reset_context: begin a context: of everything so far nothing is shown.
            after: number of the turn whose context this one continues; None: the one whose response came last.
                Continuing one that others have continued makes a branch.
            role: who speaks, in an episode of several agents.
            salt: mixed into the key of the response's randomness, where whoever asks has a seed of his own.
            patient: nobody waits for this response but the batch; see `Request.patient`.
            recorded: false: the response is no turn of the episode, and not trained. Turns keep their numbers.
            changes: fields of `SamplingParams` that differ from the run's, e.g. `max_new_tokens=32`.

        Raises:
            EpisodeError: there is no room to respond, the scheduler has stopped the episode, or it is over.
            ValueError: there is no such turn, or none yet while several calls are under way.
        """
        parent, prompt = self._parent(reset_context, after), tuple(prompt_ids)
        pictures = self._pictures(prompt)
        context = (*self._turns.tokens(parent), *prompt)
        room = self.max_sequence_length - len(context)
        if room < 1:
            what = f"turn {self._turns.next_number} has {len(context)} tokens of context and no room to respond"
            raise EpisodeError("truncated", f"{what}: sequence_length is {self.max_sequence_length}")
        if self._over:
            raise EpisodeError("aborted", f"episode {self._name} is over")
        number = self._turns.take_number() if recorded else _BESIDE + next(self._beside)
        params = replace(self.params, **changes) if changes else self.params
        request = Request(
            id=f"{self._name}/{number}",
            prompt_ids=context,
            params=params if params.max_new_tokens <= room else replace(params, max_new_tokens=room),
            seed=self._key.request_seed(self.task, number, salt),
            order=(self._key.position, self._key.member, number),
            affinity=self._key.group_name(self.task),
            pictures=(*self._turns.pictures(parent), *pictures),
            patient=patient,
        )
        self._under_way += 1
        try:
            with self._span("generate", turn=number, prompt_tokens=len(context)):
                completion, fire_tokens = await sampled(self._engines, self._name, request, first=number == 0)
        finally:
            self._under_way -= 1
        if not recorded:
            if self._over or completion.finish_reason == "abort":
                raise EpisodeError("aborted", "stopped by the scheduler")
            return completion
        turn = Turn(
            prompt_ids=prompt,
            response_ids=completion.array("token_ids"),
            logprobs=completion.array("logprobs"),
            versions=completion.array("versions"),
            finish_reason=completion.finish_reason,
            resets_context=reset_context,
            role=role,
            state=self._state,
            pictures=pictures,
            num_fire_tokens=fire_tokens,
            routed_experts=routed_before(completion, len(prompt)),
        )
        if self._over:
            raise EpisodeError("aborted", f"episode {self._name} is over")
        self._turns.add(number, turn, parent)
        self._numbers[completion.id] = self._unanswered = number
        if completion.finish_reason == "abort":
            raise EpisodeError("aborted", "stopped by the scheduler")
        return completion

    def _pictures(self, prompt: tuple[int, ...]) -> tuple[Picture, ...]:
        """Return what a prompt shows: the task's pictures where it begins with the task's prompt. Engines and trainers
        refuse tokens of pictures that they aren't given."""
        first, pictures = self._first_prompt
        return pictures if pictures and prompt[: len(first)] == first else ()

    def _parent(self, reset_context: bool, after: int | None) -> int | None:
        """Return the number of the turn that the next one continues."""
        if after is not None:
            if reset_context:
                raise ValueError(f"reset_context=True begins a context, and after={after} continues one: give one")
            if after not in self._turns:
                raise ValueError(f"after={after}: there is no turn of that number (whose response is there)")
            return after
        if reset_context:
            return None
        if self._turns.last is None and self._under_way:
            raise ValueError(
                "generate() without after= continues the last response, and there is none yet; where several calls are "
                "under way, say reset_context=True or after="
            )
        return self._turns.last

    async def step_env(
        self,
        text: str | None = None,
        *,
        turn: int | None = None,
        by_policy: bool = True,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> StepResult:
        """Give a response to the environment, or in RLVR to the reward function.

        Args:
            text: what it says; None: what the turn says.
            turn: number of the turn that is answered and paid; None: the one whose response came last.
            messages: all that was said after the prompt, for reward functions that read conversations; empty: the
                response alone.
            by_policy: false: the text is somebody else's. It is no turn, and no turn is paid (see `pay`).
        """
        number = (self._unanswered if turn is None else turn) if by_policy else None
        assert number is not None or (text is not None and not by_policy), "step_env() comes after generate()"
        self._engines.mark_busy(self._name, self._env.waits_for)
        with self._span(self._env.waits_for, turn=number):
            played = None if number is None else self._turns[number]
            opens_thought = False
            if text is None and played is not None:
                text = self._agent.decode_response(played.response_ids, self.params.stop_strings)
                opens_thought = self._agent.opens_thought(played.prompt_ids, played.response_ids, text)
            action = Action(
                text or "",
                "stop" if played is None else played.finish_reason,
                opens_thought,
                completion_ids=lambda: None if number is None else self._turns.completion(number),
                completion_text=lambda: self._agent.decode_response(self._turns.completion(number or 0), ()),
                messages=messages,
                step=self._key.trained_steps,
            )
            result = await self._env.step(action)
            spans.annotate(reward=float(result.reward), ended=result.terminated or result.truncated)
        if self._under_way:
            self._engines.mark_waiting(self._name)
        shown = ""
        if result.observation is not None:
            shown, self._state = result.observation.text, state_of(result.observation)
        self._truncated, self._answer = result.truncated, result.answer
        self._explanations += [result.explanation] if result.explanation else []
        if number is not None:
            self._turns.update(number, self._turns[number].replace(observation=shown))
            self.pay(number, result.reward, result.metrics)
            add_up(self._parts, result.reward_parts)
            self._unanswered, self.scored = None, True
        return result

    def answered(self, turn: int, observation: str) -> None:
        """Note what answered a response other than the environment, by the number of its turn."""
        self._turns.update(turn, self._turns[turn].replace(observation=observation))

    def pay(self, turn: int, reward: float, metrics: Mapping[str, float]) -> None:
        """Add to a turn's reward, and to what is known of it, by its number."""
        paid = self._turns[turn]
        self._turns.update(turn, paid.replace(reward=paid.reward + reward, metrics={**paid.metrics, **metrics}))

    def add_part(self, name: str, value: float) -> None:
        """Add to a named part of the reward, for logging."""
        add_up(self._parts, {name: value})

    @contextlib.contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Note what the episode waits for that is neither the engine nor its environment."""
        self._engines.mark_busy(self._name, doing)
        try:
            with self._span(doing):
                yield
        finally:
            if self._under_way:
                self._engines.mark_waiting(self._name)

    def finish(
        self,
        reward: float,
        *,
        parts: Mapping[str, float] | None = None,
        role_rewards: Mapping[str, float] | None = None,
        answer: str | None = None,
        success: float | None = None,
    ) -> None:
        """Score the episode by something other than its environment. May be called again: the last score counts.

        Args:
            reward: of the episode, added to what its turns were paid.
            parts: that it consists of, by name.
            role_rewards: of each role, where agents are paid apart; every role that spoke must be there.
            answer: what it states as its answer.
            success: 1 or 0, for validation; None: nobody says.

        Raises:
            ValueError: a number isn't finite, or a role has no reward.
        """
        wrong = [
            f"{name}={value}" for name, value in numbers_of(reward, parts, role_rewards) if not math.isfinite(value)
        ]
        if wrong:
            raise ValueError(f"the score of {self._name} isn't finite: {', '.join(wrong)}")
        spoke = {turn.role for turn in self._turns.stored()}
        if role_rewards and not spoke <= set(role_rewards):
            raise ValueError(f"{self._name}: no reward for the roles {sorted(spoke - set(role_rewards))}, which spoke")
        self._score, self._score_parts = float(reward), dict(parts or {})
        self._role_rewards, self.scored = dict(role_rewards or {}), True
        if answer is not None:
            self._answer = answer
        self._success = success

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a number of this episode that a step's metrics sum up, e.g. `agent/mismatch_edited`."""
        self._counts[name] = self._counts.get(name, 0.0) + value

    def end(self) -> None:
        """Note that it is over: give up the calls that are under way, and take no others."""
        self._over = True
        if self._under_way:
            self._engines.give_up(self._name)

    def truncate(self) -> None:
        """Note that the episode was stopped before its end."""
        self._truncated = True

    def fail(self, status: Status, error: str) -> None:
        """Note that it failed."""
        self._status, self._error = status, error

    def finished(self) -> Trajectory:
        """Return what was played."""
        turns = self._turns.stored()
        if self._success is not None and turns:
            last = turns[-1].replace(metrics={**turns[-1].metrics, "success": self._success})
            turns = (*turns[:-1], last)
        return Trajectory(
            task_id=self.task.id,
            member=self._key.member,
            turns=turns,
            reward=sum(turn.reward for turn in turns) + self._score,
            reward_parts=add_up(dict(self._parts), self._score_parts),
            role_rewards=self._role_rewards,
            status="truncated" if self._status == "ok" and self._truncated else self._status,
            error=self._error,
            answer=self._answer,
            explanation="\n".join(self._explanations),
            spans=self._spans,
            trace=self.trace,
            counts=self._counts,
        )

    @contextlib.contextmanager
    def _span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Add the seconds of a block to `spans`."""
        begun = time.monotonic()
        try:
            with spans.span(name, **attributes):
                yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + time.monotonic() - begun
