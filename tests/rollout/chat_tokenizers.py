"""A small BPE tokenizer with the shapes of well-known chat templates, and a way to play episodes by script."""

from __future__ import annotations

import asyncio
import copy
from functools import cache

from roll.configs.schema.env_config import CustomEnv
from roll.data.templates import render_chat
from roll.envs.base import Observation, StepResult
from roll.rollout.agent import Agent
from roll.rollout.conversation import Conversation
from roll.rollout.episode_key import EpisodeKey
from roll.rollout.episode_player import EpisodePlayer
from roll.strategies.base import Completion, SamplingParams
from roll.types.trajectory import Group, Task, Trajectory

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A default system message, and tool messages that follow each other in one message of the user's.
QWEN25 = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A system message with today's date, and contents without blanks around them; nothing after the closing token.
LLAMA3 = (
    "{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: ' }}"
    "{{ strftime_now('%d %b %Y') + '\n\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}"
    "{{ '<|eot_id|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a small and helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "qwen2.5": QWEN25, "llama3": LLAMA3, "smollm2": SMOLLM2}

CORPUS = """system user assistant You are a helpful assistant. Today Date: the player pushes the box to the goal
moves Up Down Left Right <answer>Up</answer> <think>because</think> and then, what?
\n\n\n #####\n#_P_#\n 1 22 333
"""
WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # newlines stay together
)


@cache
def _trained():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=special[1:],
        clean_up_tokenization_spaces=False,
    )


def bpe_tokenizer(template):
    """With this chat template: a name in `TEMPLATES`, a text, or None."""
    tokenizer = copy.copy(_trained())
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


def ids_of(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def rendered(tokenizer, messages, *, opens=True):
    """The tokenizer's own text of a conversation."""
    history = [{"role": m.role, "content": m.content} for m in messages]
    return render_chat(tokenizer, history, opens_answer=opens)


class Script:
    """Engines that answer request by request with (text, finish reason); keeps the contexts they were shown."""

    def __init__(self, tokenizer, *answers):
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.contexts: list[tuple[int, ...]] = []
        self.limits: list[int] = []

    @property
    def texts(self):
        return [self.tokenizer.decode(context) for context in self.contexts]

    def mark_busy(self, episode, doing):
        pass

    async def generate(self, episode, request):
        text, reason = self.answers[len(self.contexts)]
        self.contexts.append(request.prompt_ids)
        self.limits.append(request.params.max_new_tokens)
        ids = ids_of(self.tokenizer, text)
        return Completion(
            id=request.id, token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids), finish_reason=reason
        )


class ScriptedEnv:
    """Shows these observations, one per step, with reward 1 each; ends after the last."""

    waits_for = "environment"

    def __init__(self, *observations, truncates=False, error=None):
        self.observations = [o if isinstance(o, Observation) else Observation.of(o) for o in observations]
        self.truncates = truncates
        self.error = error
        self.actions: list[str] = []
        self.closed = 0

    async def reset(self, task):
        return self.observations[0]

    async def step(self, action):
        self.actions.append(action.text)
        turn = len(self.actions)
        if turn == len(self.observations):
            if self.error is not None:
                raise self.error
            return StepResult(reward=1.0, terminated=not self.truncates, truncated=self.truncates)
        return StepResult(reward=1.0, terminated=False, observation=self.observations[turn], reward_parts={"env": 1.0})

    async def close(self):
        self.closed += 1


TASK = Task(id="maze", source="test", payload={}, seed=0, tag="maze", domain="maze")
KEY = EpisodeKey(seed=1, purpose="train", step=1, position=0, member=0)


def play(engines, env, rollout, agent: Agent, *, limit=10_000, max_new_tokens=50) -> Trajectory:
    """One episode by script."""
    player = EpisodePlayer(
        engines, agent, lambda task, name: env, max_sequence_length=limit, rollouts={"maze": rollout}
    )
    return asyncio.run(player.play(TASK, KEY, SamplingParams(max_new_tokens=max_new_tokens)))


def group_of(*trajectories: Trajectory) -> Group:
    return Group(task=TASK, trajectories=trajectories)


def conversation(*, instructions="", sample_unit="trajectory", **keys):
    """A conversation of the environment `maze`, with these keys of its section."""
    env = CustomEnv(env_type="maze-v1", **keys)
    return Conversation(tag="maze", env=env, instructions=instructions, sample_unit=sample_unit)
