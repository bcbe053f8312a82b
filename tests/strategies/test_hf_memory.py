"""Memory given back: sleeping roles, logits in chunks."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch
from layout_contract import shard_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from train_contract import LOSS, build, make_batch, make_info, make_spec, weights_of, with_worker

from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
from roll.strategies.base import LossFn
from roll.strategies.training import logits as logits_module
from roll.strategies.training import state_offload as offload
from roll.strategies.training.logits import HeadRequest, head_outputs
from roll.strategies.training.state_offload import Shelf, num_bytes

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


# --- sleep -----------------------------------------------------------------------------------------------------------


def test_a_shelf_keeps_views_together_counts_shared_memory_once_and_restores_bits():
    buffer = torch.randn(1000)
    first, second, other = buffer[:400].view(20, 20), buffer[400:], torch.randn(7)
    expected = [t.clone() for t in (first, second, other)]
    assert num_bytes([first, second, other], CPU) == 4 * 1007
    shelf = Shelf()
    assert shelf.store([first, second, other, torch.zeros(3, device="meta")], CPU) == 4 * 1007
    assert shelf
    assert num_bytes([buffer, other], CPU) == 0
    shelf.restore()
    assert not shelf
    assert all(torch.equal(a, b) for a, b in zip((first, second, other), expected, strict=True))
    first.fill_(3.0)
    assert float(buffer[0]) == 3.0


def train_and_sleep(info, spec, shelve):
    """Five steps; with `shelve` everything that an accelerator would give back is away before the third and fourth."""
    strategy, batch = build(spec, info), make_batch()
    if info.world_size == 1:
        for parameter in strategy._module.parameters():
            parameter.data = parameter.data.clone()  # on a CPU it is the file itself, mapped into memory
    mine = batch.select(shard_of(info.rank, info.world_size))
    norms, emptied = [], []
    for step in range(5):
        if shelve and step in (2, 3):
            strategy.forward(mine, ("logprobs",))  # leaves gathered weights behind
            strategy.sleep()
            for part in ("parameters", "optimizer"):
                strategy._shelves[part].store(strategy._resident(part), CPU)
            left = num_bytes(strategy._module.parameters(), CPU) + num_bytes(strategy._resident("optimizer"), CPU)
            emptied.append(left)
            strategy.wake()
        norms.append(strategy.train_step(mine, LOSS).result().get("actor/grad_norm"))
    return norms, emptied, weights_of(strategy)


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_with_the_same_bits_after_weights_and_optimizer_were_away(ranks, tiny_model, world):
    spec = make_spec(tiny_model, training={"weight_decay": 0.1}, l2=0.1)
    norms, _, weights = ranks.run(train_and_sleep, world, spec, False)[0]
    again, emptied, weights_again = ranks.run(train_and_sleep, world, spec, True)[0]
    assert emptied == [0, 0]
    assert again == norms
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def train_offloaded(info, spec, parts):
    """(norms, bytes of weights and of the optimizer's states: in the loss, in the step, afterwards; weights)"""
    strategy, seen = build(spec, info), []
    if info.world_size == 1:
        for parameter in strategy._module.parameters():
            parameter.data = parameter.data.clone()  # on a CPU it is the file itself, mapped into memory
    mine = make_batch().select(shard_of(info.rank, info.world_size))
    there = strategy._spec.worker.strategy_args.strategy_config
    assert (there.param_offload, there.optimizer_offload) == ("parameters" in parts, "optimizer" in parts)

    def look():
        kept = (list(strategy._module.parameters()), [v for o in strategy._optimizers for v in _moments(o)])
        seen.append(tuple(num_bytes(tensors, CPU) > 0 for tensors in kept))

    def watching(outputs, micro, sizes):
        look()
        return LOSS.compute(outputs, micro, sizes)

    strategy._optimizers[0].register_step_pre_hook(lambda *_: look())
    norms = []
    for _ in range(3):
        norms.append(strategy.train_step(mine, LossFn(compute=watching, needs=("logprobs",))).result())
        look()
        strategy.forward(mine, ("logprobs",))
    return norms, [seen[0], seen[-2], seen[-1]], weights_of(strategy), whole_checkpoint(strategy)


def _moments(optimizer):
    return [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim() > 0]


def whole_checkpoint(strategy):
    """The moments as a checkpoint has them, after which they are away again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        if strategy._info.world_size == 1:
            strategy.save(path)
            strategy.load(path)
    return True


AWAY = {
    "weights": (("parameters",), [(True, True), (True, True), (False, True)]),
    "optimizer": (("optimizer",), [(True, False), (True, True), (True, False)]),
    "both": (("parameters", "optimizer"), [(True, False), (True, True), (False, False)]),
}


@pytest.mark.parametrize(("what", "world"), [("weights", 1), ("optimizer", 1), ("both", 1), ("both", 2)])
def test_weights_and_optimizer_are_on_the_host_while_nobody_uses_them(ranks, tiny_model, what, world):
    parts, expected = AWAY[what]
    spec = make_spec(tiny_model, training={"weight_decay": 0.1}, l2=0.1)
    options = Fsdp2Config(param_offload="parameters" in parts, optimizer_offload="optimizer" in parts)
    args = StrategyArgs(strategy_name="fsdp2_train", strategy_config=options)
    norms, _, weights, _ = ranks.run(train_offloaded, world, spec, ())[0]
    again, seen, weights_again, _ = ranks.run(train_offloaded, world, with_worker(spec, strategy_args=args), parts)[0]
    assert seen == expected
    assert again == norms
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_sleep_on_a_cpu_frees_gradients_and_says_how_many_bytes(tiny_model):
    strategy = build(make_spec(tiny_model))
    total = sum(p.nbytes for p in strategy._module.parameters())
    assert strategy.sleep() == 0
    strategy.train_step(make_batch(), LOSS)
    assert all(p.grad is None for p in strategy._module.parameters()), "a step keeps none for the phases after it"
    for parameter in strategy._module.parameters():  # as a step that was broken off leaves them
        parameter.grad = torch.zeros_like(parameter)
    assert strategy.sleep(["parameters", "optimizer"]) == 0
    assert strategy.sleep(["gradients"]) == total
    assert all(p.grad is None for p in strategy._module.parameters())
    strategy.wake()
    strategy.train_step(make_batch(), LOSS)


def test_a_role_whose_weights_are_away_says_so(tiny_model, tmp_path):
    strategy = build(make_spec(tiny_model))
    strategy._shelves["parameters"].store([torch.zeros(3)], CPU)
    for call in (
        lambda: strategy.forward(make_batch(), ("logprobs",)),
        lambda: strategy.train_step(make_batch(), LOSS),
        lambda: dict(strategy.named_weights()),
        lambda: strategy.save(tmp_path / "checkpoint"),
        lambda: strategy.load(tmp_path / "checkpoint"),
    ):
        with pytest.raises(RuntimeError, match="actor_train sleeps without its parameters: call wake first"):
            call()
    strategy.wake(["optimizer"])
    assert strategy._shelves["parameters"]
    strategy.wake(["parameters"])
    strategy.forward(make_batch(), ("logprobs",))


@pytest.mark.gpu
@NO_GPU
def test_sleep_gives_the_accelerators_memory_back_and_wake_the_same_bits(tiny_model):
    spec, batch = make_spec(tiny_model), make_batch()
    undisturbed, strategy = build(spec), build(spec)
    for each in (undisturbed, strategy):
        each.train_step(batch, LOSS)
    used = torch.cuda.memory_allocated()
    freed = strategy.sleep()
    assert freed >= 4 * sum(p.numel() for p in strategy._module.parameters()) * 4  # weights, gradients, two moments
    assert used - torch.cuda.memory_allocated() >= freed
    assert strategy.sleep() == 0
    strategy.wake()
    assert strategy.train_step(batch, LOSS).result() == undisturbed.train_step(batch, LOSS).result()
    expected = weights_of(undisturbed)
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights_of(strategy).items())


# --- logits ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers how large the tensors were that operators made."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.live = 0
        """Most bytes at a time of what operators made."""
        self.shapes = set()
        self._made = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
                self.shapes.add(tuple(tensor.shape))
                memory = tensor.untyped_storage()
                self._made[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        self.live = max(self.live, sum(size for _, size in self._made.values()))
        return made


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_no_tensor_of_scored_tokens_times_vocabulary_is_ever_made(monkeypatch, with_entropy, softcap):
    tokens, width, vocabulary, chunk = 384, 8, 500, 12
    monkeypatch.setattr(logits_module, "_CHUNK_ELEMENTS", chunk * vocabulary)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    weights, entropy_weights = torch.randn(2, tokens, generator=generator)

    def gradients(logprobs, entropy):
        loss = (weights * logprobs).sum() + ((entropy_weights * entropy).sum() if with_entropy else 0.0)
        return torch.autograd.grad(loss, (hidden, head.weight))

    with Largest() as largest:
        outputs = head_outputs(
            hidden, head, targets, HeadRequest(entropy=with_entropy), temperature=0.7, softcap=softcap
        )
        logprobs, entropy = outputs.logprobs, outputs.entropy
        found = gradients(logprobs, entropy)
    assert (entropy is not None) == with_entropy
    assert largest.elements == chunk * vocabulary  # a part in 32 of tokens x vocabulary
    assert largest.live < 4 * tokens * vocabulary  # bytes of one copy of all logits: temporaries of a chunk fit in it

    logits = head(hidden)
    table = ((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7).log_softmax(-1)
    picked, spread = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    torch.testing.assert_close(logprobs, picked)
    if with_entropy:
        torch.testing.assert_close(entropy, spread)
    for mine, theirs in zip(found, gradients(picked, spread), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_pinned_memory_is_asked_for_in_sizes_that_the_allocator_does_not_round_up(monkeypatch):
    """torch's allocator of pinned memory gives powers of two: each tensor by itself, these would take 96 % more."""
    given = []
    monkeypatch.setattr(offload, "host_bytes", lambda size, pinned: given.append((size, pinned)) or torch.empty(
        size, dtype=torch.uint8, device="meta"))  # fmt: skip
    sizes = [4 * n for n in (3584, 3584 * 3584, 3584 * 18944, 18944 * 3584, 152064 * 3584)]
    rounded = lambda size: 1 << (size - 1).bit_length() if size else 0  # noqa: E731
    assert sum(map(rounded, sizes)) > 1.9 * sum(sizes)
    offload._laid_end_to_end(sizes, pinned=True)
    taken = sum(rounded(size) for size, pinned in given if pinned)
    assert sum(sizes) <= taken <= sum(sizes) + (1 << 20) + 512 * len(sizes)


def test_storages_that_go_over_the_ends_of_pieces_come_back_bit_for_bit(monkeypatch):
    monkeypatch.setattr(offload, "_LARGEST_PIECE", 4096)
    monkeypatch.setattr(offload, "_SMALLEST_PIECE", 1024)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (1, 700, 128, 5000, 3)]
    before, shelf = [tensor.clone() for tensor in tensors], Shelf()
    assert shelf.store(tensors, CPU) == sum(tensor.nbytes for tensor in before)
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    shelf.restore()
    assert all(torch.equal(mine, other) for mine, other in zip(tensors, before, strict=True))


