"""The layout contract: every backend, several ranks, the numbers of a plain loop."""

from __future__ import annotations

import pytest
from layout_contract import check_layout

FSDP = {
    "one rank": (1, {}),
    "sharded over two": (2, {}),
    "replicated over two": (2, {"fsdp_size": 1, "reshard_after_forward": False}),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("layout", FSDP)
def test_fsdp2(ranks, model_of, family, layout):
    world, options = FSDP[layout]
    check_layout(ranks, model_of(family), "fsdp2_train", options, world)
