"""What the endpoint for agents costs by itself: engines are stubs that wait and answer with fixed tokens.

    python benchmarks/gateway.py

* `bare`: the lower bound, a server that knows no more of HTTP than where a request ends. `server`: HTTP, protocol and
  session, over one that waits. `episodes`: with message graph, chat template and tokens, each session a conversation
  that grows by a turn with every request and begins anew after `--turns`.
  Sessions ask one request after the other; the engine takes `--engine-seconds` on average, between half and one and a
  half of it. Cost: what a client waits beyond that, the client's own work and the machine's network included, which
  are all that `bare` has: the difference of the medians is the endpoint's own. Clients have a process of their own.
* `streams`: so many clients stream at once, again and again; each response must arrive whole. Memory is that of the
  server's process, between the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from gateway_clients import SAID

from roll.gateway.base import ChatAnswer, ChatCall, Choice, Session
from roll.gateway.reading import ResponseReader
from roll.gateway.registry import new_key
from roll.gateway.server import Gateway
from roll.gateway.session import EpisodeSession
from roll.rollout.agent import Agent
from roll.rollout.episode import Episode
from roll.rollout.episode_key import EpisodeKey
from roll.rollout.message_graph import MessageGraph
from roll.strategies.base import Completion, Request, SamplingParams
from roll.types.chat import Message
from roll.types.trajectory import Task

ROOT = Path(__file__).parents[1]
END = f" {SAID}<|im_end|>"
BARE = json.dumps({"choices": [{"message": {"role": "assistant", "content": f"TOOK {SAID}"}}]})
CLIENTS = str(Path(__file__).with_name("gateway_clients.py"))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class StubSession(Session):
    """Waits, and says for how long."""

    models: Sequence[str] = ("policy",)

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds, self._draw = seconds, random.Random(seed)

    async def complete(self, call: ChatCall) -> ChatAnswer:
        began = time.perf_counter()
        await asyncio.sleep(self._seconds * self._draw.uniform(0.5, 1.5))
        message = Message("assistant", f"{time.perf_counter() - began} {SAID}")
        choice = Choice(message=message, reason="stop", token_ids=(1,) * 64, logprobs=(-1.0,) * 64)
        return ChatAnswer(choices=(choice,) * call.n, prompt_tokens=100)

    async def count(self, call: ChatCall) -> int:
        del call
        return 100


class BareServer(asyncio.Protocol):
    """One connection: it waits for a whole request, then for a while, and writes the same answer every time."""

    def __init__(self, seconds: float, draw: random.Random) -> None:
        self._seconds, self._draw = seconds, draw
        self._read = b""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._read += data
        head, blank, body = self._read.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if blank and len(body) >= int(length):
            self._read = b""
            loop, began = asyncio.get_running_loop(), time.perf_counter()
            loop.call_later(self._seconds * self._draw.uniform(0.5, 1.5), self._answer, began)

    def _answer(self, began: float) -> None:
        body = BARE.replace("TOOK", str(time.perf_counter() - began)).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


class StubEngines:
    """Engines that wait, and say for how long; as much of a driver as an episode needs."""

    def __init__(self, tokenizer: Any, seconds: float, seed: int) -> None:
        self._seconds, self._draw = seconds, random.Random(seed)
        # A real engine has the tokens already, and its time isn't the endpoint's.
        tokens = {text: tokenizer(text, add_special_tokens=False).input_ids for text in (*"0123456789.e-", END)}
        self._tokens: dict[str, list[int]] = tokens

    async def generate(self, episode: str, request: Request) -> Completion:
        del episode
        began = time.perf_counter()
        await asyncio.sleep(self._seconds * self._draw.uniform(0.5, 1.5))
        took = f"{time.perf_counter() - began:.6f}"
        ids = (*(self._tokens[digit][0] for digit in took), *self._tokens[END])
        n = len(ids)
        return Completion(id=request.id, token_ids=ids, logprobs=(-1.0,) * n, versions=(0,) * n, finish_reason="stop")

    def mark_busy(self, episode: str, doing: str) -> None:
        pass

    def give_up(self, episode: str) -> None:
        pass


def make_tokenizer() -> Any:
    """Train a byte-level BPE of 2,000 tokens on this project's pages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(ROOT / "README.md"), str(ROOT / "docs" / "design.md")], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def episode_session(tokenizer: Any, agent: Agent, seconds: float, seed: int) -> EpisodeSession:
    """Return a session with all that a run's has, over stub engines. The sessions of a run share its agent."""
    task = Task(id=f"task-{seed}", source="bench", payload={}, seed=seed, tag="a", domain="a")
    key = EpisodeKey(seed=0, purpose="train", step=1, position=seed, member=0)
    engines: Any = StubEngines(tokenizer, seconds, seed)
    no_env: Any = None
    episode = Episode(engines, agent, no_env, task, key, SamplingParams(max_new_tokens=512), 1 << 20)
    reading = ResponseReader(
        decode=lambda ids: agent.decode_response(ids, ()),
        token_text=lambda token: str(tokenizer.decode([token])),
        tool_parser="hermes",
    )
    return EpisodeSession(episode, MessageGraph(agent.chat), reading)


