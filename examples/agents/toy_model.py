"""What the agents of this folder start from: recorded episodes, and a random model for their words.

`prepare` of a warm start (sft_openai.yaml) names a function below. It has the agent itself play some tasks with a
teacher in the policy's place, and makes of what the teacher was asked:

    actor_train.data_args.file_name   a row for each request: the prompt as the chat template writes it, the response
    pretrain                          a transformer of some hundred thousand random parameters, with a tokenizer of
                                      pairs of bytes that is made for these texts: what is always the same is few tokens
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roll.configs.parsing.loader import load_config
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.agents_config import AgentEnv
from roll.configs.schema.sft_config import SFTConfig
from roll.gateway.agents.logs import AgentLog
from roll.gateway.agents.runners import CommandRunner, FunctionRunner, Order, Runner
from roll.gateway.base import ChatAnswer, ChatCall, Choice, Session
from roll.gateway.registry import new_key
from roll.gateway.server import Gateway
from roll.rollout.chat_format import ChatTemplate
from roll.types.chat import Message, ToolCall
from roll.utils.seeding import stable_hash

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from boxes import BOXES  # noqa: E402
from small_agents import save_random_model, write  # noqa: E402

EPISODES = 400
"""Tasks that the teacher plays."""
Teach = Callable[[ChatCall], Message]
"""What a teacher says to a request."""
AT_ONCE = 4
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% if tools %}<|im_start|>tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tools are shown by their names alone: the policy learns from the episodes what they take."""


def openai(config: SFTConfig) -> None:
    """Write what agentic_openai.yaml needs."""
    prepare(config, "agentic_openai")


def anthropic(config: SFTConfig) -> None:
    """Write what agentic_anthropic.yaml needs."""
    prepare(config, "agentic_anthropic")


def smolagents(config: SFTConfig) -> None:
    """Write what agentic_smolagents.yaml needs."""
    prepare(config, "agentic_smolagents")


def langgraph(config: SFTConfig) -> None:
    """Write what agentic_langgraph.yaml needs."""
    prepare(config, "agentic_langgraph")


def openai_agents(config: SFTConfig) -> None:
    """Write what agentic_openai_agents.yaml needs."""
    prepare(config, "agentic_openai_agents")


def coding(config: SFTConfig) -> None:
    """Write what agentic_coding.yaml needs."""
    prepare(config, "agentic_coding", next_edit, episodes=150)


def prepare(config: SFTConfig, name: str, teach: Teach | None = None, episodes: int = EPISODES) -> None:
    """Make the rows and the model for one agent. Everything follows from the seed."""
    (file,) = map(Path, config.actor_train.data_args.file_name)
    model = Path(config.pretrain or "")
    if file.is_file() and (model / "config.json").is_file():
        return
    game = load_config(HERE, name, [f"seed={config.seed}"])
    assert isinstance(game, AgenticConfig)
    (section,) = (env.agent for env in game.custom_envs.values())
    assert section is not None
    seeds = [stable_hash(config.seed, "teacher", number, bits=56) for number in range(episodes)]
    asked = asyncio.run(recorded(section, seeds, teach or next_step))
    tokenizer = make_tokenizer([])
    rows = [
        {"prompt": prompt_of(tokenizer, call), "response": response_of(tokenizer, call, said)} for call, said in asked
    ]
    make_model(model, [text for row in rows for text in row.values()], config.seed)
    write(file, rows)


class Teacher(Session):
    """Answers in the policy's place, and notes what it was asked."""

    def __init__(self, teach: Teach) -> None:
        self._teach = teach
        self.asked: list[tuple[ChatCall, Message]] = []

    @property
    def models(self) -> Sequence[str]:
        return ("policy",)

    async def complete(self, call: ChatCall) -> ChatAnswer:
        message = self._teach(call)
        self.asked.append((call, message))
        choice = Choice(
            message=message, reason="tool_calls" if message.tool_calls else "stop", token_ids=(), logprobs=()
        )
        return ChatAnswer(choices=(choice,) * call.n, prompt_tokens=0)

    async def count(self, call: ChatCall) -> int:
        return sum(len(message.content) for message in call.messages)


