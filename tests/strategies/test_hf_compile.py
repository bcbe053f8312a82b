"""`torch_compile`: the numbers of the plain layers, and no compilation per length."""

from __future__ import annotations

import pytest
import torch
from layout_contract import check_layout, play
from train_contract import LOSS, build, make_batch, make_spec
from transformers import AutoModelForCausalLM

from roll.strategies.hf.hf_build import compile_blocks


@pytest.fixture(autouse=True)
def forget_compilations():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def hidden_states(model, batch):
    ids = batch.pad("token_ids")
    return model.get_decoder()(input_ids=ids, attention_mask=batch.valid().long(), use_cache=False).last_hidden_state


def test_compiled_layers_keep_names_and_gradients_and_share_one_compilation_over_lengths(tiny_model):
    from torch._dynamo.utils import counters

    def load():
        return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    plain, compiled = load(), load()
    compile_blocks(compiled, backend="eager")  # what is traced, without the compiler that makes code of it
    assert dict(compiled.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    counters.clear()
    graphs = []
    for lengths in ((7, 12), (5, 9, 20), (3, 3, 3, 17), (30, 2)):
        batch = make_batch(lengths)
        outputs = [hidden_states(model, batch) for model in (plain, compiled)]
        torch.testing.assert_close(outputs[1], outputs[0])
        for output in outputs:
            output.square().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1, 1]  # both layers, all lengths
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_switch_compiles_the_layers_and_only_then(tiny_model):
    compiled = build(make_spec(tiny_model, model={"torch_compile": True}))._model.lm.model.layers
    plain = build(make_spec(tiny_model))._model.lm.model.layers
    assert all(layer._compiled_call_impl is not None for layer in compiled)
    assert all(layer._compiled_call_impl is None for layer in plain)


def test_a_model_that_does_not_name_its_layers_is_refused():
    with pytest.raises(ValueError, match="torch_compile: Linear doesn't name its decoder layers"):
        compile_blocks(torch.nn.Linear(2, 2))


def test_compiled_layers_train_like_a_plain_loop(ranks, tiny_model):
    switches = {"torch_compile": True, "activation_offload": True, "disable_gradient_checkpointing": True}
    check_layout(ranks, tiny_model, "fsdp2_train", {}, 1, model=switches)


def play_traced(info, spec, look=None):
    # Sharding changes what is traced, forward and backward; making code of it takes minutes and is tested on one rank.
    compile_blocks.__kwdefaults__["backend"] = "aot_eager"
    return play(info, spec, look)


def test_sharded_layers_are_traced_like_a_plain_loop(ranks, tiny_model):
    check_layout(ranks, tiny_model, "fsdp2_train", {}, 2, model={"torch_compile": True}, play=play_traced)


def test_a_compiled_role_takes_batches_of_any_shape(tiny_model):
    compiled, plain = build(make_spec(tiny_model, model={"torch_compile": True})), build(make_spec(tiny_model))
    for lengths in ((7, 12), (5, 9, 20), (30, 2), (11,)):
        batch = make_batch(lengths)
        mine, theirs = (s.train_step(batch, LOSS).result() for s in (compiled, plain))
        assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
