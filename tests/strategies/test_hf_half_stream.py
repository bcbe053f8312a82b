"""A residual stream in bfloat16 over float32 weights: its type, its numbers, its bytes, and what goes on as before."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from layout_contract import FAMILIES
from prefix_rows import answers
from test_strategies_models import ARCHITECTURES, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from train_contract import LOSS, build, make_batch, make_spec, weights_of, with_worker

from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
from roll.strategies.attention import attention
from roll.strategies.hf import hf_build
from roll.strategies.hf.hf_build import blocks, compile_blocks, hf_module, narrow_stream, narrows_stream
from roll.strategies.hf.hf_model import PolicyModel
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDE, HALF = torch.float32, torch.bfloat16
PACKED, BF16 = {"use_sequence_packing": True}, {"dtype": "bf16"}


@pytest.fixture
def narrowed(monkeypatch):
    """Models on this host are built as on an accelerator."""
    on_accelerator = functools.partial(narrows_stream, CUDA)
    monkeypatch.setattr(hf_build, "narrows_stream", lambda _device, *types: on_accelerator(*types))


@pytest.mark.parametrize(
    ("device", "stored", "computed", "expected"),
    [
        (CUDA, WIDE, HALF, True),
        (CPU, WIDE, HALF, False),  # what a host computes stays as it was
        (CUDA, WIDE, WIDE, False),
        (CUDA, WIDE, torch.float16, False),  # its largest number is too small for some streams
        (CUDA, HALF, HALF, False),  # weights in half precision give such a stream anyway
    ],
)
def test_trained_float32_weights_that_compute_in_bf16_on_an_accelerator_narrow_the_stream(
    device, stored, computed, expected
):
    assert narrows_stream(device, stored, computed) is expected


# --- types and numbers -----------------------------------------------------------------------------------------------


def types_of_a_step(strategy, monkeypatch):
    """Types of the stream at each layer, of queries and keys, and of gradients."""
    stream, heads, gradients = set(), set(), set()
    plain = attention.varlen_attention
    for layer in blocks(hf_module(strategy._model)):
        layer.register_forward_hook(lambda _m, inputs, out: stream.update((inputs[0].dtype, out.dtype)))
    monkeypatch.setattr(
        attention, "varlen_attention", lambda *t, **o: heads.update((t[0].dtype, t[1].dtype)) or plain(*t, **o)
    )
    strategy._apply = lambda lr: (0.0, gradients.update(p.grad.dtype for p in strategy._module.parameters()) is None)
    strategy.train_step(make_batch(), LOSS)
    monkeypatch.setattr(attention, "varlen_attention", plain)
    return stream, heads, gradients


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_layers_hand_on_bf16_and_weights_and_gradients_are_float32(model_of, monkeypatch, narrowed, family, recompute):
    model = {**BF16, "disable_gradient_checkpointing": not recompute}
    spec = make_spec(model_of(family, **FAMILIES[family]), worker=PACKED, model=model)
    strategy = build(spec)
    assert types_of_a_step(strategy, monkeypatch) == ({HALF}, {HALF}, {WIDE})
    assert {weight.dtype for weight in weights_of(strategy).values()} == {WIDE}


def test_on_a_host_the_stream_is_float32_as_it_was(model_of, monkeypatch):
    strategy = build(make_spec(model_of("qwen3"), worker=PACKED, model=BF16))
    stream, heads, gradients = types_of_a_step(strategy, monkeypatch)
    assert (stream, heads, gradients) == ({WIDE}, {WIDE}, {WIDE})


class TypesOf(TorchDispatchMode):
    """Inside, the types of what operators whose names end like one of these read are kept by name."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.types = names, {name: set() for name in names}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for name in self.names:
            if func.overloadpacket.__name__.strip("_").endswith(name):
                self.types[name].add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_norms_and_log_probs_are_float32_on_a_host_that_computes_in_bf16(model_of):
    strategy = build(make_spec(model_of("qwen3"), worker=PACKED, model=BF16))
    with TypesOf("rsqrt", "log_softmax", "logsumexp", "mm") as inside:
        strategy.train_step(make_batch(), LOSS)
    norms, softmax, logsumexp, products = inside.types.values()
    assert norms == {WIDE}
    assert softmax | logsumexp == {WIDE}
    assert HALF in products


@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text", "mixtral", "cohere", "phi3", "granite"])
def test_norms_and_embeddings_of_other_architectures_are_found(kind):
    model, seen = make_model(kind, ARCHITECTURES[kind]), set()
    narrow_stream(model, HALF)
    for layer in blocks(model):
        layer.register_forward_hook(lambda _m, inputs, out: seen.update((inputs[0].dtype, out.dtype)))
    with torch.no_grad(), torch.autocast("cpu", HALF):
        model(input_ids=torch.arange(12)[None], use_cache=False)
    assert seen == {HALF}


def gradients_of(spec):
    strategy, found = build(spec), {}
    logprobs = strategy.forward(make_batch(), ("logprobs",)).logprobs

    def keep(lr):
        found.update((name, p.grad.clone()) for name, p in strategy._module.named_parameters())
        return 0.0, True

    strategy._apply = keep
    strategy.train_step(make_batch(), LOSS)
    return logprobs, torch.cat([gradient.flatten() for gradient in found.values()])