def next_step(call: ChatCall) -> Message:
    """Return what solves the task: look, add, and say the sum, by `final_answer` where there is such a tool."""
    texts = [message.content for message in call.messages]
    asked, at = next(
        (found, i) for i, text in enumerate(texts) if (found := re.search(r"What is (\w+) plus (\d+)\?", text))
    )
    results = []
    for message in call.messages[at + 1 :]:
        numbers = re.findall(r"\d+", message.content)
        if numbers and (message.role == "tool" or "Observation" in message.content):
            results.append(int(numbers[-1]))
    number = f"call{sum(len(message.tool_calls) for message in call.messages):05d}"  # as the endpoint counts them
    if not results:
        return Message("assistant", "", (ToolCall(number, "look", json.dumps({"box": asked[1]})),))
    if len(results) == 1:
        arguments = {"a": results[0], "b": int(asked[2])}
        return Message("assistant", "", (ToolCall(number, "add", json.dumps(arguments)),))
    if any(tool.name == "final_answer" for tool in call.tools):
        return Message("assistant", "", (ToolCall(number, "final_answer", json.dumps({"answer": str(results[-1])})),))
    return Message("assistant", str(results[-1]))


def next_edit(call: ChatCall) -> Message:
    """Return what solves the task of coding_agent.py: see the test fail, write what it wants, see it pass."""
    results = [message.content for message in call.messages if message.role == "tool"]
    number = f"call{len(results):05d}"
    if results and results[-1] == "ok":
        return Message("assistant", "done")
    if not results or results[-1] == "written":
        return Message("assistant", "", (ToolCall(number, "run_tests", "{}"),))
    wanted = int(results[-1].rpartition(" ")[2])
    change = f"* {wanted // 10}" if wanted >= 20 else f"+ {wanted - 10}" if wanted > 10 else f"- {10 - wanted}"
    arguments = {"path": "f.py", "text": f"def f(x): return x {change}"}
    return Message("assistant", "", (ToolCall(number, "write_file", json.dumps(arguments)),))


async def recorded(env: AgentEnv, seeds: Sequence[int], teach: Teach) -> list[tuple[ChatCall, Message]]:
    """Have the agent play tasks with the teacher; return what that was asked and said, task by task."""
    gateway = Gateway()
    await gateway.start()
    runner: Runner = FunctionRunner(env) if env.agent is not None else CommandRunner(env)
    turn = asyncio.Semaphore(AT_ONCE)

    async def play(seed: int) -> list[tuple[ChatCall, Message]]:
        teacher, key, log = Teacher(teach), new_key(), AgentLog()
        async with turn:
            url = gateway.open(teacher, key, ignore_fields=env.ignored_fields)
            order = Order(
                episode=str(seed),
                task={"id": str(seed), "seed": seed},
                base_url=url,
                api_key=key,
                timeout_s=env.timeout_s,
            )
            try:
                outcome = await asyncio.wait_for(runner.run(order, log), env.timeout_s)
            finally:
                gateway.close(key)
        said = outcome.value if env.agent is not None else log.stdout_lines[-1:]
        assert "1.0" in json.dumps(said), f"the teacher's answer isn't right: {said}; the agent wrote {log.end()}"
        return teacher.asked

    try:
        return [pair for played in await asyncio.gather(*map(play, seeds)) for pair in played]
    finally:
        await runner.close()
        await gateway.stop()


def prompt_of(tokenizer: Any, call: ChatCall) -> str:
    """Return the prompt of a request."""
    return ChatTemplate(tokenizer).text(call.messages, call.tools)


def response_of(tokenizer: Any, call: ChatCall, said: Message) -> str:
    """Return a response as the template writes it, without its end."""
    chat = ChatTemplate(tokenizer)
    whole = chat.unchecked([*call.messages, said], call.tools, opens=False)
    return whole[len(chat.text(call.messages, call.tools)) :].rpartition("<|im_end|>")[0]


def make_tokenizer(texts: Sequence[str], size: int = 768) -> Any:
    """Merge pairs of bytes that are often side by side in the texts; names of boxes and single digits stay apart."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    apart = pre_tokenizers.Split(Regex(rf"{'|'.join(BOXES)}|look|add|\d|\n"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([re.sub(r"<\|im_(start|end)\|>", "\n", text) for text in texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT,
    )


def make_model(folder: Path, texts: Sequence[str], seed: int) -> None:
    """Make a random model for these texts."""
    save_random_model(
        folder,
        make_tokenizer(texts),
        seed,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        rope_theta=1000.0,
        initializer_range=0.05,
    )
