"""What a start of several ranks takes and gives: with weights from slices of files, and with a model loaded whole."""

from __future__ import annotations

from pathlib import Path

import torch
from layout_contract import stay_connected
from ranks import status_bytes
from train_contract import build, make_batch

from roll.strategies.hf.hf_build import hf_module
from roll.strategies.hf.streamed import StreamedWeights

MIB = 1 << 20
LARGE = {"hidden": 512, "layers": 32, "intermediate_size": 1536, "vocab_size": 8192, "head_dim": 64}
LAYER = 4 * (2 * 512 * 512 + 2 * 512 * 2 * 64 + 3 * 512 * 1536)
"""Bytes of a layer of `LARGE` in float32, and its embedding has as many."""


def another(spec, info):
    """A strategy beside those that this process has had: it is connected."""
    stay_connected()
    return build(spec, info)


def start_of(info, spec):
    """What a rank has after its start: (weights and buffers, what trains, log-probs or values)."""
    strategy = another(spec, info)
    model = hf_module(strategy._model)
    weights = {name: tensor.detach().clone() for name, tensor in strategy.named_weights()}
    heads = {n: strategy._full(p).clone() for n, p in strategy._model.named_parameters() if n.startswith("value_head")}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    output = "values" if spec.kind == "value" else "logprobs"
    scores = getattr(strategy.forward(make_batch(), (output,)), output)
    return weights | heads | buffers, {n: p.requires_grad for n, p in model.named_parameters()}, scores


def streamed_and_whole(info, specs):
    """For each spec whether it streams, and what a rank has with and without that."""
    found, opened, streams = [], StreamedWeights.open, []

    def watched(*args):
        streams.append(opened(*args))
        return streams[-1]

    for spec in specs:
        StreamedWeights.open = watched
        mine = start_of(info, spec)
        StreamedWeights.open = lambda *args: None
        found.append((streams.pop() is not None, mine, start_of(info, spec)))
    return found


def peak_of_a_start(info, specs, uncounted):
    """Bytes that a rank's peak is above what it had after its imports; the first of `specs` does the imports.

    Without what `uncounted` says that the strategy has beside the weights.
    """
    first, spec = specs
    another(first, info)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    strategy = another(spec, info)
    return status_bytes("VmHWM") - before - uncounted(strategy)


def check_starts(ranks, specs):
    """Two ranks of each of these roles have the same from slices of the files as from a whole model."""
    for rank in ranks.run(streamed_and_whole, 2, list(specs.values())):
        for name, (streams, mine, whole) in zip(specs, rank, strict=True):
            assert streams, name
            assert mine[0].keys() == whole[0].keys() and mine[1] == whole[1], name
            assert all(torch.equal(mine[0][key], whole[0][key]) for key in whole[0]), name
            assert all(mine[0][key].dtype == whole[0][key].dtype for key in whole[0]), name
            assert torch.equal(mine[2], whole[2]), name
