"""Hybrids of attention and recurrent layers: sampled as they are scored, padded or packed.

All models are float32 and far from uniform, so that differences show.
"""

from __future__ import annotations

import pytest
import torch
from layout_contract import check_layouts
from test_hf_prefix_sharing import BATCHES, OFF, ON, PACKED, played, tokens
from test_strategies_hf_infer import make_engine, reference_logprobs, request, run, tokens_read
from tiny_models import HYBRIDS, build_tiny_model
from train_contract import LOSS, build, make_batch, make_spec

from roll.strategies.engines.hf import hf_infer
from roll.strategies.hf.adapter_config import chosen_layers, leaves
from roll.strategies.hf.cache import RowCache
from roll.strategies.hf.cache_layers import LayerStates, layer_states
from roll.strategies.hf.start_check import RowsAlone, check_sampled_rows
from roll.strategies.training.pretrained import load_named_tensors, named_tensors


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request, tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("hybrids") / request.param, request.param, initializer_range=0.1)


def groups(**params):
    """Three prompts of unequal lengths that begin alike, four responses of each."""
    params = {"ignore_eos": True, "temperature": 0.8, **params}
    prompts = [[*range(5, 35), *range(40, 42 + 3 * i)] for i in range(3)]
    return [
        request(f"{i}.{j}", prompt, order=4 * i + j, max_new_tokens=5 + (i + j) % 4, **params)
        for i, prompt in enumerate(prompts)
        for j in range(4)
    ]


def test_rows_that_come_go_and_split_are_sampled_as_each_row_is_scored_alone(hybrid):
    engine, model, _ = make_engine(hybrid, max_running_requests=7)
    check_sampled_rows(RowsAlone(model, longest=64))
    requests = [*groups(), request("short", [7], order=20, max_new_tokens=9, ignore_eos=True)]
    done = run(engine, requests)
    for req in requests:
        expected = reference_logprobs(model, req, done[req.id])
        torch.testing.assert_close(torch.tensor(done[req.id].logprobs), expected, atol=5e-5, rtol=0)
    alone, *_ = make_engine(hybrid)
    assert run(alone, requests[3:4])["0.3"].token_ids == done["0.3"].token_ids


def test_an_abort_and_new_weights_on_the_way_leave_states_that_fit_the_tokens(hybrid):
    engine, model, _ = make_engine(hybrid, max_running_requests=9)
    requests = groups()
    engine.submit(requests)
    done = {one.id: one for one in engine.poll(2)}
    gone = {one.id for one in engine.abort(["0.0", "1.2", "2.3"])}
    done.update({one.id: one for one in engine.poll(1)})
    old, new = ({name: tensor.detach() * by for name, tensor in named_tensors(model)} for by in (1.0, 1.1))
    engine.update_weights(3, new.items())
    while len(done) < len(requests) - len(gone):
        done.update({one.id: one for one in engine.poll(2)})
    assert any(set(one.versions) == {0, 3} for one in done.values())
    for req in requests:
        if req.id in gone:
            continue
        tables = []
        for weights in (old, new):
            load_named_tensors(model, weights.items())
            tables.append(reference_logprobs(model, req, done[req.id]))
        versions = torch.tensor(done[req.id].versions)
        expected = torch.where(versions == 0, *tables)
        torch.testing.assert_close(torch.tensor(done[req.id].logprobs), expected, atol=5e-5, rtol=0)


def test_prompts_that_begin_alike_are_computed_whole_because_states_are_those_of_the_last_token(model_of, monkeypatch):
    monkeypatch.setattr(hf_infer, "_WORTH_SHARING", 1)
    engine, *_ = make_engine(model_of("qwen3_5_text"))
    seen = tokens_read(monkeypatch)
    run(engine, groups())
    assert seen == [[3, 38]]


def test_a_layer_keeps_what_transformers_cache_for_it_keeps(model_of):
    from transformers import AutoConfig

    def kinds(family):
        return layer_states(AutoConfig.from_pretrained(model_of(family)))

    states, keys, both = LayerStates(keys=False, states=1), LayerStates(), LayerStates(states=1)
    assert kinds("llama") == (keys, keys)
    assert kinds("qwen3_5_text") == (states, states, keys)
    assert kinds("falcon_h1") == (both, both)


