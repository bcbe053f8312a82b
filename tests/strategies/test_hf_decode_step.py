"""Decode steps without modules: transformers' numbers for every family, and whatever isn't known goes through it."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from tiny_models import build_tiny_model

from roll.configs.catalog import family_table
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.hf import decode_step
from roll.strategies.engines.hf.decode_step import DecodeStep
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.engines.hf.shared_heads import share_heads
from roll.strategies.hf.cache import RowCache, forward
from roll.strategies.hf.cache_layers import LayerStates
from roll.strategies.training.pretrained import DTYPES, lay_by_input, load_causal_lm, load_named_tensors, named_tensors

FAMILIES = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, a head per key": {"num_key_value_heads": 4},
    "llama, untied": {"tie_word_embeddings": False},
    "llama, scaled": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
}


def loaded(folder, name="llama", dtype="fp32", **options):
    path = build_tiny_model(folder, name.split(",")[0], layers=3, **FAMILIES.get(name, {}), **options)
    model = load_causal_lm(ModelArgs(model_name_or_path=str(path)), DTYPES[dtype])
    share_heads(model)
    with torch.no_grad():  # norms of ones and biases of zeros would hide that they are left out
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.4, len(parameter)))
    return model


def engine(model, **options):
    return HfInfer(model, eos_token_ids=(), pad_token_id=0, max_context=200, max_running_requests=3, **options)


def played(played_by, greedy=False):
    """Responses to prompts of several lengths, which end one by one; one comes while the others are under way."""
    played_by.submit(
        [
            Request(
                id=str(i),
                prompt_ids=tuple((7 * i + j) % 90 + 5 for j in range(length)),
                params=SamplingParams(max_new_tokens=6 + 40 * i, temperature=0.0 if greedy else 1.0),
                seed=i,
                order=(i, 0, 0),
                affinity="",
            )
            for i, length in enumerate((70, 5, 31, 12))
        ]
    )
    done = played_by.poll(400)
    assert len(done) == 4
    return sorted((c.id, c.token_ids, c.logprobs) for c in done)


def test_every_family_with_decode_steps_is_one_of_these():
    known = {name for name, family in family_table.FAMILIES.items() if family.decode_step}
    assert {name.split(",")[0] for name in FAMILIES} == known


@pytest.mark.parametrize("name", FAMILIES)
def test_responses_have_transformers_numbers(tmp_path, name):
    model = loaded(tmp_path, name)
    fast = engine(model)
    assert fast._decode_step is not None
    slow = engine(model)
    slow._decode_step = None
    for (id_, tokens, logprobs), (other, expected_tokens, expected) in zip(played(fast), played(slow), strict=True):
        assert (id_, tokens) == (other, expected_tokens)
        assert torch.allclose(torch.tensor(logprobs), torch.tensor(expected), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_logits_in_half_precision_are_transformers_own(tmp_path, name):
    model = loaded(tmp_path, name, "bf16")
    step = DecodeStep.of(model)
    assert step is not None
    padding, ids = torch.tensor([0, 3]), torch.arange(5, 17).view(2, 6)
    caches = [RowCache([LayerStates()] * 3, padding) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            forward(model, ids, cache)
        for token in (7, 20, 11):
            tokens = torch.tensor([token, token + 1])
            expected = forward(model, tokens[:, None], caches[0])
            found = step(tokens, caches[1], contextlib.nullcontext())
            assert found.dtype == torch.bfloat16
            assert torch.allclose(found.float(), expected.float(), rtol=0, atol=0.02)


def test_new_weights_reach_the_steps(tmp_path):
    fast = engine(loaded(tmp_path / "a"))
    before = played(fast, greedy=True)
    other = loaded(tmp_path / "b", seed=1)
    fast.update_weights(1, [(name, tensor.clone()) for name, tensor in named_tensors(other)])
    expected = played(engine(other), greedy=True)
    assert played(fast, greedy=True) == expected != before


def test_a_model_that_computes_something_else_decodes_through_transformers(tmp_path, caplog):
    model = loaded(tmp_path)
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with caplog.at_level(logging.INFO, logger=decode_step.__name__):
        assert DecodeStep.of(model) is None
    assert "its logits differ" in caplog.text


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("mistral", {"sliding_window": 8}, "sliding window"),
        ("qwen2_moe", {}, "not one of"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "type dynamic"),
    ],
)
def test_what_isnt_known_decodes_through_transformers(tmp_path, caplog, family, options, why):
    model = load_causal_lm(
        ModelArgs(model_name_or_path=str(build_tiny_model(tmp_path, family, **options))), torch.float32
    )
    with caplog.at_level(logging.INFO, logger=decode_step.__name__):
        assert engine(model)._decode_step is None
    assert why in caplog.text


def test_a_class_of_the_same_name_and_another_attention_arent_trusted(tmp_path, caplog):
    eager = load_causal_lm(
        ModelArgs(model_name_or_path=str(build_tiny_model(tmp_path)), attn_implementation="eager"), torch.float32
    )
    model = loaded(tmp_path)
    model.__class__ = type("LlamaForCausalLM", (type(model),), {})
    with caplog.at_level(logging.INFO, logger=decode_step.__name__):
        assert DecodeStep.of(eager) is DecodeStep.of(model) is None
    assert "attention by eager" in caplog.text
    assert "not one of" in caplog.text


def test_rows_that_go_leave_the_others_whole():
    cache = RowCache([LayerStates()] * 2, torch.zeros(5, dtype=torch.int64))
    states = torch.arange(5.0)[:, None, None, None].expand(5, 2, 3, 4)
    for layer in cache.layers:
        layer.update(states, states + 10)
    order = cache.keep([1, 2, 4])
    assert sorted(order) == [1, 2, 4]
    for layer in cache.layers:
        keys, values = layer.update(states[order][:, :, :1], states[order][:, :, :1] + 10)
        assert keys.shape == (3, 2, 4, 4)
        for place, row in enumerate(order):
            assert (keys[place] == row).all()
            assert (values[place] == row + 10).all()


def test_padding_that_no_row_needs_any_more_goes_with_its_row():
    cache = RowCache([LayerStates()], torch.tensor([0, 2, 1]))
    states = torch.arange(3.0)[:, None, None, None].expand(3, 1, 4, 2)
    cache.layers[0].update(states, states)
    assert cache.seen().sum(-1).flatten().tolist() == [4, 2, 3]
    order = cache.keep([1, 2])
    assert cache.length == 3
    assert cache.padding.tolist() == [{1: 1, 2: 0}[row] for row in order]
    assert cache.keep([0]) == [0]


def test_copies_of_rows_go_to_the_end_and_into_room_that_is_there():
    cache = RowCache([LayerStates()], torch.tensor([1, 0]))
    states = torch.arange(2.0)[:, None, None, None].expand(2, 1, 3, 2)
    layer = cache.layers[0]
    layer.update(states, states + 10)
    cache.repeat([1], room=5)
    room = layer.keys.data_ptr()
    cache.repeat([0, 2], room=5)
    assert layer.keys.data_ptr() == room
    keys, values = layer.update(torch.full((5, 1, 1, 2), 7.0), torch.full((5, 1, 1, 2), 8.0))
    assert keys[:, 0, :, 0].tolist() == [[0, 0, 0, 7], [1, 1, 1, 7], [1, 1, 1, 7], [0, 0, 0, 7], [1, 1, 1, 7]]
    assert values[:, 0, 3, 0].tolist() == [8] * 5
    assert cache.padding.tolist() == [1, 0, 0, 1, 0]


def test_rows_begin_as_others_do():
    cache = RowCache([LayerStates()], torch.tensor([1, 0]))
    states = torch.tensor([[0.0, 1, 2, 3], [5, 6, 7, 8]])[:, None, :, None]
    cache.layers[0].update(states, -states)
    begun = cache.beginnings(torch.tensor([1, 0, 0, 1]), torch.tensor([4, 3, 1, -1]))
    # The second row has a position of padding before 1, 2, 3. A row of -1 tokens has one of what comes next as padding.
    assert begun.padding.tolist() == [0, 1, 3, 5]
    keys = begun.layers[0].keys[:, 0, :4, 0]
    assert keys[0].tolist() == [5, 6, 7, 8]
    assert keys[1, 1:].tolist() == [1, 2, 3]
    assert keys[2, 3:].tolist() == [1]
    assert keys.isfinite().all()


def test_room_that_was_never_filled_may_hold_anything(tmp_path, monkeypatch):
    model = loaded(tmp_path)
    expected = played(engine(model))
    make, made = torch.Tensor.new_empty, []

    def new_empty(self, *size, **options):
        made.append(make(self, *size, **options).fill_(torch.nan))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    assert played(engine(model)) == expected
    assert made


def test_load_named_tensors_changes_the_tensors_that_the_steps_hold(tmp_path):
    model = loaded(tmp_path)
    step = DecodeStep.of(model)
    head = step._head._transposed
    load_named_tensors(model, [(name, torch.zeros_like(tensor)) for name, tensor in named_tensors(model)])
    assert not head.any()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_lie_by_input_and_stay_the_same_parameters(tmp_path, tied):
    model = loaded(tmp_path, tie_word_embeddings=tied)
    before = {name: (tensor, tensor.clone()) for name, tensor in named_tensors(model)}
    lay_by_input(model)
    after = dict(named_tensors(model))
    assert {name: id(tensor) for name, tensor in after.items()} == {name: id(old) for name, (old, _) in before.items()}
    assert all(torch.equal(after[name], numbers) for name, (_, numbers) in before.items())
    assert model.model.layers[0].mlp.gate_proj.weight.t().is_contiguous()
    assert model.get_input_embeddings().weight.is_contiguous()
    assert model.lm_head.weight.is_contiguous() == tied
    changed = {name: numbers + 1 for name, (_, numbers) in before.items()}
    load_named_tensors(model, changed.items())
    assert all(torch.equal(after[name], changed[name]) for name in before)