def test_hits_are_found_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(logits_module, "_CHUNK_ELEMENTS", 4 * 50)
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(10, 8, generator=generator), torch.nn.Linear(8, 50, bias=False)
    best = head(hidden).argmax(-1)
    expected = torch.tensor([1.0, 0.0] * 5)
    targets = torch.where(expected.bool(), best, (best + 1) % 50)
    with Largest() as largest:
        found = head_outputs(hidden, head, targets, HeadRequest(correct=True), temperature=1.0)
        assert found.correct.tolist() == expected.tolist()
    assert largest.elements <= 4 * 50 + 8 * 50
    nothing = head_outputs(hidden[:0], head, targets[:0], HeadRequest(correct=True), temperature=1.0)
    assert nothing.correct.tolist() == []


def test_squared_gradients_in_the_logits_are_found_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(logits_module, "_CHUNK_ELEMENTS", 4 * 50)
    monkeypatch.setattr(logits_module, "SLICE_ELEMENTS", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(10, 8, generator=generator, dtype=torch.float64), torch.nn.Linear(8, 50).double()
    targets = torch.randint(50, (10,), generator=generator)
    scaled = (head(hidden) / 0.7).detach().requires_grad_()
    scaled.log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    with Largest() as largest:
        request = HeadRequest(logit_gradients=True)
        found = head_outputs(hidden, head, targets, request, temperature=0.7).logit_gradients
    torch.testing.assert_close(found, scaled.grad.square().sum(-1))
    assert not found.requires_grad
    assert largest.elements <= 4 * 50 + 8 * 50
    certain = torch.nn.Linear(8, 50)
    torch.nn.init.zeros_(certain.weight)
    with torch.no_grad():
        certain.bias[3] = 200.0
    sure = head_outputs(hidden.float(), certain, torch.full((10,), 3), request, temperature=1.0).logit_gradients
    assert sure.tolist() == [0.0] * 10


def test_a_training_step_makes_no_logits_of_all_its_tokens(monkeypatch, tiny_model):
    strategy = build(make_spec(tiny_model, training={"per_device_train_batch_size": 6}))
    batch = make_batch((60, 50, 40))
    vocabulary, width = strategy._model.lm.config.vocab_size, 32
    assert int(batch.action_mask.sum()) > 80
    monkeypatch.setattr(logits_module, "_CHUNK_ELEMENTS", 4 * vocabulary)
    with Largest() as largest:
        strategy.train_step(batch, LOSS)
    rows = {shape[0] for shape in largest.shapes if len(shape) == 2 and shape[1] == vocabulary}
    # The head's weight, transposed, has `width` rows.
    assert rows - {width} == {4, int(batch.action_mask.sum()) % 4} - {0}


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_scores_close_to_float32(tiny_model, dtype):
    spec = dataclasses.replace(make_spec(tiny_model, strategy="fsdp2_infer", model={"dtype": dtype}), trains=False)
    batch = make_batch()
    exact = build(make_spec(tiny_model), make_info()).forward(batch, ("logprobs", "entropy"))
    found = build(spec).forward(batch, ("logprobs", "entropy"))
    assert found.logprobs.dtype == torch.float32
    assert 0 < float((found.logprobs - exact.logprobs).abs().max()) < (0.03 if dtype == "bf16" else 0.004)
    assert float((found.entropy - exact.entropy).abs().max()) < 0.01
