"""`recompute_granularity: selective`: numbers, what is computed again, and what is kept, as the plan has it."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from layout_contract import check_layout
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from train_contract import LOSS, build, make_batch, make_spec, token_mean_loss, weights_of

from roll.strategies.base import LossFn
from roll.workbench.planning.activations import Numbers, selective_bytes
from roll.workbench.planning.architecture import architecture_of

PACKED = {"use_sequence_packing": True}
OFF, FULL, SELECTIVE = (
    {"disable_gradient_checkpointing": True}, {}, {"recompute_granularity": "selective"},
)  # fmt: skip


class Watch(TorchDispatchMode):
    """Counts products and attention, and knows which memory was made inside and is there yet."""

    def __init__(self):
        super().__init__()
        self.products, self._made = 0, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        name = str(operator)
        self.products += name in {"aten.mm.default", "aten.addmm.default"} or "attention" in name
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                memory = tensor.untyped_storage()
                self._made[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
        return made

    @property
    def live(self):
        gc.collect()
        return sum(size for memory, size in self._made.values() if not memory.expired())


def step(path, model, worker=None):
    """Return (weights after an optimizer step, products and attention, bytes that were there before each backward)."""
    spec = make_spec(path, model=model, worker=worker, training={"per_device_train_batch_size": 8})
    strategy, live = build(spec), []
    with Watch() as watch:

        def watching(outputs, batch, sizes):
            live.append(watch.live)
            return token_mean_loss(outputs, batch, sizes)

        strategy.train_step(make_batch(), LossFn(compute=watching, needs=LOSS.needs))
    return weights_of(strategy), watch.products, live


@pytest.mark.parametrize(
    ("family", "worker"),
    [("llama", None), ("qwen3", PACKED), ("qwen3_moe", None)],
    ids=["llama-padded", "qwen3-packed", "qwen3_moe-padded"],
)
def test_no_product_is_computed_again_and_numbers_stay(model_of, family, worker):
    path = model_of(family)
    expected, once, _ = step(path, OFF, worker)
    found, products, _ = step(path, SELECTIVE, worker)
    _, twice, _ = step(path, FULL, worker)
    assert twice > once
    assert products == once
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_plan_knows_what_a_layer_keeps(model_of, family):
    path = model_of(family)
    arch = architecture_of(json.loads((path / "config.json").read_text()), file="config.json", key="model")
    _, _, (full,) = step(path, FULL, PACKED)
    _, _, (selective,) = step(path, SELECTIVE, PACKED)
    tokens, numbers = int(make_batch().lengths.sum()), Numbers(computed=4, residual=4)
    more = selective_bytes(arch, numbers, sparse=False) - 4 * arch.hidden
    assert selective - full == pytest.approx(tokens * arch.layers * more, rel=0.1)


def test_sharded_layers_give_the_numbers_of_a_plain_loop(ranks, tiny_model):
    check_layout(ranks, tiny_model, "fsdp2_train", {}, 2, model=SELECTIVE)
