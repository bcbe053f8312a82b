"""The way of a response to the reward model and back: its text, its company, its failures, its weights."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest
import torch
from tiny_models import char_tokenizer

from roll.configs.schema.reward_config import RewardConfig, RewardModelConfig
from roll.data.templates import TemplateError
from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.inline import InlineExecutor
from roll.distributed.placement import RolePlacement
from roll.distributed.worker import Worker
from roll.distributed.worker_errors import WorkerDied
from roll.pipelines.rollouts.reward_router import combined
from roll.pipelines.workers.model_reward_worker import RewardModelClient, RewardTexts, UnscorableText
from roll.rewards.base import Reward, RewardRequest, RewardResult
from roll.types.batch import TokenOutputs
from roll.types.trajectory import Task

TOKENIZER = char_tokenizer()


def request(response="ok", id="r", **payload):
    task = Task(id="t", source="", payload=payload or {"prompt": "2+2?"}, seed=0, tag="t", domain="d")
    return RewardRequest(id=id, domain="d", response=response, task=task)


def texts(context_length=64, **options):
    return RewardTexts(RewardModelConfig(**options), TOKENIZER, context_length=context_length)


def text_of(encoded):
    return TOKENIZER.decode(encoded.ids)


# --- what the model reads ---------------------------------------------------------------------------------------------


def test_the_native_template_renders_prompt_and_response_as_a_finished_conversation():
    expected = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert text_of(texts().encode(request("4"))) == expected
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    assert text_of(texts(128).encode(request("4", messages=messages))) == (
        "<|im_start|>system\nAdd.<|im_end|>\n" + expected
    )


def test_a_plain_template_puts_the_response_behind_the_prompt():
    assert text_of(texts(template="question_answer").encode(request(" 4"))) == "Question: 2+2?\nAnswer: 4"
    jinja = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    assert text_of(texts(template=jinja).encode(request("4"))) == "[user] 2+2? [assistant] 4 "


def test_braces_and_markup_of_a_response_stay_text():
    assert text_of(texts(template="plain").encode(request("{prompt} {{ 1 }}"))) == "2+2?{prompt} {{ 1 }}"


def test_a_conversation_does_not_fit_a_plain_template():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TemplateError, match="conversation of 2 messages"):
        texts(template="plain").encode(request("c", messages=messages))


@pytest.mark.parametrize(
    ("where", "left"), [("left", "+2?4567"), ("right", "2+2?456"), ("middle", "2+2?567")]
)  # 4 + 4 = 8 tokens, 7 allowed
def test_a_long_text_is_cut_where_the_configuration_says_and_marked(where, left):
    cut = texts(template="plain", max_length=7, truncation=where)
    encoded = cut.encode(request("4567"))
    assert (text_of(encoded), encoded.truncated) == (left, True)
    assert cut.encode(request("456")).truncated is False


def test_a_long_text_has_no_score_unless_cutting_was_asked_for():
    with pytest.raises(UnscorableText, match="have 8 tokens for the reward model, more than its limit of 7"):
        texts(template="plain", max_length=7).encode(request("4567"))
    with pytest.raises(UnscorableText, match="limit of 6"):  # the model's own, without max_length
        texts(6, template="plain").encode(request("4567"))


# --- through a cluster ------------------------------------------------------------------------------------------------


class Lengths(Worker):
    """Scores a text with its number of tokens; refuses texts that hold an exclamation mark, whoever is with them."""

    def __init__(self, info, calls):
        super().__init__(info)
        self.calls = calls

    @dispatch(Dispatch.SPLIT_BY_DP)
    def forward(self, batch, outputs):
        rows = [TOKENIZER.decode(batch.row("token_ids", i)) for i in range(len(batch))]
        self.calls.append(rows)
        if any("!" in row for row in rows):
            raise RuntimeError("out of memory")
        assert outputs == ("values",)
        values = torch.repeat_interleave(batch.lengths, batch.lengths).float()
        return TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, values=values)


@pytest.fixture
def model_of():
    placement = RolePlacement(role="reward_model", ranks=((0,),))
    with InlineExecutor([placement], rpc_timeout=60) as executor:
        open_models = []

        def make(retries=0):
            calls = []
            cluster = executor.create_cluster(placement, Lengths, (calls,))
            model = RewardModelClient(cluster, texts(template="plain"), retries=retries)
            open_models.append(model)
            return model, calls

        yield make
        for model in open_models:
            model.close()


def in_one_turn(model, requests):
    """All submitted by coroutines of one turn of an event loop, as episodes do after a round of the engines."""

    async def main():
        async def episode(each):
            return await asyncio.wrap_future(model.submit(each))

        return await asyncio.wait_for(asyncio.gather(*map(episode, requests)), 30)

    return asyncio.run(main())


def test_scores_come_back_to_those_who_asked(model_of):
    model, _ = model_of()
    results = in_one_turn(model, [request("x" * n, id=f"r{n}") for n in (3, 1, 2)])
    assert [result.reward for result in results] == [Reward(4.0 + n, {"reward_model": 4.0 + n}) for n in (3, 1, 2)]
    assert [(result.id, result.status, result.attempts) for result in results] == [
        (f"r{n}", "ok", 1) for n in (3, 1, 2)
    ]


def test_what_one_turn_of_the_loop_submits_is_one_call_in_the_order_of_ids(model_of):
    model, calls = model_of()
    in_one_turn(model, [request("c", id="3"), request("a", id="1"), request("b", id="2")])
    assert calls == [["2+2?a", "2+2?b", "2+2?c"]]


def test_without_an_event_loop_a_response_is_scored_at_once(model_of):
    model, calls = model_of()
    assert model.submit(request("a")).result(30).reward.value == 5.0
    assert calls == [["2+2?a"]]


def test_one_response_that_cannot_be_scored_takes_no_other_with_it(model_of):
    model, calls = model_of(retries=1)
    good, bad = in_one_turn(model, [request("a", id="1"), request("!", id="2")])
    assert (good.status, good.reward.value, good.attempts) == ("ok", 5.0, 2)
    assert (bad.status, bad.reward, bad.attempts) == ("error", None, 3)
    assert "reward_model rank 0 failed in 'forward': RuntimeError: out of memory" in bad.error
    assert [len(rows) for rows in calls] == [2, 1, 1, 1]


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_a_single_response_is_tried_as_often_as_configured(model_of, retries, attempts):
    model, calls = model_of(retries)
    result = model.submit(request("!")).result(30)
    assert (result.status, result.attempts, len(calls)) == ("error", attempts, attempts)


def test_a_text_that_cannot_be_read_is_an_error_of_its_own(model_of):
    model, calls = model_of()
    long, short = in_one_turn(model, [request("x" * 100, id="1"), request("x", id="2")])
    assert (long.status, long.reward) == ("error", None)
    assert "104 tokens" in long.error
    assert short.reward.value == 5.0
    assert calls == [["2+2?x"]]


def test_a_closed_model_leaves_no_thread_and_a_cancelled_wait_disturbs_nobody(model_of):
    model, _ = model_of()
    future: Future = model.submit(request("a"))
    future.cancel()
    assert model.submit(request("b", id="2")).result(30).status == "ok"
    model.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "reward_model"]


def test_the_end_of_a_worker_is_raised_with_its_name_and_not_scored():
    class Gone:
        world_size, rpc_timeout, role = 1, 60.0, "reward_model"

        def call(self, *_args, timeout):
            raise WorkerDied(role="reward_model", rank=0, node="n", pid=1, call=f"forward ({timeout:g} s)")

    died = r"reward_model rank 0 died during 'forward \(54 s\)'"
    with RewardModelClient(Gone(), texts(template="plain"), retries=5) as model, pytest.raises(WorkerDied, match=died):
        model.submit(request("a")).result(30)


# --- with a rule ------------------------------------------------------------------------------------------------------


def ok(value, **parts):
    return RewardResult(id="r", status="ok", reward=Reward(value, parts))


BOTH = RewardConfig(name="math_rule", rule_weight=2.0, reward_model_weight=-0.5)


def test_a_rule_and_a_model_add_up_by_their_weights():
    # 2 x 1 + (-0.5) x 3 = 0.5
    result = combined(ok(1.0, correct=1.0), {"reward_model": ok(3.0, reward_model=3.0)}, BOTH)
    assert result.reward == Reward(0.5, {"correct": 1.0, "rule": 1.0, "reward_model": 3.0})


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_a_failure_of_either_is_a_failure_of_the_sum(status):
    failed = RewardResult(id="r", status=status, reward=None, error="no", attempts=3)
    for rule, model, who in ((failed, ok(1.0), "reward function"), (ok(1.0), failed, "reward model")):
        result = combined(rule, {"reward_model": model}, BOTH)
        assert (result.status, result.reward, result.attempts) == (status, None, 3)
        assert result.error == f"{who}: no"


def test_parts_of_one_name_are_not_written_over_each_other():
    result = combined(ok(1.0, rule=7.0), {"reward_model": ok(3.0, reward_model=3.0)}, BOTH)
    assert result.reward is None
    assert "parts called ['rule']" in result.error
