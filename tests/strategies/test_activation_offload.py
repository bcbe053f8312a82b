"""Activations that wait on the host: what waits, when it comes back, and that streams are in order."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from layout_contract import check_layout
from stream_races import Streams
from torch.utils.checkpoint import checkpoint
from train_contract import build, make_batch, make_spec, token_mean_loss

from roll.strategies.base import LossFn
from roll.strategies.training import activation_offload
from roll.strategies.training.activation_offload import ActivationOffload, CopyStream, OnHost
from roll.workbench.planning import activations as planned

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROWS, WIDTH, LAYERS = 40, 64, 6
ONE = ROWS * WIDTH * 4  # bytes of what goes from one layer to the next


def waiting_on_host():
    return [thing for thing in gc.get_objects() if type(thing) is OnHost]


def num_waiting():
    return len(waiting_on_host())


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_activations_wait_on_the_host_only_between_forward_and_backward(tiny_model, recompute, offload):
    model = {"activation_offload": offload, "disable_gradient_checkpointing": not recompute}
    strategy, waiting = build(make_spec(tiny_model, model=model)), []

    def watching(outputs, batch, sizes):
        waiting.append(num_waiting())
        return token_mean_loss(outputs, batch, sizes)

    strategy.train_step(make_batch(), LossFn(compute=watching, needs=("logprobs",)))
    assert num_waiting() == 0
    if not offload:
        assert max(waiting) == 0
    elif recompute:
        assert max(waiting) <= 8  # inputs of two layers, the hidden states, and what surrounds them
        assert min(waiting) >= 2
    else:
        assert min(waiting) > 20


def test_weights_stay_where_they_are_while_activations_go():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    inputs = torch.randn(64, 64, requires_grad=True)
    with ActivationOffload(CPU).saving():
        product = (inputs * 2.0) @ weight.t()
        seen = waiting_on_host()
    assert len(seen) == 1
    assert not torch.equal(seen[0].copy, weight)
    (expected,) = torch.autograd.grad((inputs * 2.0 @ weight.t()).square().sum(), weight)
    (found,) = torch.autograd.grad(product.square().sum(), weight)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "view", [lambda t: t.t(), lambda t: t[:, 3:20], lambda t: t[:, None].expand(40, 5, 30), lambda t: t.view(-1)[7:]]
)
def test_what_comes_back_from_the_host_has_the_values_and_strides_that_went(view):
    base = torch.randn(40, 30)
    held = view(base)
    with ActivationOffload(CPU).saving():
        square = held.detach().requires_grad_().square()  # saves its input
    assert len(waiting_on_host()) == 1
    back = square.grad_fn._saved_self
    assert (back.stride(), back.shape) == (held.stride(), held.shape)
    assert torch.equal(back, held)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_activations_on_the_host_change_no_number(ranks, tiny_model, world, recompute):
    model = {"activation_offload": True, "disable_gradient_checkpointing": not recompute}
    check_layout(ranks, tiny_model, "fsdp2_train", {}, world, model=model)


# --- streams ---------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Two projections of one input, as attention and gated MLPs have them."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.up(x) * torch.sigmoid(self.gate(x))


def run_layers(offload, *, recompute):
    """Return the gradients of some layers on one input."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad() if offload is None else offload.saving():
        torch.set_grad_enabled(True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    x.square().sum().backward()
    return [parameter.grad for layer in layers for parameter in layer.parameters()]


@pytest.fixture
def streams(monkeypatch):
    found = Streams(monkeypatch)
    monkeypatch.setattr(activation_offload, "host_bytes", found.host_bytes)
    return found


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("in_flight", [0, ONE, 3 * ONE, 1 << 30])
def test_nothing_is_used_before_its_copy_has_ended(streams, recompute, in_flight):
    expected = run_layers(None, recompute=recompute)
    with streams:
        offload = ActivationOffload(CUDA, in_flight)
        for _ in range(2):  # a second micro-batch finds the memory of the first
            found = run_layers(offload, recompute=recompute)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert streams.races == []
    copies = [stream for operator, stream in streams.log if operator == "aten.copy_.default"]
    assert len(copies) >= 2 * LAYERS
    assert set(copies) == {"copying"}


@pytest.mark.parametrize(
    ("left_out", "race"),
    [
        ("before a copy", "copying doesn't wait for what computing does"),
        ("before a use", "computing doesn't wait for what copying does"),
        ("before memory is free", "before copying is done with it"),
    ],
)
def test_each_wait_is_needed(streams, monkeypatch, left_out, race):
    if left_out == "before a copy":
        monkeypatch.setattr(CopyStream, "after_computing", lambda self: torch.cuda.stream(self._copying))
    elif left_out == "before a use":
        monkeypatch.setattr(CopyStream, "compute_after", lambda self, point: None)
    else:
        monkeypatch.setattr(OnHost, "leave", lambda self: setattr(self, "_on_device", None))
    with streams:
        run_layers(ActivationOffload(CUDA, ONE), recompute=False)
    assert any(race in found for found in streams.races)


@pytest.mark.parametrize(("recompute", "layer"), [(True, ONE), (False, 3 * ONE)])
def test_the_backward_pass_finds_what_it_wants_on_its_way_back(streams, monkeypatch, recompute, layer):
    asked = []
    monkeypatch.setattr(OnHost, "take", lambda self, take=OnHost.take: (asked.append(self.on_device), take(self))[1])
    with streams:
        run_layers(ActivationOffload(CUDA, layer), recompute=recompute)
    assert len(asked) >= LAYERS
    assert all(asked)  # the last one is on the device yet, each other came while the one after it was used


def test_the_device_holds_no_more_than_is_on_its_way(streams, monkeypatch):
    most, made = {"out": 0, "back": 0}, weakref.WeakSet()

    def on_device(way, call):
        def watching(self, *args):
            result = call(self, *args)
            made.add(self)
            there = [saved for saved in made if saved.on_device and not saved.taken]
            most[way] = max(most[way], sum(saved.nbytes for saved in there))
            return result

        return watching

    monkeypatch.setattr(OnHost, "__init__", on_device("out", OnHost.__init__))
    monkeypatch.setattr(OnHost, "fetch", on_device("back", OnHost.fetch))
    with streams:
        run_layers(ActivationOffload(CUDA, 2 * ONE), recompute=True)
    assert most == {"out": 3 * ONE, "back": 2 * ONE}  # the newest begins its way before the oldest has to leave


def test_what_several_operators_save_goes_to_the_host_once(streams):
    with streams:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        weights = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3)]
        with ActivationOffload(CUDA).saving():
            total = sum((x @ weight).sum() for weight in weights)
            assert len(waiting_on_host()) == 1
        expected = x.detach().sum(0)[:, None].expand(WIDTH, WIDTH)
        for found in torch.autograd.grad(total, weights):
            torch.testing.assert_close(found, expected)


def test_a_tensor_that_has_changed_since_is_another_one(streams):
    with streams:
        offload, x = ActivationOffload(CUDA), torch.zeros(ROWS, WIDTH)
        before, same = offload._pack(x), offload._pack(x)
        after = offload._pack(x.add_(1))
        assert same is before
        assert (float(before.copy.max()), float(after.copy.max())) == (0.0, 1.0)


def test_the_plan_knows_how_much_is_on_its_way():
    assert planned.IN_FLIGHT == activation_offload.IN_FLIGHT
