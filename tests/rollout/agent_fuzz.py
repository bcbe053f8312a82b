"""Agents that do to a conversation whatever agents do, and a check that every token is trained once, in its context.

A fuzzed agent continues conversations, edits and summarises them, drops what was thought, asks again, asks several
things at once or for several answers, disconnects, and writes calls of tools anew. It talks to a session as small as
one can be: a `MessageGraph` in front of `Episode.generate`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import struct
from collections import Counter
from dataclasses import dataclass, field, replace

from chat_tokenizers import CHATML, bpe_tokenizer, ids_of
from tool_templates import COUNTS_BACK, LLAMA31, MISTRAL, QWEN3, end_of

from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.envs.wrappers import without_thoughts
from roll.pipelines.rollouts.assemble import Rollouts, assemble
from roll.rollout.agent import Agent
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.message_graph import MessageGraph
from roll.rollout.scheduler import CollectPlan, RolloutScheduler
from roll.strategies.base import Completion, SamplingParams
from roll.types.chat import ToolCall, ToolSpec
from roll.types.trajectory import EpisodeError, Group, Task

TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama3.1": LLAMA31, "mistral": MISTRAL, "counts_back": COUNTS_BACK}
TAGS = ("<think>", "</think>")
WORDS = ("Up", "a wall", "<answer>Up</answer>", " 22", "é?", "\n\n", "then", "<|im_end|>", "x")
TOOLS = tuple(ToolSpec(name, "Looks.", {"type": "object", "properties": {"at": {}}}) for name in ("look", "go"))

# How policies write a call: Hermes and Qwen, Qwen-coder, Llama, Mistral.
FORMATS = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function={name}>\n<parameter=at>\n{at}\n</parameter>\n</function>\n</tool_call>",
    "llama": '{{"name": "{name}", "parameters": {arguments}}}',
    "mistral": '[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]',
}
FORMAT_OF = {
    "chatml": "hermes",
    "qwen3": "qwen_coder",
    "llama3.1": "llama",
    "mistral": "mistral",
    "counts_back": "hermes",
}
_JSON_CALL = re.compile(r'\{"name": "(\w+)", "(?:arguments|parameters)": (\{[^{}]*\})\}')
_XML_CALL = re.compile(r"<function=(\w+)>\s*<parameter=at>\s*(.*?)\s*</parameter>", re.S)


def told(text: str) -> Message:
    """What a client is told of a response: calls set apart; what was thought too, in every other one."""
    calls = [(name, arguments) for name, arguments in _JSON_CALL.findall(text)]
    calls += [(name, json.dumps({"at": at})) for name, at in _XML_CALL.findall(text)]
    if calls:
        found = tuple(ToolCall(f"call{n:05d}", name, arguments) for n, (name, arguments) in enumerate(calls))
        return Message("assistant", "", tool_calls=found)
    content = without_thoughts(text, TAGS)
    if content != text and len(text) % 2:
        return Message("assistant", content, reasoning=text)
    return Message("assistant", text)


class RandomRanks:
    """Engines that say random tokens of the vocabulary, and now and then something that looks like an answer."""

    def __init__(self, tokenizer, template: str, world_size: int = 2) -> None:
        self.world_size = world_size
        self.tokenizer, self.template = tokenizer, template
        self.running: list[dict] = [{} for _ in range(world_size)]
        self.waits: dict[str, int] = {}

    def _said(self, rng: random.Random, limit: int) -> tuple[tuple[int, ...], str]:
        end = ids_of(self.tokenizer, end_of(TEMPLATES[self.template]))
        kind = rng.random()
        if kind < 0.3:  # any tokens, special ones and broken characters included
            ids = tuple(rng.randrange(len(self.tokenizer)) for _ in range(rng.randrange(1, 9)))
        else:
            text = rng.choice(WORDS)
            if kind < 0.5:
                text = f"<think>\n{rng.choice(WORDS)}\n</think>\n\n{text}"
            elif kind < 0.75:
                values = {"name": rng.choice(("look", "go")), "at": rng.choice("abc")}
                shape = FORMATS[FORMAT_OF.get(self.template, "hermes")]
                text = shape.format(arguments=json.dumps({"at": values["at"]}), **values)
            ids = ids_of(self.tokenizer, text)
            if rng.random() < 0.2:  # the same text in other tokens
                ids = tuple(token for letter in text for token in ids_of(self.tokenizer, letter))
        ids = (*ids, *end) if rng.random() < 0.8 else ids
        return (ids, "stop") if len(ids) <= limit else (ids[:limit], "length")

    async def submit(self, rank, requests):
        for request in requests:
            self.running[rank][request.id] = request

    async def poll(self, rank, budget):
        del budget
        await asyncio.sleep(0)
        done = []
        for request_id, request in list(self.running[rank].items()):
            rng = random.Random(request.seed)
            self.waits[request_id] = self.waits.get(request_id, rng.randrange(4)) - 1
            if self.waits[request_id] >= 0:
                continue  # slower than others
            del self.running[rank][request_id]
            ids, reason = self._said(rng, request.params.max_new_tokens)
            logprobs = tuple(-5 * rng.random() for _ in ids)
            rest = {"versions": (0,) * len(ids), "finish_reason": reason}
            done.append(Completion(id=request_id, token_ids=ids, logprobs=logprobs, **rest))
        return done

    async def abort(self, rank, request_ids):
        for request_id in request_ids:
            self.running[rank].pop(request_id, None)
        return []


class EngineRank:
    """A real engine in this process as the one rank of a cluster."""

    world_size = 1

    def __init__(self, engine) -> None:
        self.engine = engine

    async def submit(self, rank, requests):
        self.engine.submit(requests)

    async def poll(self, rank, budget):
        if self.engine.lockstep:
            return self.engine.poll(budget)
        return await asyncio.to_thread(self.engine.poll, budget)

    async def abort(self, rank, request_ids):
        if self.engine.lockstep:
            return self.engine.abort(request_ids)
        return await asyncio.to_thread(self.engine.abort, request_ids)


class Logged:
    """Keeps what engines were asked and what they said."""

    def __init__(self, ranks) -> None:
        self.ranks = ranks
        self.world_size = ranks.world_size
        self.requests: dict = {}
        self.said: dict = {}

    async def submit(self, rank, requests):
        self.requests |= {request.id: request for request in requests}
        await self.ranks.submit(rank, requests)

    async def poll(self, rank, budget):
        done = await self.ranks.poll(rank, budget)
        self.said |= {completion.id: completion for completion in done}
        return done

    async def abort(self, rank, request_ids):
        return await self.ranks.abort(rank, request_ids)


@dataclass
class FuzzLog:
    """What happened in a fuzz."""

    delivered: set[str] = field(default_factory=set)
    """Ids of responses that an agent got."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of what agents did, of mismatches, of calls that were refused."""