def test_states_go_where_their_rows_go():
    cache = RowCache([LayerStates(keys=False, states=1), LayerStates()], torch.tensor([1, 0, 0, 0]))
    layer, numbers = cache.layers[0], torch.arange(4.0)[:, None, None]
    cache.layers[1].update(*(numbers[:, None].expand(4, 1, 3, 2),) * 2)
    read = layer.update_conv_state(numbers.expand(4, 2, 3), conv_kernel_size=4)
    assert read.shape == (4, 2, 4)
    assert read[3, 0].tolist() == [0, 3, 3, 3]
    layer.update_recurrent_state(numbers.expand(4, 2, 2).clone())

    def rows():
        found = [states[:, 0, -1].tolist() for states in (layer.conv_states[0], layer.recurrent_states[0])]
        assert found[0] == found[1]
        return found[0]

    assert cache.keep([1, 3]) == [3, 1]
    assert rows() == [3, 1]
    cache.repeat([1, 0, 1], room=8)
    assert rows() == [3, 1, 1, 3, 1]
    other = RowCache([LayerStates(keys=False, states=1), LayerStates()], torch.tensor([0]))
    other.layers[1].update(*(torch.zeros(1, 1, 5, 2),) * 2)
    other.layers[0].update_conv_state(torch.full((1, 2, 5), 9.0), conv_kernel_size=4)
    other.layers[0].update_recurrent_state(torch.full((1, 2, 2), 9.0))
    cache.adopt(other)
    assert rows() == [3, 1, 1, 3, 1, 9]
    cache.select(torch.tensor([5, 0]))
    assert rows() == [9, 3]
    assert cache.recurrent
    with pytest.raises(AssertionError):
        cache.shorten(1)


# --- training --------------------------------------------------------------------------------------------------------


def alike(mine, theirs):
    """Log-probs and loss to 1e-5, gradients to 1e-4 of their tensor's largest, or of a hundredth of the largest of all:
    that of a decay is a sum which nearly cancels, of numbers that are rounded by where in a chunk they stand."""
    for name, column in theirs[0].columns().items():
        torch.testing.assert_close(mine[0].columns()[name], column, rtol=0, atol=1e-5)
    assert mine[1] == pytest.approx(theirs[1], abs=1e-5)
    assert mine[2].keys() == theirs[2].keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs[2].values())
    for name, gradient in theirs[2].items():
        bound = 1e-4 * max(float(gradient.abs().max()), 0.01 * largest)
        torch.testing.assert_close(mine[2][name], gradient, rtol=0, atol=bound, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(("kind", "recompute"), [("answers", True), ("turns", False)])
def test_padded_packed_and_shared_rows_train_as_rows_by_themselves(hybrid, kind, recompute):
    model, alone = {"disable_gradient_checkpointing": not recompute}, {"per_device_train_batch_size": 1}
    spec = make_spec(hybrid, worker={**OFF, "infer_batch_size": 1}, model=model, training=alone)
    expected = played(spec, BATCHES[kind])
    shapes = []
    for worker in (OFF, {**OFF, **PACKED}, ON, {**ON, **PACKED}):
        found = played(make_spec(hybrid, worker=worker, model=model), BATCHES[kind])
        alike(found, expected)
        shapes.append(tokens(found[3]))
    assert shapes[1] == tokens(expected[3]) < shapes[0]
    assert shapes[2] == shapes[3] < 0.7 * shapes[1]


TRAINED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid")


@pytest.mark.parametrize(("strategy", "world"), [("fsdp2_train", 2), ("deepspeed_train", 2)])
def test_hybrids_train_alike_in_every_layout(ranks, model_of, strategy, world):
    options = {"zero_optimization": {"stage": 3}} if strategy == "deepspeed_train" else {}
    cases = {
        f"{family} {way}": (model_of(family), options, {"worker": worker})
        for family in TRAINED
        for way, worker in {"padded": OFF, "packed": {**OFF, **PACKED}, "shared": {**ON, **PACKED}}.items()
    }
    check_layouts(ranks, strategy, world, cases)


def test_adapters_go_beside_the_projections_of_recurrent_layers_and_not_beside_convolutions(model_of):
    from transformers import AutoModelForCausalLM

    def targets(family, *wanted):
        return leaves(chosen_layers(AutoModelForCausalLM.from_pretrained(model_of(family)), wanted))

    projections = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    assert set(projections) <= set(targets("qwen3_5_text"))
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj"} <= set(targets("qwen3_next"))
    assert {"q_proj", "in_proj"} <= set(targets("granitemoehybrid"))
    # The kernels of state-space layers take this weight, and adapters beside it would be left out.
    assert "out_proj" not in targets("granitemoehybrid")
    assert targets("qwen3_5_text", "in_proj_qkv", "q_proj") == ["in_proj_qkv", "q_proj"]
    with pytest.raises(ValueError, match="has no linear layer 'conv1d'"):
        targets("qwen3_5_text", "conv1d")


def test_all_adapters_of_a_hybrid_learn(hybrid):
    strategy = build(make_spec(hybrid, model={"lora_rank": 2}))
    strategy.train_step(make_batch(), LOSS)
    still = [name for name, layer in strategy._adapters.layers.items() if not layer.lora_B["default"].weight.any()]
    assert still == []
