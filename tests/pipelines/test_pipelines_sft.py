"""Fine-tuning as a whole: its steps against a loop of plain transformers, resume, export, backends, validation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from pipeline_contract import ACTOR
from preferences import policy_in, tokenizer_in
from toy import config_of, run_toy
from toy_sft import write_sft

from roll.configs.errors import ConfigError
from roll.configs.rules.validate import warnings_of
from roll.data.chat_masks import ConversationEncoder
from roll.data.finished_rows import RowOrder
from roll.data.sft_rows import batch_of
from roll.distributed.worker_errors import WorkerFailed
from roll.pipelines.offline.offline_pipeline import planned_steps
from roll.pipelines.offline.sft import sft_data
from roll.strategies.hf.fsdp2 import Fsdp2Strategy

LORA = ("actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_alpha=8")


def plain_loop(folder: Path, model: Any, tokenizer: Any, steps: int) -> list[dict[str, float]]:
    """The same steps with nothing but transformers: all rows of a step padded into one batch."""
    config = config_of(folder)
    order = RowOrder(sft_data(config, tokenizer).training.rows, batch_of, seed=config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    said = []
    for _ in range(steps):
        batch = order.take(config.rows_per_step)
        ids, taught = batch.pad("token_ids").long(), batch.pad("action_mask", False)
        logits = model(input_ids=ids, attention_mask=batch.valid().long()).logits[:, :-1]
        labels = ids[:, 1:].masked_fill(~taught[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens = float(taught.sum())
        said.append({"sft/loss": float(loss.detach()), "actor/grad_norm": float(norm), "sft/tokens": tokens})
    return said


def test_steps_are_those_of_a_plain_transformers_loop(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    rows = run_toy(folder)
    model = policy_in(tiny_model)
    expected = plain_loop(folder, model, tokenizer_in(tiny_model), 3)
    for row, want in zip(rows, expected, strict=True):
        assert row["sft/tokens"] == want["sft/tokens"]
        assert row["sft/loss"] == pytest.approx(want["sft/loss"], rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=1e-4)
    trained = policy_in(folder / "output" / "hf_model").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-4)
    assert rows[0]["data/rows"] == 20
    assert "data/rows" not in rows[1]


def test_it_learns(tiny_model: Path, tmp_path: Path) -> None:
    # Each of ten questions stands in six rows: held-out rows repeat what was taught.
    rows = run_toy(
        write_sft(tmp_path, tiny_model, rows=60),
        "max_steps=60",
        "validation_share=0.25",
        "eval_steps=60",
        "val_before_train=true",
        "actor_train.data_args.template=plain",
        "actor_train.training_args.per_device_train_batch_size=15",
        "actor_train.training_args.gradient_accumulation_steps=1",
        "actor_train.training_args.lr_scheduler_type=linear",
    )
    assert rows[0]["step"] == 0
    assert rows[0]["val/loss"] > 4.0
    assert rows[1]["sft/loss"] > 4.0
    assert rows[-1]["sft/loss"] < 0.2
    assert rows[-1]["val/loss"] < 0.2
    assert rows[-1]["val/token_accuracy"] > 0.95
    assert rows[0]["val/token_accuracy"] < 0.5
    assert rows[-1]["val/perplexity"] == pytest.approx(math.exp(rows[-1]["val/loss"]))
    assert rows[-1]["actor/lr"] < 1e-3


def test_validation_is_the_mean_over_held_out_tokens(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    question = {"role": "user", "content": "a"}
    held = [{"messages": [question, {"role": "assistant", "content": text}]} for text in "bcdef"]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    options = f"validation={{data_args: {{file_name: {folder}/held.jsonl, messages: messages}}}}"
    rows = run_toy(folder, options, "eval_steps=1", "max_steps=1", "actor_train.infer_batch_size=2")
    model, tokenizer = policy_in(folder / "output" / "hf_model"), tokenizer_in(tiny_model)
    loss, hits, tokens = 0.0, 0, 0
    for row in held:
        marked = ConversationEncoder(tokenizer).encode(row["messages"])
        ids, taught = torch.tensor([marked.token_ids]), torch.tensor(marked.trained)[1:]
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        loss -= float(logprobs[taught].gather(1, ids[0, 1:][taught][:, None]).sum())
        hits += int((logprobs.argmax(-1) == ids[0, 1:])[taught].sum())
        tokens += int(taught.sum())
    assert tokens == 10  # a letter and the end of the message, five times
    assert rows[-1]["val/tokens"] == 10
    assert rows[-1]["val/loss"] == pytest.approx(loss / 10, rel=1e-4)
    assert rows[-1]["val/token_accuracy"] == pytest.approx(hits / 10)


def test_held_out_rows_are_written_as_training_rows_are(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    columns = "prompt: prompt, response: response"
    options = (
        "actor_train.data_args={" + f"file_name: {folder}/held.jsonl, {columns}, template: question_answer" + "}",
        "validation={data_args: {" + f"file_name: {folder}/held2.jsonl, {columns}" + "}}",
        "eval_steps=1",
    )
    (folder / "held2.jsonl").write_text((folder / "held.jsonl").read_text())
    data = sft_data(config_of(folder, *options), tokenizer_in(tiny_model))
    assert data.held_out[0].token_ids.tolist() == data.training.rows[0].token_ids.tolist()


def test_lora_trains_adapters_only_and_exports_both(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    losses = [row["sft/loss"] for row in run_toy(folder, *LORA, "max_steps=16")]
    assert fmean(losses[-4:]) < fmean(losses[:4]) - 0.08
    exported = folder / "output" / "hf_model"
    assert (exported / "adapter" / "adapter_config.json").is_file()
    before, after = policy_in(tiny_model).state_dict(), policy_in(exported).state_dict()
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[name], after[name])


def test_epochs_end_with_a_smaller_step_and_teach_every_row_once(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    rows = run_toy(folder, "num_train_epochs=1", "max_steps=0")
    assert [row["sft/rows"] for row in rows] == [6, 6, 6, 2]
    assert rows[-1]["sft/epoch"] == 1.0
    assert rows[0]["data/taught_tokens"] == sum(row["sft/tokens"] for row in rows)
    config = config_of(folder, "num_train_epochs=3", "max_steps=7")
    training = sft_data(config, tokenizer_in(tiny_model)).training.rows
    assert planned_steps(config, training) == 7
    assert planned_steps(config_of(folder, "num_train_epochs=2", "max_steps=0"), training) == 7


def test_the_model_is_exported_where_the_next_stage_looks(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    saved = ("save_steps=1", "checkpoint_config.save_hf_model=true")
    run_toy(folder, "max_steps=1", f"export_dir={tmp_path}/model", *saved)
    again = write_sft(tmp_path / "next", tmp_path / "model")
    first = policy_in(tmp_path / "model").state_dict()
    saved = policy_in(folder / "output" / "checkpoints" / "checkpoint-1" / "hf_model").state_dict()
    assert all(torch.equal(first[name], saved[name]) for name in first)
    run_toy(again, "max_steps=1")


PREPARE = '''
"""Makes what the run reads."""

import json
from pathlib import Path


def make(config):
    (file,) = config.actor_train.data_args.file_name
    Path(file).write_text(json.dumps({"question": "1?", "answer": config.exp_name}) + "\\n")
'''


def test_what_isnt_there_is_prepared(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    (folder / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match="actor_train.data_args.file_name: no data file .*rows.jsonl"):
        run_toy(folder)
    (folder / "make.py").write_text(PREPARE)
    rows = run_toy(folder, f"prepare={folder}/make.py:make", "max_steps=1")
    assert rows[0]["data/taught_tokens"] == len("toy") + 1


BAD_CONFIGS = {
    "no length": (("sequence_length=null",), "sequence_length: got null, expected the longest row"),
    "no file": (("actor_train.data_args.file_name=[]",), r"actor_train.data_args.file_name: expected a file"),
    "no columns": (
        ("actor_train.data_args.prompt=null", "actor_train.data_args.response=null"),
        r"data_args.response: got null, expected a column of .*rows.jsonl: question, answer; it has none of completion",
    ),
    "half a pair": (
        ("actor_train.data_args.response=null",),
        "response: got null, expected a col.*has none of completion",
    ),
    "both": (("actor_train.data_args.messages=messages",), "data_args.prompt: this key acts only without messages"),
    "template": (("actor_train.data_args.template=natve",), "template: got 'natve'(?s:.*)did you mean 'native'"),
    "held out twice": (
        ("validation_share=0.1", "validation.data_args={file_name: x.jsonl, messages: m}", "eval_steps=1"),
        "validation_share: this key acts only without validation, and validation is there",
    ),
    "nothing held out": (("eval_steps=1",), "eval_steps: this key acts only with validation(?s:.*)validation_share"),
    "trained and held out": (
        ("validation.data_args={file_name: '${actor_train.data_args.file_name}', messages: m}",),
        "validation.data_args.file_name.*a file that isn't trained on",
    ),
    "validated first": (("val_before_train=true",), "val_before_train: this key acts only with validation"),
    "a key of others": (("rollout_batch_size=4",), "rollout_batch_size"),
    "a role of others": (("actor_infer={}",), "actor_infer"),
    "an engine": ((f"{ACTOR}=vllm",), f"{ACTOR}: got 'vllm'"),
    "no end": (("max_steps=0",), "max_steps"),
    "column": (("actor_train.data_args.prompt=nope",), "prompt: got 'nope', expected a column of .*question"),
    "longer than the model": (("sequence_length=300",), "sequence_length: got 300, expected at most 256 tokens"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_what_cannot_run_is_refused_by_its_key(tiny_model: Path, tmp_path: Path, name: str) -> None:
    overrides, message = BAD_CONFIGS[name]
    with pytest.raises(ConfigError, match=message):
        config_of(write_sft(tmp_path, tiny_model), *overrides)


def test_warnings_are_about_what_does_not_act(tiny_model: Path, tmp_path: Path) -> None:
    warnings = warnings_of(config_of(write_sft(tmp_path, tiny_model), "validation_share=0.1", "train_on=all"))
    assert [warning.split(",")[0] for warning in warnings] == [
        "rows are held out",
        "train_on: all is for conversations; a prompt with a response has one message of the assistant",
    ]


def test_a_failed_step_keeps_no_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sft(tmp_path, tiny_model)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Fsdp2Strategy, "train_step", fail)
    with pytest.raises((RuntimeError, WorkerFailed), match="broken"):
        run_toy(folder)
    assert not (folder / "output" / "hf_model").exists()