class FuzzedAgent:
    """Implements `Rollout`: plays episodes of `calls` responses."""

    def __init__(
        self,
        chat: ChatTemplate,
        tokenizer,
        history: str,
        calls: int,
        tally: FuzzLog,
        seed: int = 0,
        imagines: float = 0.0,
    ) -> None:
        self._chat, self._tokenizer, self._history = chat, tokenizer, history
        self._calls, self._seed = calls, seed
        self._imagines = imagines
        """Share of the responses of a random model that are taken for calls or thoughts, which it can't write."""
        self.tally = tally

    async def play(self, episode) -> None:
        await _FuzzedEpisode(self, episode).play()
        episode.finish(1.0)


class _FuzzedEpisode:
    def __init__(self, agent: FuzzedAgent, episode) -> None:
        self.agent, self.episode, self.tally = agent, episode, agent.tally
        self.rng = random.Random(f"{agent._seed} {episode.name}")
        self.graph = MessageGraph(agent._chat, agent._history, thinking_tags=TAGS)
        self.open: list[tuple[tuple[Message, ...], tuple[ToolSpec, ...]]] = []  # Conversations that may go on
        self.asked: list[tuple[tuple[Message, ...], tuple[ToolSpec, ...]]] = []
        self.got = 0

    async def play(self) -> None:
        await self.begin()
        for _ in range(20 * self.agent._calls):
            if self.got >= self.agent._calls:
                return
            steps = (self.go_on, self.edit, self.drop_thinking, self.ask_again, self.at_once, self.several)
            step = self.rng.choices((*steps, self.disconnect, self.summarise, self.begin), (8, 1, 1, 2, 2, 1, 1, 1, 1))[
                0
            ]
            self.tally.counts[step.__name__] += 1
            await step()

    # --- what agents do -------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        messages = [Message("user", self.text())]
        if self.rng.random() < 0.5:
            messages.insert(0, Message("system", self.text()))
        await self.ask(messages, TOOLS if self.rng.random() < 0.6 else ())

    async def go_on(self) -> None:
        messages, tools = self.some()
        await self.ask([*self.as_clients_do(messages), *self.news(messages)], tools)

    async def edit(self) -> None:
        messages, tools = self.some()
        edited = list(messages)
        at = self.rng.randrange(len(edited))
        edited[at] = replace(edited[at], content=edited[at].content + self.text(), reasoning="")
        await self.ask([*edited, *self.news(edited)], tools)

    async def drop_thinking(self) -> None:
        messages, tools = self.some()
        kept = [replace(m, content=without_thoughts(m.content, TAGS), reasoning="") for m in messages]
        await self.ask([*kept, *self.news(kept)], tools)

    async def ask_again(self) -> None:
        if self.asked:
            await self.ask(*self.rng.choice(self.asked))

    async def at_once(self) -> None:
        await asyncio.gather(*(self.rng.choice((self.go_on, self.ask_again))() for _ in range(self.rng.randint(2, 4))))

    async def several(self) -> None:
        messages, tools = self.some()
        await self.ask([*messages, *self.news(messages)], tools, n=self.rng.randint(2, 4))

    async def disconnect(self) -> None:
        calls = [asyncio.ensure_future(self.go_on()) for _ in range(self.rng.randint(1, 2))]
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        calls[0].cancel()
        for call in calls:
            try:
                await call
            except asyncio.CancelledError:
                self.tally.counts["cancelled"] += 1

    async def summarise(self) -> None:
        messages, tools = self.some()
        kept = self.rng.randrange(len(messages))
        answers = [message.content for message in messages if message.role == "assistant"]
        await self.ask([Message("user", f"So far: {answers}"[:60]), *self.pairs(messages[kept:])], tools)

    # --- conversations --------------------------------------------------------------------------------------------

    def some(self):
        return self.rng.choice(self.open) if self.open else ((Message("user", self.text()),), ())

    def text(self) -> str:
        return "".join(self.rng.choice((*WORDS, "Which way?", "#P_")) for _ in range(self.rng.randint(1, 3)))

    def news(self, messages) -> list[Message]:
        last = messages[-1]
        if last.tool_calls:
            return [Message("tool", self.text(), tool_call_id=c.id, name=c.name) for c in last.tool_calls]
        return [Message("user", self.text())] if last.role == "assistant" else []

    @staticmethod
    def pairs(messages) -> list[Message]:
        """The messages without results whose calls are gone, and ending with what isn't the assistant's."""
        kept = list(messages)
        while kept and kept[0].role != "user":
            kept.pop(0)
        return kept if kept and kept[-1].role != "assistant" else [*kept, Message("user", "?")]

    def as_clients_do(self, messages) -> list[Message]:
        """Blanks taken off, arguments written anew, ids of their own, and what was thought not sent back."""
        shown = []
        for message in messages:
            if message.role == "assistant" and self.rng.random() < 0.5:
                calls = tuple(
                    replace(call, id="call99999", arguments=json.dumps(json.loads(call.arguments), indent=1))
                    for call in message.tool_calls
                )
                reasoning = message.reasoning if self.rng.random() < 0.5 else ""
                message = replace(message, content=message.content.strip(), tool_calls=calls, reasoning=reasoning)
            shown.append(message)
        return shown

    async def ask(self, messages, tools, n: int = 1) -> None:
        """Ask as a client does, whole conversation each time; what no template or window takes is given up."""
        messages = tuple(messages)
        try:
            placement = self.graph.place(messages, tools)
        except TemplateError:
            self.tally.counts["refused"] += 1
            return
        assert placement.context_ids == (*self.episode.tokens_of(placement.parent), *placement.prompt_ids)
        if self.agent._history == "rendered":
            assert placement.text == self.agent._chat.text(placement.messages, tools)
        self.tally.counts.update({f"mismatch_{name}": count for name, count in placement.mismatches.items()})
        self.asked.append((messages, tools))
        answers = await asyncio.gather(*(self.answer(placement) for _ in range(n)))
        if any(answer is None for answer in answers):
            return
        self.open.append(((*messages, self.rng.choice(answers)), tools))
        self.open = self.open[-4:]

    async def answer(self, placement) -> Message | None:
        begins = placement.parent is None
        limit = self.rng.randint(1, 12) if self.rng.random() < 0.3 else self.episode.params.max_new_tokens
        try:
            completion = await self.episode.generate(
                placement.prompt_ids, after=placement.parent, reset_context=begins, max_new_tokens=limit
            )
        except EpisodeError as error:
            if error.status != "truncated":
                raise
            self.tally.counts["no_room"] += 1
            return None
        self.tally.delivered.add(completion.id)
        self.got += 1
        text = self.agent._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        message = told(text)
        if self.rng.random() < self.agent._imagines:
            call = ToolCall("call00000", self.rng.choice(("look", "go")), json.dumps({"at": text}))
            thought = Message("assistant", text[1:], reasoning=text[:1])
            message = self.rng.choice((Message("assistant", "", tool_calls=(call,)), thought))
        self.graph.grow(placement, completion.token_ids, message, number=self.episode.number_of(completion))
        return message


