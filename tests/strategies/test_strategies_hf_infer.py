"""`hf_infer`: exact log-probs, draws that depend on the request alone, aborts, weight updates."""

from __future__ import annotations

import math

import pytest
import torch

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.hf import hf_infer
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.engines.hf.token_sampler import sample
from roll.strategies.training.pretrained import (
    context_length,
    eos_token_ids,
    load_causal_lm,
    load_tokenizer,
    named_tensors,
)
from roll.utils.seeding import stable_hash


def make_engine(path, **options):
    args = ModelArgs(model_name_or_path=str(path))
    tokenizer, model = load_tokenizer(args), load_causal_lm(args, torch.float32)
    options.setdefault("max_context", context_length(model))
    engine = HfInfer(
        model,
        eos_token_ids=eos_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        decode=tokenizer.decode,
        **options,
    )
    return engine, model, tokenizer


def request(name, prompt, *, order=0, seed=None, **params):
    params.setdefault("max_new_tokens", 6)
    return Request(
        id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        seed=stable_hash(name if seed is None else seed, bits=128),
        order=(order,),
    )


def run(engine, requests, budget=3):
    engine.submit(requests)
    done = {}
    for _ in range(1000):
        done.update({c.id: c for c in engine.poll(budget)})
        if len(done) == len(requests):
            return done
    raise AssertionError(f"only {sorted(done)} finished")