def test_its_numbers_are_as_close_to_float32_as_those_of_autocast(model_of, monkeypatch):
    path = model_of("qwen3")
    exact, plain = (gradients_of(make_spec(path, model={"dtype": dtype})) for dtype in ("fp32", "bf16"))
    monkeypatch.setattr(hf_build, "narrows_stream", lambda *_: True)
    mine = gradients_of(make_spec(path, model=BF16))
    for narrow, autocast, wide in zip(mine, plain, exact, strict=True):
        error, theirs = ((found - wide).norm() / wide.norm() for found in (narrow, autocast))
        assert 0 < error < 0.03
        assert error < 3 * theirs


class BytesMoved(TorchDispatchMode):
    """Inside, the bytes that operators read and write are summed; views move none."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "detach" not in str(func):
            tensors = [t for t in tree_iter((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.total += sum(t.numel() * t.element_size() for t in tensors)
        return out


def memory_of_a_pass(narrow):
    """(bytes moved, bytes kept for the backward pass) of a model with recomputed layers, without computing anything."""
    kept, layout = [], lay_out(make_batch((2000,)), CPU)
    with FakeTensorMode(allow_non_fake_inputs=True):
        sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 32, "num_attention_heads": 8}
        lm = make_model("qwen3", {**ARCHITECTURES["mistral"], **sizes, "vocab_size": 100, "layer_types": None})
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()
        if narrow:
            narrow_stream(lm, HALF)

        def keep(tensor):
            kept.append(0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", HALF), BytesMoved() as moved, hooks:
            PolicyModel(lm, 1.0)(layout, HeadRequest()).logprobs.sum().backward()
    return moved.total, sum(kept)


def test_a_pass_moves_fewer_bytes_and_keeps_fewer_for_the_backward_pass():
    (moved, kept), (moved_wide, kept_wide) = memory_of_a_pass(True), memory_of_a_pass(False)
    assert moved < 0.9 * moved_wide
    assert kept < 0.8 * kept_wide


# --- what goes on as before ------------------------------------------------------------------------------------------


def states_on_the_host(spec):
    options = Fsdp2Config(param_offload=True, optimizer_offload=True)
    return with_worker(spec, strategy_args=StrategyArgs(strategy_name="fsdp2_train", strategy_config=options))


@pytest.mark.usefixtures("narrowed")
def test_checkpoints_offloading_and_sent_weights_are_those_of_any_other_role(model_of, tmp_path):
    spec, batch = make_spec(model_of("qwen3"), model=BF16), make_batch()
    strategy, offloaded = build(spec), build(states_on_the_host(spec))
    for parameter in offloaded._module.parameters():
        parameter.data = parameter.data.clone()  # on a CPU it is the file itself, mapped into memory
    for role in (strategy, offloaded):
        role.train_step(batch, LOSS)
    strategy.save(tmp_path / "checkpoint")
    resumed = build(spec)
    resumed.load(tmp_path / "checkpoint")
    for role in (strategy, offloaded, resumed):
        role.train_step(batch, LOSS)
    expected = weights_of(strategy)
    for role in (offloaded, resumed):
        assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(role).items())
    sent = dict(strategy.named_weights(dtype=HALF))
    assert all(torch.equal(tensor, expected[name].to(HALF)) for name, tensor in sent.items())


@pytest.mark.usefixtures("narrowed")
def test_shared_beginnings_give_the_numbers_of_rows_by_themselves(model_of):
    spec = make_spec(model_of("llama"), worker=PACKED, model=BF16)
    shared, alone = (
        build(with_worker(spec, use_prefix_sharing=on)).forward(answers(), ("logprobs",)).logprobs
        for on in (True, False)
    )
    torch.testing.assert_close(shared, alone, rtol=0, atol=0.05)
    assert alone.abs().max() > 1


def test_adapters_train_with_the_same_bits_as_on_a_host(model_of, monkeypatch):
    """Their base model is in half precision, so its stream is anyway."""
    spec = make_spec(model_of("llama"), model={**BF16, "lora_rank": 2, "lora_alpha": 4.0})
    found = []
    for narrow in (False, True):
        monkeypatch.setattr(hf_build, "narrows_stream", lambda *_, on=narrow: on)
        strategy = build(dataclasses.replace(spec))
        strategy.train_step(make_batch(), LOSS)
        found.append(weights_of(strategy))
    assert all(torch.equal(weight, found[0][name]) for name, weight in found[1].items())


def test_compiled_layers_hand_on_bf16_as_well():
    model, seen = make_model("phi3", ARCHITECTURES["phi3"]), []
    narrow_stream(model, HALF)
    ids = torch.arange(12)[None]
    with torch.no_grad(), torch.autocast("cpu", HALF):
        expected = model(input_ids=ids, use_cache=False).logits
        compile_blocks(model, backend="eager")
        for layer in blocks(model):
            layer.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
        found = model(input_ids=ids, use_cache=False).logits
    assert set(seen) == {HALF}
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
