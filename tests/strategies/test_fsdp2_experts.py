"""FSDP2 with fewer experts than ranks: each rank has some rows of every expert, and all has the numbers of one rank."""

from __future__ import annotations

import pytest
import torch
from layout_contract import relative, shard_of
from safetensors.torch import save_file
from test_fsdp2_checkpoints import advance, read, write
from test_fsdp2_ranks import fsdp_spec
from train_contract import build, weights_of

from roll.strategies.hf.streamed import StreamedWeights
from roll.strategies.training.safetensor_files import StoredTensors
from roll.utils.partition import shard_dim

TWO = {"num_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {"qwen3_moe": TWO, "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1}}


def test_stacked_experts_are_cut_by_rows_where_ranks_do_not_divide_their_number():
    assert shard_dim((128, 1536, 2048), 64) == 0
    assert shard_dim((2, 64, 32), 4) == 1
    assert shard_dim((60, 2816, 2048), 16) == 1  # 60 experts are 4 for each of 15 ranks, and none for the last
    assert shard_dim((2, 62, 32), 4) == 0  # 62 rows can't be cut into 4 equal parts
    assert shard_dim((2, 62, 32), 1) == 0
    assert shard_dim((6, 32), 4) == 0  # a matrix is cut by its rows, whose last parts may be shorter
    assert shard_dim((), 4) == 0


def trained(info, spec):
    """(norms of three steps, log-probs after them, weights, weights as sent in bf16, bytes of experts by tensor)"""
    from train_contract import make_batch

    strategy = build(spec, info)
    norms = advance(strategy, info, "policy", 3)
    outputs = strategy.forward(make_batch().select(shard_of(info.rank, info.world_size)), ("logprobs",))
    sent = {name: tensor.clone() for name, tensor in strategy.named_weights(dtype=torch.bfloat16)}
    experts = {}
    for name, parameter in strategy._model.named_parameters():
        if parameter.dim() == 3:
            states = [v for v in strategy._optimizers[0].state[parameter].values() if v.dim() == 3]
            parts = [t.to_local() if hasattr(t, "to_local") else t for t in (parameter, *states)]
            experts[name] = [part.untyped_storage().nbytes() for part in parts]
    return norms, outputs.logprobs, weights_of(strategy), sent, experts


@pytest.mark.parametrize(
    ("family", "options", "optimizer", "close"),
    [
        ("qwen3_moe", {}, "adamw", 1e-5),
        ("mixtral", {}, "adamw", 1e-5),
        ("qwen3_moe", {"shard_between_micro_batches": False}, "adamw", 1e-5),
        # Orthogonalised updates make more of rounding errors, 2e-3 as well where experts aren't cut.
        ("qwen3_moe", {}, "muon", 5e-3),
    ],
)
def test_two_experts_over_four_ranks_give_the_numbers_of_one_rank(ranks, model_of, family, options, optimizer, close):
    # With a small epsilon Adam makes whole steps of rounding errors, where a gradient nearly cancels.
    training = {"per_device_train_batch_size": 2, "adam_epsilon": 1e-4, "optimizer": optimizer}
    spec = fsdp_spec(model_of(family, **FAMILIES[family]), training=training, options=options)
    (norms, logprobs, weights, sent, experts), *_ = ranks.run(trained, 1, spec)
    answers = ranks.run(trained, 4, spec)
    found = answers[0]
    assert found[0] == pytest.approx(norms, rel=close)
    assert weights.keys() == found[2].keys()
    assert max(relative(found[2][name], weights[name]) for name in weights) < close
    torch.testing.assert_close(torch.cat([answer[1] for answer in answers]), logprobs, rtol=close, atol=close)
    assert sent.keys() == found[3].keys()
    assert all(torch.equal(found[3][name], found[2][name].to(tensor.dtype)) for name, tensor in sent.items())
    # Every rank has a quarter of the rows, and of their moments. Cut by expert it would be a half, or nothing.
    for answer in answers:
        assert answer[4] == {name: [size // 4 for size in sizes] for name, sizes in experts.items()}


@pytest.mark.parametrize(("wrote", "reads"), [(4, 1), (4, 2), (1, 4), (2, 4), (4, 4)])
def test_checkpoints_go_from_experts_that_are_cut_to_whole_ones_and_back(ranks, model_of, written, wrote, reads):
    spec = fsdp_spec(model_of("qwen3_moe", **TWO), training={"adam_epsilon": 1e-6})
    folder, (saved, norms, end) = written(write, wrote, spec)
    loaded, norms_after, end_after = ranks.run(read, reads, spec, folder)[0]
    assert any("experts" in name and name.endswith("exp_avg_sq") for name in saved)
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert norms_after == pytest.approx(norms, rel=1e-5)
    if wrote == reads:
        assert all(torch.equal(end[name], end_after[name]) for name in end)
    for name, tensor in end.items():
        torch.testing.assert_close(end_after[name], tensor, rtol=1e-4, atol=1e-5)


def norm_before_clipping(info, spec):
    """(the norm that a step reports, that of the whole gradient, that of the whole gradient after clipping)"""
    from train_contract import LOSS, make_batch

    strategy, found = build(spec, info), []
    clip = torch.nn.utils.clip_grad_norm_

    def watched(parameters, limit):
        def whole():
            return float(torch.stack([strategy._full(p.grad).norm() for p in parameters]).norm())

        before = whole()
        norm = clip(parameters, limit)
        found.extend([before, whole()])
        return norm

    torch.nn.utils.clip_grad_norm_ = watched
    try:
        metrics = strategy.train_step(make_batch().select(shard_of(info.rank, info.world_size)), LOSS).result()
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
    return metrics.get("actor/grad_norm"), *found


def test_gradients_are_clipped_by_the_norm_over_rows_of_all_ranks(ranks, model_of):
    reported, before, after = ranks.run(norm_before_clipping, 4, fsdp_spec(model_of("qwen3_moe", **TWO)))[0]
    assert reported == pytest.approx(before, rel=1e-5)
    assert before > 0.5 and after == pytest.approx(0.5, rel=1e-4)


def test_of_stacked_experts_only_the_rows_that_a_rank_has_are_read(tmp_path, monkeypatch):
    stacked = torch.arange(3 * 6 * 4.0).view(3, 6, 4)
    save_file({"experts": stacked}, tmp_path / "model.safetensors")
    weights = object.__new__(StreamedWeights)
    weights._files = StoredTensors([tmp_path / "model.safetensors"])
    weights._sources, weights._shapes = {"experts": ["experts"]}, {"experts": stacked.shape}
    numbers_read = []
    read = StoredTensors.read
    monkeypatch.setattr(StoredTensors, "read", lambda *args, **keys: numbers_read.append(read(*args, **keys)) or (
        numbers_read[-1]))  # fmt: skip
    for start in range(stacked.numel()):
        for stop in range(start + 1, stacked.numel() + 1):
            local = torch.zeros(stop - start)
            weights.read("experts", local, start)
            assert torch.equal(local, stacked.view(-1)[start:stop])
    numbers_read.clear()
    for expert in range(3):
        weights.read("experts", torch.zeros(8), expert * 24 + 2 * 4)  # rows 2 and 3
    assert [part.numel() for part in numbers_read] == [8, 8, 8]