def play_fuzz(driver, tokenizer, agent: FuzzedAgent, *, episodes: int, limit: int, params: SamplingParams) -> Rollouts:
    """Play fuzzed episodes and cut them into rows."""
    tasks = [Task(id=f"e{n}", source="fuzz", payload={}, seed=n, tag="fuzz", domain="fuzz") for n in range(episodes)]

    class Source:
        def take(self, n):
            taken, tasks[:] = tasks[:n], tasks[n:]
            return taken

        def put_back(self, tasks):
            raise AssertionError(f"{tasks} were given up")

    player = EpisodePlayer(
        driver,
        Agent(tokenizer),
        lambda task, name: RewardEnv(lambda request: None, task, name),
        max_sequence_length=limit,
        rollouts={"fuzz": agent},
    )
    plan = CollectPlan(
        step=1, purpose="train", groups=episodes, group_size=1, params=params, max_prompts=episodes, min_survivors=0
    )
    groups: list[Group] = RolloutScheduler(driver, player, seed=agent._seed).collect(Source(), plan).groups
    assert [t.status for group in groups for t in group.trajectories] == ["ok"] * episodes
    return assemble(groups)


def check_identity(rollouts: Rollouts, logged: Logged, tally: FuzzLog) -> int:
    """Every token that is trained was sampled, in that context, with that log-prob, and each that an agent got is
    trained once. Returns how many that were."""
    by_context: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(tally.delivered):
        by_context.setdefault(logged.requests[name].prompt_ids, []).append(name)
    batch, tokens = rollouts.batch, 0
    for row in range(len(batch)):
        ids, mask = tuple(batch.row("token_ids", row).tolist()), batch.row("action_mask", row).tolist()
        logprobs, at = batch.row("sampling_logprobs", row).tolist(), 0
        while at < len(ids):
            if not mask[at]:
                at += 1
                continue
            for name in by_context.get(ids[:at], ()):
                said = logged.said[name]
                end = at + len(said.token_ids)
                if said.token_ids == ids[at:end] and [_float32(x) for x in said.logprobs] == logprobs[at:end]:
                    break
            else:
                raise AssertionError(f"row {batch.row_ids[row]} trains token {at}, which no engine sampled there")
            assert all(mask[at:end]), f"row {batch.row_ids[row]} trains {name} in part"
            by_context[ids[:at]].remove(name)
            tokens, at = tokens + end - at, end
    untrained = [n for names in by_context.values() for n in names if logged.said[n].token_ids]
    assert not untrained, f"{len(untrained)} responses are not trained on: {untrained[:3]}"
    return tokens


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def fuzz_tokenizer(template: str):
    return bpe_tokenizer(TEMPLATES[template])
