"""What recurrent layers save for the backward pass: planned as autograd does it."""

from __future__ import annotations

import pytest

from roll.workbench.planning.activations import Numbers, layer_bytes
from roll.workbench.planning.architecture import architecture_of

NUMBERS = Numbers(computed=4, residual=4)
TOKENS = 256


def saved_bytes(layer, hidden, tokens):
    """Bytes that a layer saves of a row in float32, its input and its weights aside; `hidden` is its width."""
    torch = pytest.importorskip("torch")
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    states = torch.randn(1, tokens, hidden, requires_grad=True)
    storages = {}  # held, so that no address comes twice

    def pack(tensor):
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(states)
    storages.pop(states.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


def tree_of(heads, head_dim, state, chunk, groups):
    return {
        "model_type": "granitemoehybrid", "hidden_size": heads * head_dim // 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 100, "layer_types": ["linear_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 32, "mamba_n_heads": heads, "mamba_d_head": head_dim,
        "mamba_d_state": state, "mamba_n_groups": groups, "mamba_chunk_size": chunk,
    }  # fmt: skip


@pytest.mark.parametrize("sizes", [(8, 16, 16, 64, 2), (4, 64, 32, 64, 1), (16, 16, 64, 32, 4)])
def test_a_state_space_layer_saves_what_is_planned(sizes):
    transformers = pytest.importorskip("transformers")
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

    tree = tree_of(*sizes)
    config = transformers.AutoConfig.for_model(**tree)
    measured = saved_bytes(GraniteMoeHybridMambaLayer(config, 0), tree["hidden_size"], TOKENS)
    arch = architecture_of(tree, "config.json", "pretrain")
    wide, narrow = (
        layer_bytes(arch, NUMBERS, sparse=False, masked=False, recurrent=recurrent) for recurrent in (True, False)
    )
    # What a layer has besides its mixer is the same with attention, which saves so much:
    attention = 4 * (3 * arch.query + 2 * arch.key) + 4 * arch.heads
    assert wide - narrow + attention == pytest.approx(measured / TOKENS, rel=0.02)