async def in_a_process(plan: dict[str, Any]) -> Any:
    """Run clients in a process of their own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, CLIENTS, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(json.dumps(plan).encode())
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


# --- measurements -----------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def through_gateway(kind: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Return seconds that each request cost its client, and the server's processor time per request."""
    gateway = Gateway()
    await gateway.start()
    tokenizer = make_tokenizer() if kind == "episodes" else None
    agent: Any = None if tokenizer is None else Agent(tokenizer)
    opened, sessions = [], []
    for seed in range(options.sessions):
        session: Session = (
            StubSession(options.engine_seconds, seed)
            if tokenizer is None
            else episode_session(tokenizer, agent, options.engine_seconds, seed)
        )
        key = new_key()
        opened.append((gateway.open(session, key), key))
        sessions.append(session)
    costs, used = await asked_by_clients(opened, options)
    begun = time.process_time()
    for session in sessions:
        if isinstance(session, EpisodeSession):
            session.count_retokenised()  # part of what an episode costs, though no client waits for it
    await gateway.stop()
    return costs, used + (time.process_time() - begun) / len(costs)


async def through_bare_server(options: argparse.Namespace) -> tuple[list[float], float]:
    """Return the same of a server that does nothing."""
    draw = random.Random(0)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BareServer(options.engine_seconds, draw), "127.0.0.1", 0, backlog=2048)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    costs = await asked_by_clients([(url, new_key()) for _ in range(options.sessions)], options)
    server.close()
    return costs


async def asked_by_clients(opened: list[tuple[str, str]], options: argparse.Namespace) -> tuple[list[float], float]:
    """Let a client per address ask, all at once."""
    names = ("engine_seconds", "requests", "turns")
    plan = {name: getattr(options, name) for name in names} | {"sessions": opened, "streams": False}
    used = time.process_time()
    costs = await in_a_process(plan)
    return costs, (time.process_time() - used) / len(costs)


async def own_cost(options: argparse.Namespace) -> None:
    """Print a row for each layer in each round, and what the layers cost beyond the bare server."""
    medians: dict[str, list[float]] = {}
    for _ in range(options.cost_rounds):
        for kind in ("bare", "server", "episodes"):
            if kind != "bare" and options.only not in (None, kind):
                continue
            costs, used = await (through_bare_server(options) if kind == "bare" else through_gateway(kind, options))
            p50, p90, p99 = (quantile(costs, share) * 1000 for share in (0.5, 0.9, 0.99))
            print(f"| {kind} | {len(costs)} | {p50:.2f} | {p90:.2f} | {p99:.2f} | {used * 1000:.2f} |", flush=True)
            medians.setdefault(kind, []).append(p50)
    for kind in sorted(medians.keys() - {"bare"}):
        own = [p50 - bare for p50, bare in zip(medians[kind], medians["bare"], strict=True)]
        print(f"\n{kind}: {median(own):.2f} ms of its own ({min(own):.2f} to {max(own):.2f})", end="")
    print()


async def many_streams(options: argparse.Namespace) -> None:
    """Print whether streams were lost, and the server's memory."""
    gateway = Gateway()
    await gateway.start()
    memory, arrived = [], 0
    for round_ in range(options.rounds):
        opened = []
        for seed in range(options.clients):
            key = new_key()
            opened.append((gateway.open(StubSession(0.2, seed), key), key))
        arrived += await in_a_process({"sessions": opened, "streams": True})
        for _, key in opened:
            gateway.close(key)
        gc.collect()
        memory.append(psutil.Process().memory_info().rss / 2**20)
        print(f"| {round_ + 1} | {options.clients} | {memory[-1]:.1f} |", flush=True)
    await gateway.stop()
    asked = options.rounds * options.clients
    print(
        f"\n{arrived} of {asked} streams arrived whole; memory grew by {memory[-1] - memory[0]:.1f} MiB after round 1"
    )
    assert arrived == asked, "streams were lost"


async def measured(options: argparse.Namespace) -> None:
    if options.only != "streams":
        about = f"{options.sessions} sessions, {options.requests} requests each, engine {options.engine_seconds:g} s"
        print(f"{about}; ms beyond the engine's time\n")
        print("| layer | requests | p50 | p90 | p99 | processor time |\n|---|---|---|---|---|---|", flush=True)
        await own_cost(options)
        print()
    if options.only in (None, "streams"):
        print("| round | streams at once | server's memory, MiB |\n|---|---|---|", flush=True)
        await many_streams(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("server", "episodes", "streams"))
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--requests", type=int, default=20, help="of each session")
    parser.add_argument("--turns", type=int, default=10, help="of a conversation")
    parser.add_argument("--engine-seconds", type=float, default=1.0)
    parser.add_argument("--cost-rounds", type=int, default=3, help="of the layers, one after the other")
    parser.add_argument("--clients", type=int, default=200, help="that stream at once")
    parser.add_argument("--rounds", type=int, default=10, help="of streams")
    asyncio.run(measured(parser.parse_args()))


if __name__ == "__main__":
    main()
