"""What an engine has sampled becomes a response: whole or token by token, up to the end that it reaches first."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.responses import Response, ResponseRules

EOS, STOP = 0, 5


def recorded(parts, *, room=100, version=3, ignore_eos=False):
    """The completion of these parts, and how each of them ended it."""
    params = SamplingParams(max_new_tokens=room, stop_token_ids=(STOP,), ignore_eos=ignore_eos)
    response = Response(Request(id="r", prompt_ids=(1, 2), params=params, seed=0))
    rules, reasons = ResponseRules(frozenset({EOS}), 1000), []
    for tokens, logprobs in parts:
        reasons.append(response.record(tokens, logprobs, version, rules))
        if reasons[-1] is not None:
            break
    return response.completion(reasons[-1] or "abort"), reasons


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
@example([3, 0, 0, 4], 12, False)  # ends before its last token, twice
@example([3, 4, 0], 12, False)  # with it
@example([3, 4, 0], 2, False)  # and where there is no room for it
def test_a_response_is_the_same_whole_and_token_by_token(tokens, room, ignore_eos):
    logprobs = [-0.1 * (place + 1) for place in range(len(tokens))]
    whole, reasons = recorded([(tokens, logprobs)], room=room, ignore_eos=ignore_eos)
    single, last = recorded(
        [([t], [p]) for t, p in zip(tokens, logprobs, strict=True)], room=room, ignore_eos=ignore_eos
    )
    assert (whole, reasons[-1]) == (single, last[-1])
    size = len(whole.token_ids)
    assert (whole.token_ids, whole.logprobs) == (tuple(tokens[:size]), tuple(logprobs[:size])) and size <= room
    ends = {STOP} if ignore_eos else {EOS, STOP}
    assert not ends & set(whole.token_ids[:-1]) and (reasons == ["stop"]) == (whole.token_ids[-1] in ends)
    assert whole.versions == (3,) * size and whole.num_tokens == size


def test_columns_of_every_type_that_an_engine_may_give_are_taken():
    # 0.1 isn't a number of float32: what comes as float64 is kept so, digit by digit.
    for tokens, logprobs in (
        ([7, 8], [-0.1, -0.2]),
        ((7, 8), (-0.1, -0.2)),
        (array("q", [7, 8]), array("d", [-0.1, -0.2])),
        (np.array([7, 8]), np.array([-0.1, -0.2])),
    ):
        found, _ = recorded([(tokens, logprobs)])
        assert (found.token_ids, found.logprobs, found.versions) == ((7, 8), (-0.1, -0.2), (3, 3))
        assert (
            list(map(type, (*found.token_ids, *found.logprobs, *found.versions))) == [int] * 2 + [float] * 2 + [int] * 2
        )
    rounded, _ = recorded([([7], np.array([-0.1], np.float32))])
    assert rounded.logprobs == (float(np.float32(-0.1)),)


@pytest.mark.parametrize("logprobs", [[-1.0, math.nan], [-math.inf, -1.0], [math.inf, -math.inf]])
def test_a_log_prob_that_is_no_number_ends_the_run(logprobs):
    with pytest.raises(FloatingPointError, match="under weights of version 3 are infinite or not a number"):
        recorded([([7, 8], logprobs)])


def test_log_probs_as_low_as_float32_goes_are_numbers():
    lowest = float(np.finfo(np.float32).min)
    assert recorded([([7, 8], [lowest, lowest])])[0].logprobs == (lowest, lowest)


def test_stop_strings_are_looked_for_in_a_list_as_tokenizers_take_it():
    asked = []

    def decode(ids):
        asked.append(ids)
        return "".join(map(chr, ids))

    params = SamplingParams(max_new_tokens=9, stop_strings=("bc",))
    response = Response(Request(id="r", prompt_ids=(1,), params=params, seed=0))
    reason = response.record([*map(ord, "abcd")], [-1.0] * 4, 0, ResponseRules(frozenset({EOS}), 1000, decode))
    assert (reason, response.completion("stop").token_ids) == ("stop", tuple(map(ord, "abc")))
    assert asked == [[97], [97, 98], [97, 98, 99]]


def test_a_completion_keeps_what_the_response_had_when_it_was_made():
    response = Response(Request(id="r", prompt_ids=(1,), params=SamplingParams(max_new_tokens=9), seed=0))
    rules = ResponseRules(frozenset({EOS}), 1000)
    response.record([7], [-0.5], 1, rules)
    early = response.completion("abort")
    response.record([8], [-0.25], 2, rules)
    assert (early.token_ids, early.logprobs, early.versions) == ((7,), (-0.5,), (1,))
    late = response.completion("abort")
    assert (late.token_ids, late.logprobs, late.versions) == ((7, 8), (-0.5, -0.25), (1, 2))
    assert response.restart() == 2 and response.completion("abort").token_ids == ()


RULES = ResponseRules(frozenset({EOS, 12}), 1000, None, vocab_size=10)


def asked(prompt=(1, 2), **params):
    return Request(id="r", prompt_ids=prompt, params=SamplingParams(**{"max_new_tokens": 5, **params}), seed=0)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *[("temperature", value) for value in (-0.1, math.inf, math.nan)],
        *[("top_p", value) for value in (0.0, -1.0, 1.01, math.nan)],
        ("top_k", -2),
        *[("repetition_penalty", value) for value in (0.0, -1.0, math.inf, math.nan)],
    ],
)
def test_numbers_by_which_no_engine_can_draw_are_refused_before_an_engine_sees_them(field, wrong):
    with pytest.raises(ValueError, match=f"request 'r' has {field} {wrong}; expected"):
        RULES.check(asked(**{field: wrong}), ())


@pytest.mark.parametrize("token", [-1, 10, 1 << 70])
def test_a_token_that_the_model_has_no_embedding_of_is_refused_in_a_prompt(token):
    with pytest.raises(ValueError, match=f"token {token} in its prompt; the model has embeddings of tokens 0 to 9"):
        RULES.check(asked((1, token)), ())


def test_what_can_be_asked_of_any_engine_is_what_the_model_has():
    RULES.check(asked((0, 9), temperature=0, top_k=0), ())
    # 12 ends a turn for the tokenizer, and 10 to 12 are tokens that the model can't say.
    assert RULES.stop_token_ids(asked(stop_token_ids=(5, 9, 11, -3, 1 << 70))) == (EOS, 5, 9)
    assert [RULES.top_k(asked(top_k=top_k)) for top_k in (-1, 0, 1, 9, 10, 1 << 62)] == [-1, -1, 1, 9, -1, -1]
