"""Scores of reward models are transformers' own logits, whatever the batch; what is no classifier is refused."""

from __future__ import annotations

import pytest
import torch
from tiny_classifiers import build_tiny_classifier
from tiny_models import build_tiny_model, char_tokenizer
from train_contract import make_info

from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.reward_config import RewardModelConfig
from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies import build_train_strategy
from roll.strategies.base import TrainSpec
from roll.types.batch import TokenBatch

PAD = 0
ROWS = [
    [9, 10, 11, 12, 13, 14, 15],
    [20, 21],
    [30, PAD, 31, PAD, 32],  # the padding id in the middle of a text is a token like any other
    [40, 41, 42, PAD, PAD],  # at its end it is passed over, as transformers does
    [PAD, PAD, PAD],
    [50, 51, 52, 53],
]


def strategy_of(path, dtype="fp32", info=None, **options):
    args = ModelArgs(model_name_or_path=str(path), dtype=dtype)
    spec = TrainSpec(
        role="reward_model", kind="reward", worker=RewardModelConfig(model_args=args, **options), seed=0, trains=False
    )
    return build_train_strategy(spec, info or make_info(0, 1, 0))


def scores(strategy, rows):
    batch = TokenBatch(
        row_ids=tuple(map(str, range(len(rows)))),
        group_ids=tuple(map(str, range(len(rows)))),
        offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
        token_ids=torch.tensor([token for row in rows for token in row]),
        action_mask=torch.tensor([i == len(row) - 1 for row in rows for i in range(len(row))]),
    )
    values = strategy.forward(batch, ("values",)).values
    assert values is not None
    assert not values[~batch.action_mask].any()
    return values[batch.action_mask].tolist()


def own_logits(path, rows, label=0):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits[:, label].tolist()


BATCHES = {
    "alone": {"infer_batch_size": 1},
    "some": {"infer_batch_size": 4},
    "all": {"infer_batch_size": 16, "sequence_length_round_in_infer": 8},
    "packed": {"infer_batch_size": 4, "use_sequence_packing": True},
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("batches", BATCHES)
def test_scores_are_the_classifiers_logits_over_ragged_rows(tmp_path, family, batches):
    path = build_tiny_classifier(tmp_path, family)
    mine = scores(strategy_of(path, **BATCHES[batches]), ROWS)
    assert mine == pytest.approx(own_logits(path, ROWS), abs=1e-5)
    assert max(mine) - min(mine) > 0.1


def test_deepspeed_gives_the_same_scores(tmp_path):
    path = build_tiny_classifier(tmp_path)
    mine = scores(strategy_of(path, strategy_args=StrategyArgs(strategy_name="deepspeed_infer")), ROWS)
    assert mine == pytest.approx(own_logits(path, ROWS), abs=1e-5)


def shared_out(info, path, strategy_args):
    """Each rank scores its own of the rows; the last has fewer, and takes part with a padding row."""
    strategy = strategy_of(path, info=info, strategy_args=strategy_args)
    return scores(strategy, ROWS[:4] if info.rank == 0 else ROWS[4:])


LAYOUTS = {
    "sharded": StrategyArgs(strategy_name="fsdp2_infer"),
    "copies": StrategyArgs(strategy_name="fsdp2_infer", strategy_config=Fsdp2Config(fsdp_size=1)),
    "zero 3": StrategyArgs(
        strategy_name="deepspeed_infer", strategy_config=DeepSpeedConfig(zero_optimization={"stage": 3})
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_give_the_bits_of_one(ranks, tmp_path, layout):
    path = build_tiny_classifier(tmp_path)
    alone = ranks.run(shared_out, 1, path, StrategyArgs(strategy_name="fsdp2_infer"))[0]
    first, second = ranks.run(shared_out, 2, path, LAYOUTS[layout])
    assert first == alone
    assert first + second == pytest.approx(own_logits(path, ROWS), abs=1e-5)


def test_half_precision_scores_are_the_models_own(tmp_path):
    from transformers import AutoModelForSequenceClassification

    path = build_tiny_classifier(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        own = [float(model(input_ids=torch.tensor([row])).logits) for row in ROWS]
    assert scores(strategy_of(path, dtype="bf16"), ROWS) == own


def test_a_label_is_chosen_by_its_index(tmp_path):
    path = build_tiny_classifier(tmp_path, labels=3)
    for label in range(3):
        assert scores(strategy_of(path, label=label), ROWS) == pytest.approx(own_logits(path, ROWS, label), abs=1e-5)


def test_a_model_with_several_labels_wants_one_named(tmp_path):
    path = build_tiny_classifier(tmp_path, labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    with pytest.raises(ValueError, match=r"reward_model.label: .*3 outputs: 0 \(bad\), 1 \(fair\), 2 \(good\)"):
        strategy_of(path)
    with pytest.raises(ValueError, match=r"reward_model.label: got 3, expected an output of the model"):
        strategy_of(path, label=3)


def test_a_score_alone_has_the_same_bits_in_any_company(tmp_path):
    strategy = strategy_of(build_tiny_classifier(tmp_path))
    alone = [scores(strategy, [row])[0] for row in ROWS]
    assert scores(strategy, ROWS) == alone
    assert scores(strategy, ROWS[::-1]) == alone[::-1]


def test_a_model_without_padding_id_is_read_at_the_last_token(tmp_path):
    path = build_tiny_classifier(tmp_path, pad_token_id=None)
    mine = scores(strategy_of(path, infer_batch_size=8), ROWS)
    assert mine == pytest.approx([own_logits(path, [row])[0] for row in ROWS], abs=1e-5)


def test_a_language_model_is_no_reward_model(tmp_path):
    with pytest.raises(ValueError, match=r"is no trained sequence classifier: it has no score.weight"):
        strategy_of(build_tiny_model(tmp_path), label=0)


def test_an_encoder_is_refused(tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "bert",
        vocab_size=120,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BertForSequenceClassification has no linear head called 'score'"):
        strategy_of(tmp_path)
