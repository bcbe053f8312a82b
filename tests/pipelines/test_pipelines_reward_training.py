"""Training reward models as a whole: steps against plain transformers, the exported classifier, its use as a role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_contract import BACKENDS
from preferences import LORA, TRAINING, classifier_in, optimizer_of, preferences, step_by_hand, tokenizer_in, write
from tiny_classifiers import build_tiny_classifier
from toy import config_of, run_toy

from roll.configs.errors import ConfigError
from roll.data.finished_rows import RowOrder
from roll.data.preference_rows import scored_batch_of
from roll.data.templates import PromptEncoder
from roll.pipelines.offline.reward_model import reward_data
from roll.pipelines.workers.train_worker import resolved_model_args
from roll.strategies.training.pretrained import load_tokenizer
from roll.types.trajectory import Task

PIPELINE = "reward_model"
REGRESSION = ("loss_type=regression",)


def classifier_of(model: Path, tokenizer: Any) -> Any:
    """The starting model as transformers makes a classifier of it, with a head of zeros."""
    from transformers import AutoModelForSequenceClassification

    found = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32, num_labels=1)
    found.config.pad_token_id = tokenizer.pad_token_id
    torch.nn.init.zeros_(found.score.weight)
    return found


def scores_of(model: Any, batch: Any) -> torch.Tensor:
    """What transformers itself gives for the rows."""
    ids = batch.pad("token_ids", model.config.pad_token_id).long()
    return model(input_ids=ids, attention_mask=batch.valid().long()).logits[:, 0]


def loss_by_hand(model: Any, batch: Any, options: tuple[str, ...]) -> torch.Tensor:
    scores, targets = scores_of(model, batch), batch.require("targets")
    if options == REGRESSION:
        return ((scores - targets) ** 2).mean()
    chosen, rejected = scores[0::2], scores[1::2]
    center = 0.1 * (chosen + rejected) ** 2 if any("center" in option for option in options) else 0.0
    return (-torch.nn.functional.logsigmoid(chosen - rejected - targets[0::2]) + center).mean()


BY_HAND = {
    "bradley_terry": (),
    "margins": ("actor_train.data_args.margin=margin",),
    "centred": ("center_rewards_coefficient=0.1",),
    "regression": REGRESSION,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_steps_are_those_of_a_plain_transformers_loop(tiny_model: Path, tmp_path: Path, name: str) -> None:
    options = BY_HAND[name]
    folder = write(tmp_path, tiny_model, PIPELINE, single=name == "regression")
    rows = run_toy(folder, *options)
    config, tokenizer = config_of(folder, *options), tokenizer_in(tiny_model)
    order = RowOrder(reward_data(config, tokenizer).training.rows, scored_batch_of, seed=config.seed)
    model = classifier_of(tiny_model, tokenizer)
    optimizer = optimizer_of(model)
    for row in rows:
        expected = step_by_hand(model, optimizer, loss_by_hand(model, order.take(config.rows_per_step), options))
        assert row["preference/loss"] == pytest.approx(expected["preference/loss"], rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    trained = classifier_in(folder / "output" / "hf_model").state_dict()
    assert trained.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-3, atol=1e-4)


def test_lora_trains_adapters_and_the_head(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model, PIPELINE, rows=40)
    rows = run_toy(folder, *LORA, "max_steps=20", "validation_share=0.25", "eval_steps=20")
    assert rows[-1]["val/accuracy"] >= 0.9
    before, after = (model.state_dict() for model in (classifier_of(tiny_model, tokenizer_in(tiny_model)),
                                                      classifier_in(folder / "output" / "hf_model")))  # fmt: skip
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert "score.weight" in changed
    assert "model.layers.0.self_attn.q_proj.weight" in changed


@pytest.mark.parametrize("backend", ["fsdp2", *BACKENDS])
def test_training_goes_on_from_a_classifier_with_its_head(tmp_path: Path, backend: str) -> None:
    start = build_tiny_classifier(tmp_path / "start")
    folder = write(tmp_path / "run", start, PIPELINE)
    rows = run_toy(folder, *BACKENDS.get(backend, ()), "max_steps=1")
    config, tokenizer = config_of(folder), tokenizer_in(start)
    order = RowOrder(reward_data(config, tokenizer).training.rows, scored_batch_of, seed=config.seed)
    with torch.no_grad():
        expected = loss_by_hand(classifier_in(start), order.take(config.rows_per_step), ())
    assert rows[0]["preference/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert rows[0]["preference/loss"] != pytest.approx(0.693147, rel=1e-3)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_classifier_of_several_outputs_is_refused(tmp_path: Path, backend: str) -> None:
    start = build_tiny_classifier(tmp_path / "start", labels=3)
    with pytest.raises(Exception, match="is a classifier with 3 outputs; expected one, or a language model"):
        run_toy(write(tmp_path / "run", start, PIPELINE), *BACKENDS.get(backend, ()))


def test_what_is_learnt_is_what_the_role_of_a_reward_model_reads(tiny_model: Path, tmp_path: Path) -> None:
    """The tokens that a score is trained on are those that RLVR's `reward_model` gives the classifier."""
    folder = write(tmp_path, tiny_model, PIPELINE)
    config = config_of(folder)
    tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
    for template in ("native", "plain", "question_answer"):
        config = config_of(folder, f"actor_train.data_args.template={template}")
        row = reward_data(config, tokenizer).training.rows[0]
        (said,) = preferences(1)
        messages = [{"role": "user", "content": said["prompt"]}]
        task = Task(
            id="", source="", payload={"prompt": said["prompt"], "messages": messages}, seed=0, tag="", domain=""
        )
        read = PromptEncoder(tokenizer, template=template).encode(task, said["chosen"])
        assert row.sequences[0].token_ids.tolist() == list(read), template


BAD_CONFIGS = {
    "half a pair": ((f"{TRAINING}.per_device_train_batch_size=3",), "got 3, expected an even number"),
    "a loss of dpo": (("loss_type=sigmoid",), "loss_type: got 'sigmoid'"),
    "a reference": (("reference={}",), "reference"),
    "centred scores": ((*REGRESSION, "center_rewards_coefficient=1"), "center_rewards_coefficient: this key acts only"),
    "margins of scores": ((*REGRESSION, "actor_train.data_args.margin=m"), "margin: this key acts only where rows"),
    "no margins": (("actor_train.data_args.margin=m",), "margin: got 'm', expected a column of"),
    "no scores": (REGRESSION, "data_args.response: got null, expected a column of .*; it has none of completion"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_what_cannot_run_is_refused_by_its_key(tiny_model: Path, tmp_path: Path, name: str) -> None:
    overrides, message = BAD_CONFIGS[name]
    with pytest.raises(ConfigError, match=message):
        config_of(write(tmp_path, tiny_model, PIPELINE), *overrides)