def reference_logprobs(model, req, completion):
    ids = torch.tensor([[*req.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0].float() / (req.params.temperature or 1.0)
    table, start = logits.log_softmax(-1), len(req.prompt_ids)
    return torch.tensor([table[start + i - 1, token].item() for i, token in enumerate(completion.token_ids)])


def mixed_requests():
    return [
        request(
            f"r{i}",
            range(7, 10 + 3 * (i % 4)),
            order=i,
            max_new_tokens=4 + i % 5,
            temperature=(1.0, 0.7, 0.0)[i % 3],
            ignore_eos=True,
        )
        for i in range(11)
    ]


def test_sampling_logprobs_equal_a_full_forward_for_ragged_prompts_and_refilled_slots(tiny_family):
    engine, model, _ = make_engine(tiny_family, max_running_requests=4)
    requests = mixed_requests()
    done = run(engine, requests)
    for req in requests:
        completion = done[req.id]
        assert len(completion.token_ids) == req.params.max_new_tokens
        expected = reference_logprobs(model, req, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def solved_examples(**params):
    """Prompts of two kinds with 12 and 16 tokens in common, one of a kind of its own, questions of 2 to 7 tokens."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4, **params}
    prompts = [[*range(5 + 30 * (i % 2), 17 + 34 * (i % 2)), *range(90 - i, 92 + i % 6 - i)] for i in range(9)]
    return [request(f"r{i}", prompt, order=i, **params) for i, prompt in enumerate([*prompts, range(60, 75)])]


def tokens_read(monkeypatch):
    """[rows, tokens] of every pass over prompts, which have more than one."""
    seen, forward = [], hf_infer.forward

    def watched(model, ids, cache):
        if ids.shape[1] > 1:
            seen.append(list(ids.shape))
        return forward(model, ids, cache)

    monkeypatch.setattr(hf_infer, "forward", watched)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_that_begin_alike_compute_their_beginning_once(tiny_family, monkeypatch, temperature):
    monkeypatch.setattr(hf_infer, "_WORTH_SHARING", 24)
    engine, model, _ = make_engine(tiny_family)
    requests = solved_examples(temperature=temperature)
    seen = tokens_read(monkeypatch)
    done = run(engine, requests)
    # The one of its own; the 12 and the 16 tokens that five and four others begin with; their rests of 2 to 7 tokens.
    assert seen == [[1, 15], [2, 16], [9, 7]]
    for req in requests:
        expected = reference_logprobs(model, req, done[req.id])
        torch.testing.assert_close(torch.tensor(done[req.id].logprobs), expected, atol=1e-5, rtol=0)
    monkeypatch.setattr(hf_infer, "_WORTH_SHARING", 10**9)
    del seen[:]
    whole = run(engine, requests)
    assert seen == [[10, 23]]
    assert {name: one.token_ids for name, one in whole.items()} == {name: one.token_ids for name, one in done.items()}


def test_rows_of_one_length_share_their_beginning_without_padding(tiny_family, monkeypatch):
    monkeypatch.setattr(hf_infer, "_WORTH_SHARING", 1)
    engine, model, _ = make_engine(tiny_family)
    requests = [request(f"r{i}", [*range(5, 15), 40 + i, 60], order=i, temperature=0.0) for i in range(3)]
    seen = tokens_read(monkeypatch)
    done = run(engine, requests)
    assert seen == [[1, 10], [3, 2]]
    for req in requests:
        expected = reference_logprobs(model, req, done[req.id])
        torch.testing.assert_close(torch.tensor(done[req.id].logprobs), expected, atol=1e-5, rtol=0)


def test_a_beginning_has_a_pass_of_its_own_where_that_saves_enough_tokens(monkeypatch):
    monkeypatch.setattr(hf_infer, "_WORTH_SHARING", 6)
    a, b, c, d = (1, 2, 3, 8), (1, 2, 3, 9, 9), (1, 2, 7, 7, 7, 7), (5, 5)
    assert hf_infer._by_beginning([d, b, a]) == ([d, b, a], [])  # 3 tokens of one row
    more = (1, 2, 3, 9, 8)
    # c has only 2 of its 6 tokens in common with them: less than half.
    assert hf_infer._by_beginning([d, b, c, more, a]) == ([d, c], [(3, [a, more, b])])
    # (1, 2, 3) is a whole context: its last token must be computed for what comes after it.
    e, f = (1, 2, 3, 7), (1, 2, 3, 9)
    assert hf_infer._by_beginning([a, (1, 2, 3), f, e]) == ([], [(2, [(1, 2, 3), e, a, f])])
    # Two kinds of prompts save 3 tokens each, which pays for the pass that computes both beginnings.
    other = [(4, 4, 4, 1), (4, 4, 4, 2)]
    assert hf_infer._by_beginning([d, b, *other, a]) == ([d], [(3, [a, b]), (3, other)])


def test_prompts_share_a_beginning_within_the_budget_of_a_pass(tiny_family, monkeypatch):
    monkeypatch.setattr(hf_infer, "_WORTH_SHARING", 24)
    requests = solved_examples(temperature=1.0)
    engine, *_ = make_engine(tiny_family)
    expected = run(engine, requests)
    monkeypatch.setattr(hf_infer, "_PREFILL_TOKENS", 20)
    seen = tokens_read(monkeypatch)
    done = run(engine, requests)
    # Rests of 2, 4 and 6 tokens after the first beginning, of 3, 5 and 7 after the second, by their first token.
    assert all(rows == 1 or rows * width <= 20 for rows, width in seen)
    assert sum(rows for rows, _ in seen) == 12
    assert all(done[name].token_ids == one.token_ids for name, one in expected.items())


def rows_read(monkeypatch, engine):
    """Rows of every decode step."""
    seen, forward_rows = [], engine._forward_rows

    def watched(large):
        seen.append(len(engine._cache))
        return forward_rows(large)

    monkeypatch.setattr(engine, "_forward_rows", watched)
    return seen


def test_responses_of_one_prompt_are_one_row_until_they_draw_different_tokens(tiny_family, monkeypatch):
    engine, model, _ = make_engine(tiny_family)
    options = {"ignore_eos": True, "temperature": 0.3}
    requests = [
        request(f"{i}", [9, 8, *range(2 * prompt)], order=i, max_new_tokens=3 + i % 3, **options)
        for i, prompt in enumerate([0, 1] * 8)
    ]
    seen = rows_read(monkeypatch, engine)
    done = run(engine, requests)
    expected = []
    for step in range(1, 5):
        left = [req for req in requests if req.params.max_new_tokens > step]
        expected.append(len({(req.prompt_ids, *done[req.id].token_ids[:step]) for req in left}))
    assert seen == expected
    assert 2 < seen[0] < 16  # some drew the same, some didn't
    for req in requests:
        logprobs = reference_logprobs(model, req, done[req.id])
        torch.testing.assert_close(torch.tensor(done[req.id].logprobs), logprobs, atol=1e-5, rtol=0)
        alone, *_ = make_engine(tiny_family)
        assert run(alone, [req])[req.id].token_ids == done[req.id].token_ids


def test_greedy_responses_of_one_prompt_are_one_row_to_their_end(tiny_model, monkeypatch):
    engine, *_ = make_engine(tiny_model)
    options = {"ignore_eos": True, "temperature": 0.0, "max_new_tokens": 5}
    seen = rows_read(monkeypatch, engine)
    done = run(engine, [request(f"{i}", [9, 8, 7], order=i, **options) for i in range(6)])
    assert seen == [1, 1, 1, 1]
    assert len({one.token_ids for one in done.values()}) == 1


def test_responses_of_one_row_keep_their_own_ways_to_draw(tiny_model):
    engine, *_ = make_engine(tiny_model)
    ways = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.4}, {"repetition_penalty": 3.0}]
    requests = [
        request(f"{i}", [9, 8, 7], order=i, max_new_tokens=8, ignore_eos=True, **ways[i % len(ways)]) for i in range(15)
    ]
    together = run(engine, requests)
    for req in requests:
        alone = run(engine, [req])[req.id]
        assert alone.token_ids == together[req.id].token_ids
        assert alone.logprobs == pytest.approx(together[req.id].logprobs, abs=1e-5)


def test_responses_that_are_aborted_leave_those_of_their_row(tiny_model):
    options = {"ignore_eos": True, "temperature": 0.5, "max_new_tokens": 9}
    requests = [request(f"{i}", [9, 8, 7], order=i, **options) for i in range(8)]
    engine, *_ = make_engine(tiny_model)
    expected = run(engine, requests)
    engine.submit(requests)
    engine.poll(2)
    stopped = {one.id: one for one in engine.abort(["0", "3", "4"])}
    assert all(one.token_ids == expected[name].token_ids[:2] for name, one in stopped.items())
    done = [one for _ in range(9) for one in engine.poll(1)]
    assert {one.id: one.token_ids for one in done} == {
        name: one.token_ids for name, one in expected.items() if name not in stopped
    }


def test_a_draw_depends_on_the_request_and_not_on_its_company(tiny_model):
    engine, *_ = make_engine(tiny_model, max_running_requests=4)
    together = run(engine, mixed_requests())
    for req in mixed_requests():
        alone = run(engine, [req])
        assert alone[req.id].token_ids == together[req.id].token_ids


def test_the_same_plan_gives_the_same_bits_in_whatever_order_it_is_submitted(tiny_model):
    engine, *_ = make_engine(tiny_model, max_running_requests=4)
    assert run(engine, mixed_requests()) == run(engine, mixed_requests()[::-1])


def test_sampled_frequencies_follow_the_models_distribution(tiny_model):
    engine, model, _ = make_engine(tiny_model, max_running_requests=500)
    requests = [request(f"r{i}", [9, 8], max_new_tokens=1, temperature=0.1, ignore_eos=True) for i in range(1000)]
    drawn = torch.tensor([c.token_ids[0] for c in run(engine, requests).values()])
    with torch.no_grad():
        probs = (model(torch.tensor([[9, 8]])).logits[0, -1].float() / 0.1).softmax(-1)
    counts = torch.bincount(drawn, minlength=len(probs)) / 1000
    # Standard error of a frequency is at most sqrt(0.25 / 1000) = 0.016.
    assert (counts - probs).abs().max() < 0.06


def test_top_k_and_top_p_draw_from_the_kept_tokens_and_report_the_logprobs_of_that_draw(tiny_model):
    engine, model, _ = make_engine(tiny_model)
    with torch.no_grad():
        probs = model(torch.tensor([[9, 8]])).logits[0, -1].float().softmax(-1)
    ordered = probs.sort(descending=True)
    nucleus = set(ordered.indices[: int((ordered.values.cumsum(0) < 0.3).sum()) + 1].tolist())
    for options, allowed in (({"top_k": 3}, set(ordered.indices[:3].tolist())), ({"top_p": 0.3}, nucleus)):
        requests = [request(f"{options}{i}", [9, 8], max_new_tokens=1, **options) for i in range(60)]
        for completion in run(engine, requests, budget=200).values():
            token = completion.token_ids[0]
            assert token in allowed
            mass = float(probs[list(allowed)].sum())
            assert completion.logprobs[0] == pytest.approx(float((probs[token] / mass).log()), abs=1e-5)


def test_responses_end_at_eos_stop_tokens_stop_strings_and_the_context(tiny_model):
    engine, _, tokenizer = make_engine(tiny_model, max_context=12)
    free = run(engine, [request("free", [9, 8], max_new_tokens=50, ignore_eos=True)])["free"]
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 10  # 12 positions, 2 of them prompt
    same = {"seed": "free", "max_new_tokens": 50, "ignore_eos": True}
    third = free.token_ids[2]
    stopped = run(engine, [request("token", [9, 8], stop_token_ids=(third,), **same)])["token"]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    text = tokenizer.decode(free.token_ids[1:4])
    stopped = run(engine, [request("string", [9, 8], stop_strings=(text,), **same)])["string"]
    assert stopped.finish_reason == "stop"
    assert text in tokenizer.decode(stopped.token_ids)
    assert text not in tokenizer.decode(stopped.token_ids[:-1])


def test_repetition_penalty_makes_seen_tokens_rarer(tiny_model):
    engine, *_ = make_engine(tiny_model)
    options = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0.0}
    plain = run(engine, [request("plain", [9, 8], **options)])["plain"]
    spread = run(engine, [request("spread", [9, 8], repetition_penalty=5.0, **options)])["spread"]
    assert len(set(spread.token_ids)) > len(set(plain.token_ids))


def test_abort_returns_what_was_sampled_and_leaves_the_others_as_they_were(tiny_model):
    engine, *_ = make_engine(tiny_model, max_running_requests=4)
    expected = run(engine, [request("stays", [9, 8], max_new_tokens=8, ignore_eos=True)])["stays"]
    pair = [
        request("stays", [9, 8], max_new_tokens=8, ignore_eos=True),
        request("goes", [9, 8, 7], max_new_tokens=8, ignore_eos=True),
    ]
    engine.submit(pair)
    assert engine.poll(3) == []
    (gone,) = engine.abort(["goes", "never heard of"])
    assert (gone.id, gone.finish_reason, len(gone.token_ids)) == ("goes", "abort", 3)
    (stayed,) = engine.poll(100)
    assert stayed.token_ids == expected.token_ids


def test_a_weight_update_reaches_running_requests_and_each_token_names_its_version(tiny_family):
    engine, model, _ = make_engine(tiny_family)
    engine.submit([request("r", [9, 8], max_new_tokens=6, ignore_eos=True)])
    engine.poll(2)
    weights = {name: tensor.detach() * 1.5 for name, tensor in named_tensors(model)}
    engine.update_weights(7, weights.items())
    (completion,) = engine.poll(100)
    assert completion.versions == (0, 0, 7, 7, 7, 7)
    req = request("r", [9, 8])
    under_new = reference_logprobs(model, req, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs[2:]), under_new[2:], atol=1e-5, rtol=0)


def test_with_restarts_a_weight_update_restarts_running_responses(tiny_model):
    engine, model, _ = make_engine(tiny_model, partial_rollout="restart")
    engine.submit([request("r", [9, 8], max_new_tokens=6, ignore_eos=True)])
    engine.poll(2)
    weights = {name: tensor.detach() * 1.5 for name, tensor in named_tensors(model)}
    engine.update_weights(7, weights.items())
    (completion,) = engine.poll(100)
    assert completion.versions == (7,) * 6
    under_new = reference_logprobs(model, request("r", [9, 8]), completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), under_new, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if "norm" not in k}, "untouched"),
        (lambda w: {**w, "extra": torch.zeros(1)}, "'extra'"),
        (lambda w: {k: v[:1] for k, v in w.items()}, "has shape"),
    ],
)
def test_an_incomplete_or_foreign_weight_update_is_refused(tiny_model, change, message):
    engine, model, _ = make_engine(tiny_model)
    weights = change({name: tensor.detach().clone() for name, tensor in named_tensors(model)})
    with pytest.raises(ValueError, match=message):
        engine.update_weights(1, weights.items())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", []), "empty prompt"),
        (request("r", [9] * 300), "300 prompt tokens"),
        (request("r", [9], max_new_tokens=0), "max_new_tokens"),
    ],
)
def test_a_malformed_request_is_refused_before_anything_is_queued(tiny_model, bad, message):
    engine, *_ = make_engine(tiny_model)
    with pytest.raises(ValueError, match=message):
        engine.submit([request("good", [9]), bad])
    assert engine.poll(10) == []


def test_one_id_can_run_only_once(tiny_model):
    engine, *_ = make_engine(tiny_model)
    with pytest.raises(ValueError, match="already running"):
        engine.submit([request("r", [9]), request("r", [8])])


def test_a_greedy_token_is_that_of_the_largest_logit_even_where_log_probs_round_to_the_same():
    logits = torch.full((1, 1 << 15), 1e-9)
    logits[0, 77] = 2e-9
    tokens, logprobs = sample(logits, [SamplingParams(max_new_tokens=1, temperature=0.0)], [[0.0]], [None])
    assert tokens.tolist() == [[77]]
    assert logprobs.item() == pytest.approx(-15 * math.log(2))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "granite"])  # with decode steps of its own, and through transformers
def test_an_engine_computes_with_weights_that_it_borrows(model_of, family):
    path = model_of(family)
    (engine, model, _), (apart, other, _) = make_engine(path), make_engine(path)
    asked = [request(str(i), range(5, 8 + i), order=i, max_new_tokens=9) for i in range(3)]
    lent = {name: torch.sin(tensor * 1.3) for name, tensor in named_tensors(other)}
    odd, crossed = next(iter(lent)), next(name for name in lent if name.endswith("q_proj.weight"))
    apart_from = {odd: lent.pop(odd), crossed: lent.pop(crossed)}
    unlike = {odd: apart_from[odd].double(), crossed: apart_from[crossed].contiguous(), "unknown": torch.zeros(2)}
    engine.borrow_weights({**lent, **unlike})
    for version in (1, 2):
        weights = {**lent, **apart_from}
        apart.update_weights(version, iter(weights.items()))
        engine.update_weights(version, iter(weights.items()))
        assert run(engine, asked) == run(apart, asked)
        for tensor in weights.values():
            tensor.mul_(1.1)  # a step of the trainer
    borrowed = {
        name for name, tensor in named_tensors(model) if tensor.data_ptr() in {t.data_ptr() for t in lent.values()}
    }
    assert borrowed == set(lent)


def test_no_weight_of_an_engine_lies_in_the_file_that_it_was_read_from(model_of):
    for family in ("llama", "granite"):
        _, model, _ = make_engine(model_of(family))
        assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_of_short_responses_has_no_room_that_they_never_fill(tiny_model, monkeypatch, temperature):
    monkeypatch.setattr(hf_infer, "_WORTH_SHARING", 24)
    engine, _, _ = make_engine(tiny_model)
    beginning = range(5, 75)
    params = {"max_new_tokens": 5, "temperature": temperature, "ignore_eos": True}
    engine.submit([request(str(i), [*beginning, *range(3 + i)], order=i, **params) for i in range(4)])
    engine.poll(3)
    rooms = {states.shape[2] for layer in engine._cache.layers for states in (layer.keys, layer.values)}
    # 76 tokens of the longest prompt and 5 of the response; behind a shared beginning also what is computed again.
    assert min(rooms) >= 76 + 5
    assert max(rooms) <= 76 + 5 + 6 < 128
