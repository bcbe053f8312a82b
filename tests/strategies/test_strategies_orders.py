"""Two ranks, whatever comes after what: passes without gradients, exceptions, saves, exports and loads change nothing.

Six options here; `make evidence EVIDENCE=orders` plays every option that is accepted.
"""

from __future__ import annotations

import pytest
from layout_contract import layout_spec
from rank_orders import ORDERS, differences, first_other, play_and_resume, play_order, undisturbed
from train_contract import build, make_batch

TRAINING = {"per_device_train_batch_size": 1}
"""Five micro-batches on one rank, one and four without rows on the other."""
SIX = {
    "fsdp2_train": [
        {"reshard_after_forward": False},
        {"shard_between_micro_batches": False, "reshard_after_forward": False},
        {"fsdp_size": 1},
    ],
    "deepspeed_train": [
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}},
    ],
}
ORDER = "after a pass without gradients"


@pytest.fixture(scope="module")
def alone(ranks, model_of, tmp_path_factory):
    """What one rank without a process group gives."""
    spec = layout_spec(model_of("llama"), "fsdp2_train", {}, training=TRAINING)
    return ranks.run(play_order, 1, spec, tmp_path_factory.mktemp("alone"), undisturbed(ORDERS[ORDER]))[0]


@pytest.mark.parametrize("strategy", SIX)
def test_two_ranks_equal_one_and_go_on_from_a_checkpoint_to_the_bit(ranks, model_of, tmp_path, alone, strategy):
    specs = [layout_spec(model_of("llama"), strategy, options, training=TRAINING) for options in SIX[strategy]]
    played = ranks.run(play_and_resume, 2, specs, tmp_path, ORDERS[ORDER])
    for options, *of_ranks in zip(SIX[strategy], *played, strict=True):
        found = differences([whole for whole, _ in of_ranks], alone)
        assert max(found.values()) < 1e-6, (options, found)
        for whole, resumed in of_ranks:
            assert first_other(resumed, whole) is None, options


def bf16_after_forward(info, spec):
    """Whether weights that are sent after a pass without gradients are those before it; with LoRA all parts of them."""
    strategy = build(spec, info)
    parts = ("merged", "base", "adapters") if spec.worker.model_args.uses_lora else ("merged",)
    before = [{n: t.clone() for n, t in strategy.named_weights(part)} for part in parts]
    strategy.forward(make_batch(), ("logprobs",))
    after = [{n: t.clone() for n, t in strategy.named_weights(part)} for part in parts]
    return [all(one[n].equal(other[n]) and one[n].dtype == other[n].dtype for n in one)
            for one, other in zip(before, after, strict=True)]  # fmt: skip


@pytest.mark.parametrize("lora", [False, True])
def test_weights_that_are_sent_after_a_pass_without_gradients_are_not_rounded(ranks, model_of, lora):
    model = {"dtype": "bf16", **({"lora_rank": 2} if lora else {})}
    spec = layout_spec(model_of("llama"), "fsdp2_train", {"reshard_after_forward": False}, model=model)
    for equal in ranks.run(bf16_after_forward, 2, spec):
        assert all(equal)
