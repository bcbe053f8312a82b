"""Preference training as a whole: steps against a loop of plain transformers, layouts, resume, backends, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from preferences import LORA, TRAINING, optimizer_of, policy_in, preferences, step_by_hand, tokenizer_in, write
from toy import config_of, run_toy

from roll.configs.errors import ConfigError
from roll.configs.rules.validate import warnings_of
from roll.data.finished_rows import RowOrder
from roll.data.preference_rows import batch_of, mismatched
from roll.pipelines.offline.dpo import dpo_data

REFERENCE = "reference={}"
SAID = ("preference/loss", "preference/margin", "actor/grad_norm", "preference/tokens")
"""No accuracy: in the first step the policy is the reference, and rounding says which margin is above 0."""
HELD = ("val/loss", "val/accuracy", "val/margin", "val/chosen_reward", "val/rejected_logprob")
KTO = ("loss_type=kto", REFERENCE)


def sums_of(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, lengths) of the responses' log-probs, all rows padded into one batch."""
    ids, taught = batch.pad("token_ids").long(), batch.pad("action_mask", False)
    logits = model(input_ids=ids, attention_mask=batch.valid().long()).logits[:, :-1].log_softmax(-1)
    logprobs = logits.gather(-1, ids[:, 1:, None])[..., 0] * taught[:, 1:]
    return logprobs.sum(1), taught.sum(1)


