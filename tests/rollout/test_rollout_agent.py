"""Tokens are carried, never re-made: what an episode holds is what the chat template would have rendered."""

from __future__ import annotations

import asyncio

import pytest
import torch
from fakes import (
    EchoEnv,
    NumberTokenizer,
    ScriptedRanks,
    Source,
    ThreadedEnv,
    first_prompt,
    instant,
    make_plan,
    make_scheduler,
    make_tasks,
)
from tiny_models import char_tokenizer

from roll.envs.base import Message, Observation
from roll.rollout.agent import Agent
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.lockstep_driver import LockstepDriver
from roll.rollout.scheduler import RolloutScheduler
from roll.strategies.base import Completion, SamplingParams


@pytest.fixture(scope="module")
def tokenizer():
    return char_tokenizer()


def chat_prompt(tokenizer):
    def render(task, observation):
        messages = [{"role": m.role, "content": m.content} for m in observation.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    return render


def ids_of(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("closing", ["<|im_end|>", ""])
def test_a_reply_continues_the_conversation_as_the_template_writes_it(tokenizer, closing):
    # With `closing` the response ended itself; without, it hit the length limit and the reply must close it.
    agent = Agent(tokenizer, chat_prompt(tokenizer), chat=True)
    start = agent.start(make_tasks(1)[0], Observation((Message("user", "hello"),)))
    response = ids_of(tokenizer, "hi you" + closing)
    reply = agent.reply(Observation((Message("user", "and now?"),)), response)
    conversation = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi you"},
        {"role": "user", "content": "and now?"},
    ]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode([*start, *response, *reply]) == rendered


def test_a_template_that_rewrites_earlier_answers_is_refused(tokenizer):
    forgetful = char_tokenizer()
    forgetful.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    agent = Agent(forgetful, chat_prompt(forgetful), chat=True)
    with pytest.raises(ValueError, match="chat template"):
        agent.reply(Observation((Message("user", "and now?"),)), (5,))
    with pytest.raises(ValueError, match="chat template"):
        agent.check_carries()
    Agent(forgetful, chat=False).check_carries()  # nobody renders anything


def test_without_a_prompt_of_its_own_a_task_begins_with_what_the_environment_shows(tokenizer):
    shown = Observation((Message("user", "hello"),))
    own, rendered = Agent(tokenizer, chat_prompt(tokenizer), chat=True), Agent(tokenizer, chat=True)
    assert rendered.start(make_tasks(1)[0], shown) == own.start(make_tasks(1)[0], shown)


class Cut(ScriptedRanks):
    """Every response is cut off by its length."""

    @staticmethod
    def _completion(request, length, reason):
        return ScriptedRanks._completion(request, length, "length")


@pytest.mark.parametrize(
    ("make_env", "statuses"),
    [
        (None, ["truncated"]),  # one response to a reward function: being cut off is how the episode ended
        (lambda task, name: ThreadedEnv(EchoEnv()), ["ok"]),  # an environment of several turns ended by itself
    ],
)
def test_who_judges_a_response_knows_whether_a_cut_ended_the_episode(make_env, statuses):
    collected = make_scheduler(Cut(), make_env=make_env, max_turns=3).collect(
        Source(make_tasks(1)), make_plan(groups=1, group_size=1)
    )
    (group,) = collected.groups
    assert [t.status for t in group.trajectories] == statuses
    assert {turn.finish_reason for t in group.trajectories for turn in t.turns} == {"length"}


class Restarts:
    """A rollout that drops its context after the first response."""

    async def play(self, episode):
        await episode.generate(await episode.first_prompt(), max_new_tokens=3)
        await episode.generate((21, 22), reset_context=True)
        assert episode.tokens[:2] == (21, 22)
        await episode.generate((23,))
        await episode.step_env()


def test_a_context_that_is_reset_drops_what_was_before_for_good():
    seen = []

    class Seeing(ScriptedRanks):
        async def submit(self, rank, requests):
            seen.extend(request.prompt_ids for request in requests)
            await super().submit(rank, requests)

    engines = LockstepDriver(Seeing(), round_steps=4, timeout=5.0)
    player = EpisodePlayer(
        engines,
        Agent(NumberTokenizer(), first_prompt, chat=False),
        lambda task, name: RewardEnv(instant(lambda request: 2.0), task, name),
        max_sequence_length=5,  # of each context
        rollouts={"numbers": Restarts()},
    )
    collected = RolloutScheduler(engines, player, seed=1).collect(
        Source(make_tasks(1)), make_plan(groups=1, group_size=1)
    )
    (trajectory,) = collected.groups[0].trajectories
    assert seen == [(1, 10), (21, 22), (21, 22, 22, 23)]
    assert [turn.resets_context for turn in trajectory.turns] == [False, True, False]
    assert [len(context) for context in trajectory.contexts] == [1, 2]
    assert trajectory.reward == 2.0 and trajectory.status == "ok"


@pytest.mark.parametrize(("keep", "expected"), [(True, "4\nQ"), (False, "4")])
def test_the_stop_string_is_in_the_actions_text_if_asked_for(tokenizer, keep, expected):
    agent = Agent(tokenizer, chat_prompt(tokenizer), chat=False, keep_stop_string=keep)
    ids = ids_of(tokenizer, "4\nQ</s>")
    completion = Completion(
        id="r", token_ids=ids, logprobs=(0.0,) * len(ids), versions=(0,) * len(ids), finish_reason="stop"
    )
    assert agent.decode_response(completion.token_ids, ("\n",)) == expected


class OneEngine:
    """A real engine, called directly."""

    world_size = 1

    def __init__(self, engine):
        self.engine = engine

    async def submit(self, rank, requests):
        self.engine.submit(requests)

    async def poll(self, rank, budget):
        await asyncio.sleep(0)
        return self.engine.poll(budget)

    async def abort(self, rank, request_ids):
        return self.engine.abort(request_ids)


def test_a_two_turn_episode_on_a_real_engine_has_the_trainers_logprobs(tiny_model):
    from roll.configs.schema.worker_config import ModelArgs
    from roll.pipelines.rollouts.assemble import assemble
    from roll.strategies.engines.hf.hf_infer import HfInfer
    from roll.strategies.training.pretrained import context_length, eos_token_ids, load_causal_lm, load_tokenizer

    args = ModelArgs(model_name_or_path=str(tiny_model))
    tokenizer, model = load_tokenizer(args), load_causal_lm(args, torch.float32)
    engine = HfInfer(
        model, eos_token_ids=eos_token_ids(model, tokenizer), pad_token_id=0, max_context=context_length(model)
    )
    engines = LockstepDriver(OneEngine(engine), round_steps=3, timeout=60)
    player = EpisodePlayer(
        engines,
        Agent(tokenizer, chat_prompt(tokenizer), chat=True),
        lambda task, name: ThreadedEnv(EchoEnv()),
        max_sequence_length=200,
        max_turns=4,
    )
    plan = make_plan(groups=3, group_size=2, params=SamplingParams(max_new_tokens=5, temperature=0.8))
    collected = RolloutScheduler(engines, player, seed=1).collect(Source(make_tasks(3)), plan)
    batch = assemble(collected.groups).batch
    assert len(batch) == 6
    for i in range(len(batch)):
        ids, acting = batch.row("token_ids", i), batch.row("action_mask", i)
        assert len(collected.groups[i // 2].trajectories[i % 2].turns) == 2
        with torch.no_grad():
            table = (model(ids[None]).logits[0].float() / 0.8).log_softmax(-1)[:-1]
        expected = table.gather(-1, ids[1:, None])[:, 0] * acting[1:]
        torch.testing.assert_close(batch.row("sampling_logprobs", i)[1:], expected, atol=1e-5, rtol=0)
