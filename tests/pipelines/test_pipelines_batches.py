"""Around credit: rows from groups, mini-batches, old log-probs, validation numbers, query filters."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from rows import R, make_config, make_group, make_rollouts

from roll.configs.schema.policy_config import TrainInferCorrection
from roll.configs.schema.reward_config import FilterArgs, QueryFilterConfig, ValidationConfig
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import ActorInferConfig, ActorTrainConfig, ModelArgs
from roll.distributed.cluster import Cluster
from roll.distributed.layout import RankLayout
from roll.distributed.placement import RolePlacement
from roll.pipelines.rl.rlvr import query_filter
from roll.pipelines.rl.update import mini_batches, old_logprobs_source, train
from roll.pipelines.rollouts.assemble import assemble
from roll.pipelines.rollouts.validation import (
    bootstrap_spread,
    extreme_of_k,
    majority,
    majority_of_k,
    pass_at_k,
    validation_metrics,
)
from roll.pipelines.run.loop import Loop
from roll.pipelines.run.role_offload import DeviceOffloader
from roll.pipelines.workers.train_worker import TrainWorker
from roll.types.batch import TokenOutputs
from roll.types.metrics import Metrics

# Scores 1, 0, 0, 3 in two groups of two, one token each.
FOUR = ([R(1.0), R(0.0)], [R(0.0), R(3.0)])


# --- assemble ---------------------------------------------------------------------------------------------------------


def test_assembled_rows_are_the_survivors_with_their_columns_aligned():
    groups = [
        make_group("x", [R(1.0, 2), R(9.0, 3, "reward_error"), R(0.0, 1, "truncated")]),
        make_group("y", [R(2.0, 1)], "b"),
    ]
    rollouts = assemble(groups)
    batch = rollouts.batch
    assert batch.row_ids == ("x#0", "x#2", "y#0")
    assert batch.group_ids == ("x", "x", "y")
    assert rollouts.group_index.tolist() == [0, 0, 1]
    assert [task.id for task in rollouts.tasks] == ["x", "x", "y"]
    assert batch.offsets.tolist() == [0, 4, 7, 10]
    assert batch.row("token_ids", 0).tolist() == [7, 8, 10, 11]
    assert batch.row("action_mask", 0).tolist() == [False, False, True, True]
    assert batch.row("sampling_logprobs", 0).tolist() == [0.0, 0.0, -1.0, -1.0]
    assert batch.row("versions", 0).tolist() == [-1, -1, 3, 3]
    assert rollouts.rewards.tolist() == [1.0, 0.0, 2.0]
    assert rollouts.response_lengths.tolist() == [2, 1, 1]
    assert rollouts.truncated.tolist() == [False, True, False]


# --- update -----------------------------------------------------------------------------------------------------------


def test_mini_batches_have_every_row_once_with_all_its_columns():
    batch = make_rollouts([R(float(i)) for i in range(7)]).batch
    pieces = list(mini_batches(batch, 3, "key", 1))
    assert [len(piece) for piece in pieces] == [3, 3, 1]
    assert sorted(row for piece in pieces for row in piece.row_ids) == sorted(batch.row_ids)
    assert all(set(piece.columns()) >= set(batch.columns()) for piece in pieces)
    orders = {tuple(p.row_ids for p in mini_batches(batch, 3, "key", i)) for i in range(5)}
    assert len(orders) > 1
    whole = list(mini_batches(batch, 7, "key", 1))
    assert [piece.row_ids for piece in whole] == [batch.row_ids]


BF16 = ActorInferConfig(model_args=ModelArgs(dtype="bf16"))
TWO_STEPS = ActorTrainConfig(training_args=TrainingArgs(per_device_train_batch_size=2))
STALE = {"async_generation_ratio": 1.5, "allow_uncorrected_async": True}


class TwoRanks(Cluster):
    """Two ranks that hold `dp_size` copies of a model, without processes; keeps how many rows each call brought."""

    def __init__(self, dp_size: int, role: str = "actor_train") -> None:
        super().__init__(RolePlacement(role, ((0,), (1,))), TrainWorker, rpc_timeout=1, balance=False)
        shards = [(0, True), (1, True)] if dp_size == 2 else [(0, True), (0, False)]
        self.places = [RankLayout(shard, dp_size, collects) for shard, collects in shards]
        self.rows: list[list[int]] = []
        self.pre_update_versions: list[int | None] = []

    def _run(self, name, args, timeout):
        if name == "layout":
            return self.places
        pieces = [batch for batch, *_ in args.values()]
        self.rows.append([len(piece) for piece in pieces])
        if name == "train_step":
            self.pre_update_versions += [rest[0] for _, *rest in args.values()][:1]
            return [Metrics() for _ in pieces]
        zeros = [torch.zeros(len(piece.token_ids)) for piece in pieces]
        pairs = zip(pieces, zeros, strict=True)
        return [TokenOutputs(row_ids=p.row_ids, offsets=p.offsets, logprobs=z) for p, z in pairs]

    async def _run_async(self, name, rank, args, timeout):
        raise AssertionError(name)

    def shutdown(self):
        raise AssertionError


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_small_batch_leaves_data_parallel_ranks_without_rows(dp_size):
    # One row: ranks that share a model both work on it; of ranks with rows of their own, the second has none.
    rollouts = make_rollouts([R(1.0)])
    batch = rollouts.batch
    cluster = TwoRanks(dp_size)
    alone = SimpleNamespace(offloader=DeviceOffloader(()))
    assert Loop.forward(alone, cluster, batch, "logprobs").row_ids == batch.row_ids
    train(cluster, make_config(), rollouts, 1)
    assert cluster.rows == [[1, 0] if dp_size == 2 else [1, 1]] * 2


@pytest.mark.parametrize(
    ("keys", "role", "expected"),
    [
        # 4 responses in mini-batches of 2, twice: only the first of the 4 steps meets the weights that sampled.
        ({}, "actor_train", [6, None, None, None]),
        ({}, "critic", [None, None]),
        # A forward pass of its own has measured every row already.
        ({"actor_infer": BF16}, "actor_train", [None] * 4),
        ({"actor_infer": BF16, **STALE}, "actor_train", [6, None, None, None]),
        ({"policy_loss": "decoupled_ppo"}, "actor_train", [None] * 4),
    ],
)
def test_the_mismatch_is_measured_once_before_the_first_update(keys, role, expected):
    cluster = TwoRanks(1, role)
    config = make_config(ppo_epochs=2, actor_train=TWO_STEPS, adv_estimator="gae", **keys)
    train(cluster, config, make_rollouts(*FOUR), 7)
    assert cluster.pre_update_versions == expected


SAMPLED = {"uses": "sampler", "why": "hf_infer in fp32"}
FORWARD = {"uses": "forward", "why": "differ from the trainer's"}
BEHAVIOUR = {"uses": "sampler", "why": "the policy that sampled"}
OTHER_ROPE = ActorInferConfig(model_args=ModelArgs(model_config_kwargs={"rope_theta": 5}))
SOURCES = {
    "one optimizer step": ({}, {"uses": "update", "why": "one optimizer step"}),
    "two passes": ({"ppo_epochs": 2}, {**SAMPLED, "reader": "2 optimizer steps"}),
    "two mini-batches": ({"actor_train": TWO_STEPS}, {**SAMPLED, "reader": "2 optimizer steps"}),
    "KL in the reward": ({"add_token_level_kl": True}, {**SAMPLED, "reader": "the KL in the reward"}),
    "KL of coefficient 0": ({"add_token_level_kl": True, "init_kl_coef": 0.0}, {"uses": "update", "why": ""}),
    "correction": ({"train_infer_correction": TrainInferCorrection()}, {**FORWARD, "reader": "train_infer_correction"}),
    "half precision": ({"ppo_epochs": 2, "actor_infer": BF16}, FORWARD),
    "another model configuration": ({"ppo_epochs": 2, "actor_infer": OTHER_ROPE}, FORWARD),
    "decoupled": ({"policy_loss": "decoupled_ppo"}, {**FORWARD, "reader": "policy_loss decoupled_ppo"}),
    "decoupled, two passes": ({"policy_loss": "decoupled_ppo", "ppo_epochs": 2}, {**FORWARD, "reader": "2 optimizer"}),
    "ahead, corrected": ({**STALE, "train_infer_correction": TrainInferCorrection()}, FORWARD),
    "ahead, decoupled": ({**STALE, "policy_loss": "decoupled_ppo"}, FORWARD),
    "ahead, uncorrected": (STALE, BEHAVIOUR),
    "ahead, several steps": ({**STALE, "ppo_epochs": 2}, BEHAVIOUR),
    "ahead, half precision": ({**STALE, "actor_infer": BF16}, BEHAVIOUR),
    "ahead, KL in the reward": ({**STALE, "add_token_level_kl": True}, BEHAVIOUR),
    "ahead, a loss with its own weight": ({"async_generation_ratio": 0.5, "policy_loss": "tis"}, BEHAVIOUR),
}


@pytest.mark.parametrize("case", SOURCES)
def test_old_logprobs_come_from_where_they_are_cheapest_and_say_why(case):
    keys, expected = SOURCES[case]
    found = old_logprobs_source(make_config(**keys))
    assert found.source == expected["uses"]
    assert expected["why"] in found.reason
    assert expected.get("reader", "") in found.reason


# --- validation -------------------------------------------------------------------------------------------------------


def test_the_bootstrap_gives_the_standard_error_of_a_mean():
    # a quarter of 100 tasks right: sqrt(0.25 * 0.75 / 100) = 0.0433; 4,000 draws know it to about 1 %
    values = [1.0] * 25 + [0.0] * 75
    assert bootstrap_spread(values, 4000, "a") == pytest.approx(math.sqrt(0.25 * 0.75 / 100), rel=0.05)
    assert bootstrap_spread(values, 50, "a") == bootstrap_spread(values, 50, "a") != bootstrap_spread(values, 50, "b")
    assert bootstrap_spread([1.0], 10) == 0.0


def test_the_best_and_the_worst_of_k_are_means_over_all_draws():
    # draws of two from 1, 2, 4: (1, 2), (1, 4), (2, 4)
    assert extreme_of_k([4.0, 1.0, 2.0], 2, best=True) == pytest.approx((2 + 4 + 4) / 3)
    assert extreme_of_k([4.0, 1.0, 2.0], 2, best=False) == pytest.approx((1 + 1 + 2) / 3)
    assert extreme_of_k([4.0, 1.0, 2.0], 1, best=True) == pytest.approx(7 / 3)
    assert extreme_of_k([4.0, 1.0, 2.0], 3, best=False) == 1.0
    with pytest.raises(ValueError, match="at least 4 responses, got 3"):
        extreme_of_k([4.0, 1.0, 2.0], 4, best=True)


def test_pass_at_k_is_the_chance_of_a_right_one_among_k():
    # 4 responses, 1 right: pass@1 1/4; pass@2 1 - C(3,2)/C(4,2) = 1/2; pass@4 1. 2 right: pass@2 1 - 1/6.
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(4, 0, 4) == 0.0
    with pytest.raises(ValueError, match="at least 5 responses, got 4"):
        pass_at_k(4, 4, 5)


def test_a_majority_is_as_right_as_the_answer_that_most_state_and_the_first_of_equals_wins():
    assert majority(["5", "7", "7"], [0.0, 1.0, 1.0]) == 1.0
    assert majority(["7", "5", "5", "7"], [1.0, 0.0, 0.0, 1.0]) == 1.0
    assert majority(["5", "7", "7", "5"], [0.0, 1.0, 1.0, 0.0]) == 0.0
    assert majority([None, "7", None], [0.0, 1.0, 0.0]) == 0.0, "those without an answer vote together"
    # Draws of two of 7, 5, 5: (7, 5) and (7, 5) are ties that the 7 wins, (5, 5) is wrong.
    answers, right = ["7", "5", "5"], [1.0, 0.0, 0.0]
    assert [majority_of_k(answers, right, k) for k in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 0.0])
    with pytest.raises(ValueError, match="at least 4 responses, got 3"):
        majority_of_k(answers, right, 4)


def test_a_vote_over_many_draws_is_near_the_exact_one_and_the_same_each_time():
    # 9 of 15 state the right answer. Three votes of one draw: right with 2 or 3 of the right ones.
    answers, right = ["7"] * 9 + ["5"] * 6, [1.0] * 9 + [0.0] * 6
    exact = (math.comb(9, 3) + math.comb(9, 2) * 6) / math.comb(15, 3)
    assert majority_of_k(answers, right, 3) == pytest.approx(exact)  # all 455 draws
    found = majority_of_k(answers, right, 5, "task")  # 3,003 draws
    five = sum(math.comb(9, i) * math.comb(6, 5 - i) for i in (3, 4, 5)) / math.comb(15, 5)
    assert found == majority_of_k(answers, right, 5, "task") != majority_of_k(answers, right, 5, "other")
    assert found == pytest.approx(five, abs=0.06)


def test_validation_votes_where_responses_state_answers(caplog):
    config = ValidationConfig(data_args=None, maj_at_k=(2, 3), bootstrap=100)  # type: ignore[arg-type]
    groups = [
        make_group("p", [R(1.0, answer="7"), R(0.0, answer="5"), R(0.0, answer="5")]),
        make_group("q", [R(1.0, answer="7"), R(0.0, answer="5"), R(7.0, 1, "reward_error")]),
        make_group("r", [R(0.0), R(1.0)], "b"),
    ]
    values = validation_metrics(groups, config)
    assert values["val/a/maj_at_2"] == pytest.approx((2 / 3 + 1) / 2)
    assert values["val/a/maj_at_3"] == 0.0  # only p has three
    assert 0.05 < values["val/a/maj_at_2_spread"] < 0.2  # |1 - 2/3| / 2 / sqrt(2) = 0.12
    assert "val/b/maj_at_2" not in values
    assert "no response of domain b states an answer" in caplog.text


def test_validation_counts_by_task_and_domain_and_leaves_failures_out():
    config = ValidationConfig(data_args=None, pass_at_k=(1, 2), pass_threshold=0.5, bootstrap=100)  # type: ignore[arg-type]
    groups = [
        make_group("p", [R(1.0, 2), R(0.5, 4)]),
        make_group("q", [R(0.0, 6), R(7.0, 1, "reward_error")]),
        make_group("r", [R(0.0), R(1.0)], "b"),
    ]
    values = validation_metrics(groups, config)
    # Domain a: p 2 of 2 right, q 0 of 1 (the failure has no score): accuracy 0.5, reward (1 + 0.5 + 0) / 3.
    assert values["val/a/accuracy"] == 0.5
    assert values["val/a/reward"] == pytest.approx(0.5)
    assert values["val/a/length_mean"] == pytest.approx(4.0)
    assert values["val/a/failed"] == 1.0
    assert 0.2 < values["val/a/accuracy_spread"] < 0.5  # sqrt(0.25 / 2) = 0.35 for two tasks of 1 and 0
    assert 0.15 < values["val/accuracy_spread"] < 0.35
    # pass@2 only of tasks with two scores.
    assert (values["val/a/pass_at_1"], values["val/a/pass_at_2"]) == (0.5, 1.0)
    # b: one of two; the overall accuracy is the mean over the three tasks. Its weight of 2 has no say.
    assert (values["val/b/accuracy"], values["val/b/reward"]) == (0.5, 0.5)
    assert values["val/b/pass_at_2"] == 1.0
    assert values["val/accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert values["val/reward"] == pytest.approx((1 + 0.5 + 0 + 0 + 1) / 5)  # of all responses with a score
    assert values["val/responses"] == 6.0


# --- query filter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "scores", "keeps"),
    [
        ("no_filter", (1.0, 1.0), True),
        ("mean_filter", (1.0, 0.0), True),
        ("mean_filter", (0.0, 0.0), False),  # not above threshold_down
        ("mean_filter", (1.0, 1.0), False),  # not below threshold_up
        ({"threshold_down": 0.4, "threshold_up": 0.6}, (0.0, 1.0), True),
        ({"threshold_down": 0.5, "threshold_up": 0.6}, (0.0, 1.0), False),
        ("std_filter", (1.0, 1.0), False),
        ("std_filter", (1.0, 0.9), True),
        ("std_filter", (1.0,), False),
        ({"std_threshold": 0.7}, (1.0, 0.0), True),  # std 0.70711
        ({"std_threshold": 0.71}, (1.0, 0.0), False),
    ],
)
def test_query_filters_keep_what_lies_between_their_thresholds(rule, scores, keeps):
    args = FilterArgs() if isinstance(rule, str) else FilterArgs(**rule)
    kind = rule if isinstance(rule, str) else "std_filter" if "std_threshold" in rule else "mean_filter"
    reason = query_filter(make_group("x", [R(s) for s in scores]), QueryFilterConfig(type=kind, filter_args=args))
    assert (reason is None) == keeps
    assert keeps or reason.startswith("filtered: ")


def test_a_query_filter_looks_at_survivors_only():
    group = make_group("x", [R(1.0), R(1.0), R(0.0, 1, "reward_error")])
    assert query_filter(group, QueryFilterConfig(type="std_filter")) is not None