def sigmoid_by_hand(model: Any, reference: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        fixed, _ = sums_of(reference, batch)
    sums, _ = sums_of(model, batch)
    ratio = sums - fixed
    return -torch.nn.functional.logsigmoid(0.1 * (ratio[0::2] - ratio[1::2])).mean()


def simpo_by_hand(model: Any, reference: Any, batch: Any) -> torch.Tensor:
    del reference
    sums, lengths = sums_of(model, batch)
    mean = sums / lengths
    return -torch.nn.functional.logsigmoid(2.0 * (mean[0::2] - mean[1::2]) - 0.5).mean()


def kto_by_hand(model: Any, reference: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        fixed, _ = sums_of(reference, batch)
        other = mismatched(batch, 48)
        kl = (sums_of(model, other)[0] - sums_of(reference, other)[0]).mean().clamp(min=0)
    gain = 0.1 * (sums_of(model, batch)[0] - fixed - kl)
    liked = batch.require("preferred")
    return (1 - torch.where(liked, gain, -gain).sigmoid()).mean()


BY_HAND = {
    "sigmoid": (sigmoid_by_hand, (REFERENCE,)),
    "simpo": (simpo_by_hand, ("loss_type={name: simpo, beta: 2.0}",)),
    "kto": (kto_by_hand, KTO),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_steps_are_those_of_a_plain_transformers_loop(tiny_model: Path, tmp_path: Path, name: str) -> None:
    loss_of, options = BY_HAND[name]
    folder = write(tmp_path, tiny_model, single=name == "kto")
    rows = run_toy(folder, *options)
    config, tokenizer = config_of(folder, *options), tokenizer_in(tiny_model)
    order = RowOrder(dpo_data(config, tokenizer).training.rows, batch_of, seed=config.seed)
    model, reference = policy_in(tiny_model), policy_in(tiny_model)
    optimizer = optimizer_of(model)
    for row in rows:
        expected = step_by_hand(model, optimizer, loss_of(model, reference, order.take(config.rows_per_step)))
        assert row["preference/loss"] == pytest.approx(expected["preference/loss"], rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    trained = policy_in(folder / "output" / "hf_model").state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-3, atol=1e-4)
    assert rows[0]["preference/rows"] == (12 if name == "kto" else 6)


LOSSES = {
    "sigmoid": (REFERENCE, "label_smoothing=0.1"),
    "sigmoid_norm": (REFERENCE, "loss_type=sigmoid_norm", "beta=2"),
    "robust": (REFERENCE, "loss_type=robust", "label_smoothing=0.1"),
    "hinge": (REFERENCE, "loss_type=hinge"),
    "ipo": (REFERENCE, "loss_type=ipo"),
    "orpo": ("loss_type=orpo",),
    "simpo": ("loss_type=simpo", "beta=2"),
    "kto": KTO,
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns_the_preference(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, tiny_model, rows=40, single=name == "kto")
    options = (*LOSSES[name], "validation_share=0.25", "eval_steps=20", "val_before_train=true", "max_steps=20")
    rows = run_toy(folder, *options)
    assert rows[0]["step"] == 0
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert rows[-1]["val/accuracy"] >= 0.9
    assert rows[-1]["val/chosen_reward"] > rows[-1]["val/rejected_reward"]


def test_log_probs_computed_beforehand_are_those_of_each_step(tiny_model: Path, tmp_path: Path) -> None:
    options = (REFERENCE, "validation_share=0.2", "eval_steps=3", "max_steps=6")
    base = run_toy(write(tmp_path / "base", tiny_model), *options)
    rows = run_toy(write(tmp_path / "other", tiny_model), *options, "precompute_ref_log_probs=true")
    for row, other in zip(rows, base, strict=True):
        for key in (*SAID, *HELD):
            assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4, abs=1e-5), key
    assert "time/reference" in base[4]
    assert "time/reference" not in rows[4]


def test_with_lora_the_reference_is_the_model_without_its_adapters(tiny_model: Path, tmp_path: Path) -> None:
    alone = run_toy(write(tmp_path / "alone", tiny_model), *LORA)
    beside = run_toy(write(tmp_path / "beside", tiny_model), *LORA, REFERENCE)
    for row, other in zip(alone, beside, strict=True):
        assert row["preference/loss"] == pytest.approx(other["preference/loss"], rel=1e-6)
    exported = tmp_path / "alone" / "output" / "hf_model"
    assert (exported / "adapter" / "adapter_config.json").is_file()
    before, after = policy_in(tiny_model).state_dict(), policy_in(exported).state_dict()
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(
        before["model.layers.0.self_attn.q_proj.weight"], after["model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_single_row_that_is_left_for_the_last_step_of_kto_has_no_kl(tiny_model: Path, tmp_path: Path) -> None:
    """Its own response would be taken for another row's, and its log-ratio for the KL."""
    folder = write(tmp_path, tiny_model, single=True)
    liked = [row for row in preferences(50, single=True) if row["label"]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in liked))
    rows = run_toy(folder, *KTO, "num_train_epochs=1", "max_steps=0")
    assert [row["preference/rows"] for row in rows] == [12, 12, 1]
    assert rows[-1]["preference/kl"] == 0.0


OWN = '''
"""A loss of one's own."""


def squared(chosen, rejected, *, wanted=1.0):
    return (chosen - rejected - wanted) ** 2
'''


def test_a_loss_of_ones_own_trains(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    (folder / "own.py").write_text(OWN)
    rows = run_toy(folder, REFERENCE, f"loss_type={{name: '{folder}/own.py:squared', wanted: 2.0}}")
    assert rows[0]["preference/loss"] == pytest.approx(4.0, rel=1e-4)  # (0 - 0 - 2)^2
    assert rows[-1]["preference/loss"] < 4.0
    with pytest.raises(ConfigError, match=r"loss_type_args.wnted: .*did you mean 'wanted'"):
        config_of(folder, REFERENCE, f"loss_type={{name: '{folder}/own.py:squared', wnted: 2.0}}")


BAD_CONFIGS = {
    "no reference": ((), "reference: got null, expected a reference, because loss_type sigmoid compares with one"),
    "a reference for nothing": (("loss_type=orpo", REFERENCE), "reference: this key acts only with a loss_type"),
    "nothing to precompute": (
        ("loss_type=orpo", "precompute_ref_log_probs=true"),
        "precompute_ref_log_probs: this key",
    ),
    "a loss misspelt": ((REFERENCE, "loss_type=sigmoud"), "loss_type: got 'sigmoud'(?s:.*)did you mean 'sigmoid'"),
    "an option of another loss": ((REFERENCE, "simpo_gamma=1"), "simpo_gamma: this key acts only with loss_type"),
    "no such option": ((REFERENCE, "loss_type={name: hinge, gamma: 1}"), "loss_type_args"),
    "an option twice": ((REFERENCE, "loss_type={name: hinge, beta: 1}", "beta=2"), "loss_type_args.beta(?s:.*)keep"),
    "half of the labels wrong": ((REFERENCE, "label_smoothing=0.5"), "label_smoothing: got 0.5"),
    "robust against nothing": ((REFERENCE, "loss_type=robust"), "label_smoothing: got 0.0, expected more than 0"),
    "half a pair": (
        (REFERENCE, f"{TRAINING}.per_device_train_batch_size=3"),
        "per_device_train_batch_size: got 3, expected an even number",
    ),
    "one row for the KL": (
        (*KTO, f"{TRAINING}.per_device_train_batch_size=1", f"{TRAINING}.gradient_accumulation_steps=1"),
        "at least 2 rows per step",
    ),
    "a label of pairs": (
        (REFERENCE, "actor_train.data_args.label=ok"),
        "data_args.label: this key acts only where rows",
    ),
    "pairs of rows": (
        (*KTO, "actor_train.data_args.chosen_key=ok"),
        "chosen_key: this key acts only where rows are pairs",
    ),
    "column": (
        (REFERENCE, "actor_train.data_args.chosen_key=nope"),
        "chosen_key: got 'nope', expected a column of .*rows",
    ),
    "labels that aren't there": (KTO, "data_args.response: got null, expected .*; it has none of completion"),
    "no length": ((REFERENCE, "sequence_length=null"), "sequence_length: got null, expected the longest row"),
    "no file": ((REFERENCE, "actor_train.data_args.file_name=[]"), "actor_train.data_args.file_name: expected a file"),
    "ROLL's ipo": ((REFERENCE, "ipo=true"), "write loss_type: ipo"),
    "ROLL's chosen_key": ((REFERENCE, "chosen_key=a"), "it stands in actor_train.data_args"),
    "a key of others": ((REFERENCE, "rollout_batch_size=4"), "rollout_batch_size"),
    "nothing held out": (
        (REFERENCE, "eval_steps=1"),
        "eval_steps: this key acts only with validation(?s:.*)validation_share",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_what_cannot_run_is_refused_by_its_key(tiny_model: Path, tmp_path: Path, name: str) -> None:
    overrides, message = BAD_CONFIGS[name]
    with pytest.raises(ConfigError, match=message):
        config_of(write(tmp_path, tiny_model), *overrides)


def test_warnings_are_about_what_is_probably_not_meant(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    assert warnings_of(config_of(folder, "loss_type=simpo", "validation_share=0.1")) == [
        "rows are held out, but eval_steps and val_before_train are off: validation won't run",
        "simpo was published with beta 2.0 to 2.5; it is 0.1",
    ]
