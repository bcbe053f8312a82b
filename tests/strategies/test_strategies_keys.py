"""Keys that every training backend must act on alike: what a pass looks like, and how a model is loaded."""

from __future__ import annotations

import pytest
import torch
from layout_contract import each, layout_spec
from train_contract import LOSS, build, make_batch

BACKENDS = {
    "fsdp2": ("fsdp2_train", {}),
    "zero 2": ("deepspeed_train", {"zero_optimization": {"stage": 2}}),
    "megatron": ("megatron_train", {}),
}
OTHERS = [name for name in BACKENDS if name != "fsdp2"]


def passes(info, spec):
    """Shapes of the token ids of all passes: [in forward], [in train_step]."""
    strategy, shapes = build(spec, info), []
    if spec.worker.strategy_args.strategy_name == "megatron_train":
        embedding = strategy._modules[0].embedding.word_embeddings
    else:
        embedding = strategy._model.lm.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    strategy.forward(make_batch(), ("logprobs",))
    scored = shapes.copy()
    strategy.train_step(make_batch(), LOSS)
    return scored, shapes[len(scored) :]


# Rows of 7, 12, 5, 9, 20 and 3 tokens; two a pass in training and eight otherwise, unless something else is said.
WORKERS = {
    "plain": ({}, {(6, 20)}, 3),
    "small passes": ({"infer_batch_size": 1}, {(1, n) for n in (7, 12, 5, 9, 20, 3)}, 3),
    "packed": ({"use_sequence_packing": True}, {(1, 56)}, 3),
    "rounded": ({"sequence_length_round_in_infer": 16, "sequence_length_round_in_train": 10}, {(6, 32)}, 3),
    "packed and rounded": (
        {"use_sequence_packing": True, "sequence_length_round_in_infer": 64, "sequence_length_round_in_train": 10},
        {(1, 64)}, 3,
    ),
    "budgets": (
        {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 120,
         "use_dynamic_batching_in_infer": True, "max_tokens_per_microbatch_in_infer": 20,
         "use_sequence_packing": True}, None, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_passes_are_cut_and_padded_as_asked(ranks, model_of, backend):
    specs = [layout_spec(model_of("llama"), *BACKENDS[backend], worker=worker) for worker, *_ in WORKERS.values()]
    found = ranks.run(each, 1, passes, specs)[0]
    for (what, (worker, scored, trained)), (in_forward, in_training) in zip(WORKERS.items(), found, strict=True):
        if scored is None:
            assert len(in_forward) > 2, what
            assert all(rows == 1 and tokens <= 20 for rows, tokens in in_forward), what
        else:
            assert set(in_forward) == scored, what
        assert len(in_training) == trained, what
        assert {rows for rows, _ in in_training} == {1 if worker.get("use_sequence_packing") else 2}, what
        multiple = worker.get("sequence_length_round_in_train", 1)
        assert all(tokens % multiple == 0 for _, tokens in in_training), what


def scores(info, spec):
    return build(spec, info).forward(make_batch(), ("logprobs",)).logprobs


@pytest.mark.parametrize("backend", OTHERS)
def test_model_config_kwargs_change_the_model_alike(ranks, model_of, backend):
    path, model = model_of("llama"), {"model_config_kwargs": {"rms_norm_eps": 0.5}}
    specs = [layout_spec(path, *BACKENDS["fsdp2"], model=changes) for changes in ({}, model)]
    plain, changed = ranks.once(each, 1, scores, specs)[0]
    found = ranks.run(scores, 1, layout_spec(path, *BACKENDS[backend], model=model))[0]
    torch.testing.assert_close(found, changed, rtol=0, atol=1e-5)
    assert float((changed - plain).abs().max()) > 1e-3


def unknown(info, spec):
    with pytest.raises(ValueError, match="did you mean 'rms_norm_eps'"):
        build(spec, info)


@pytest.mark.parametrize("backend", OTHERS)
def test_options_that_the_model_has_not_are_refused(ranks, model_of, backend):
    model = {"model_config_kwargs": {"rms_norm_epss": 0.5}}
    ranks.run(unknown, 1, layout_spec(model_of("llama"), *BACKENDS[backend], model=model))


def recomputations(info, spec):
    """Times that the first MLP of a model ran in a step of one pass."""
    strategy, count = build(spec, info), []
    strategy._model.lm.model.layers[0].mlp.register_forward_pre_hook(lambda module, inputs: count.append(1))
    strategy.train_step(make_batch(), LOSS)
    return len(count)


@pytest.mark.parametrize("backend", ["fsdp2_train", "deepspeed_train"])  # Megatron's own keys have tests of their own
def test_activations_are_recomputed_unless_switched_off(ranks, model_of, backend):
    training = {"per_device_train_batch_size": 6}
    models = [{"disable_gradient_checkpointing": off} for off in (False, True)]
    specs = [layout_spec(model_of("llama"), backend, {}, model=model, training=training) for model in models]
    assert ranks.run(each, 1, recomputations, specs) == [[2, 1]]
