"""Fine-tuning as a whole: its steps against a loop of plain transformers, resume, export, backends, validation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from same_runs import comparable
from toy import metrics_of

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.validate import warnings_of
from roll.data.chat_masks import ConversationEncoder
from roll.data.finished_rows import RowOrder
from roll.data.sft_rows import batch_of
from roll.distributed.worker_errors import WorkerFailed
from roll.pipelines.offline.offline_pipeline import planned_steps
from roll.pipelines.offline.sft import run_sft, sft_data
from roll.strategies.hf.fsdp2 import Fsdp2Strategy
from roll.utils.readers import DataError

ACTOR = "actor_train.strategy_args.strategy_name"
OPTIONS = "+actor_train.strategy_args.strategy_config"
BACKENDS = {
    "zero 3": (f"{ACTOR}=deepspeed_train", f"{OPTIONS}={{zero_optimization: {{stage: 3}}}}"),
    "megatron": (f"{ACTOR}=megatron_train",),
}
LORA = ("actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_alpha=8")

YAML = """
pipeline: sft
exp_name: toy
seed: 5
executor: inline
output_dir: {folder}/output
track_with: jsonl
pretrain: {model}
max_steps: 3
sequence_length: 48
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 2, gradient_accumulation_steps: 3}}
  data_args: {{file_name: {folder}/rows.jsonl, prompt: question, response: answer}}
"""


def write(folder: Path, model: Path, rows: int = 20) -> Path:
    """Configuration and rows: say the digit that follows, in a word whose length differs from row to row."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sft.yaml").write_text(YAML.format(folder=folder, model=model))
    lines = [{"question": f"{i % 10}?", "answer": "abcdefghij"[(i + 1) % 10] * (1 + i % 10 % 3)} for i in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def config_of(folder: Path, *overrides: str) -> Any:
    config = load_config(folder, "sft", overrides)
    check_prerequisites(config)
    return config


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run it in this process; the rows of its metrics file."""
    config = config_of(folder, *overrides)
    run_sft(config)
    return metrics_of(config.logging_path)


def model_in(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokenizer_in(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


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
    folder = write(tmp_path, tiny_model)
    rows = run(folder)
    model = model_in(tiny_model)
    expected = plain_loop(folder, model, tokenizer_in(tiny_model), 3)
    for row, want in zip(rows, expected, strict=True):
        assert row["sft/tokens"] == want["sft/tokens"]
        assert row["sft/loss"] == pytest.approx(want["sft/loss"], rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=1e-4)
    trained = model_in(folder / "output" / "hf_model").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-4)
    assert rows[0]["data/rows"] == 20
    assert "data/rows" not in rows[1]


LAYOUTS = {
    "one row at a time": ("1", "6"),
    "all rows at once": ("6", "1"),
    "packed": ("3", "2", "actor_train.use_sequence_packing=true"),
    "by tokens": (
        "2",
        "3",
        "actor_train.use_dynamic_batching_in_train=true",
        "actor_train.max_tokens_per_microbatch_in_train=100",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_how_rows_are_laid_out_changes_nothing(tiny_model: Path, tmp_path: Path, name: str) -> None:
    per_device, accumulation, *more = LAYOUTS[name]
    args = "actor_train.training_args"
    layout = (
        f"{args}.per_device_train_batch_size={per_device}",
        f"{args}.gradient_accumulation_steps={accumulation}",
        "validation_share=0.2",
        "eval_steps=3",
    )
    base = run(write(tmp_path / "base", tiny_model), "validation_share=0.2", "eval_steps=3")
    rows = run(write(tmp_path / "other", tiny_model), *layout, *more)
    for row, other in zip(rows, base, strict=True):
        for key in ("sft/loss", "actor/grad_norm", "sft/tokens", "val/loss", "val/token_accuracy"):
            assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4), key


def test_it_learns(tiny_model: Path, tmp_path: Path) -> None:
    # Each of ten questions stands in six rows: held-out rows repeat what was taught.
    rows = run(
        write(tmp_path, tiny_model, rows=60),
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
    folder = write(tmp_path, tiny_model)
    question = {"role": "user", "content": "a"}
    held = [{"messages": [question, {"role": "assistant", "content": text}]} for text in "bcdef"]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    options = f"validation={{data_args: {{file_name: {folder}/held.jsonl, messages: messages}}}}"
    rows = run(folder, options, "eval_steps=1", "max_steps=1", "actor_train.infer_batch_size=2")
    model, tokenizer = model_in(folder / "output" / "hf_model"), tokenizer_in(tiny_model)
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
    folder = write(tmp_path, tiny_model)
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


IN_ORDER = ("actor_train.data_args.shuffle=false",)


@pytest.mark.parametrize("more", [(), LORA, IN_ORDER], ids=["full", "lora", "in order"])
def test_a_resumed_run_equals_the_whole_one_bit_for_bit(tiny_model: Path, tmp_path: Path, more: Any) -> None:
    options = (*more, "validation_share=0.2", "eval_steps=2", "save_steps=2")
    whole = write(tmp_path / "whole", tiny_model)
    expected = run(whole, *options, "max_steps=6")
    parts = write(tmp_path / "parts", tiny_model)
    run(parts, *options, "max_steps=2")
    resumed = run(parts, *options, "max_steps=6", "resume_from_checkpoint=auto")
    assert [row["step"] for row in resumed] == list(range(1, 7))
    mine, theirs = comparable(resumed), comparable(expected)
    assert mine == theirs
    one, other = (model_in(folder / "output" / "hf_model").state_dict() for folder in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_other_rows_are_refused_when_a_run_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    run(folder, "save_steps=1", "max_steps=1")
    write(tmp_path, tiny_model, rows=21)
    with pytest.raises(DataError, match="the data cursor was saved with rows = '20 rows"):
        run(folder, "resume_from_checkpoint=true")


def test_lora_trains_adapters_only_and_exports_both(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    losses = [row["sft/loss"] for row in run(folder, *LORA, "max_steps=16")]
    assert fmean(losses[-4:]) < fmean(losses[:4]) - 0.08
    exported = folder / "output" / "hf_model"
    assert (exported / "adapter" / "adapter_config.json").is_file()
    before, after = model_in(tiny_model).state_dict(), model_in(exported).state_dict()
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[name], after[name])


def test_epochs_end_with_a_smaller_step_and_teach_every_row_once(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    rows = run(folder, "num_train_epochs=1", "max_steps=0")
    assert [row["sft/rows"] for row in rows] == [6, 6, 6, 2]
    assert rows[-1]["sft/epoch"] == 1.0
    assert rows[0]["data/taught_tokens"] == sum(row["sft/tokens"] for row in rows)
    config = config_of(folder, "num_train_epochs=3", "max_steps=7")
    training = sft_data(config, tokenizer_in(tiny_model)).training.rows
    assert planned_steps(config, training) == 7
    assert planned_steps(config_of(folder, "num_train_epochs=2", "max_steps=0"), training) == 7


def test_the_model_is_exported_where_the_next_stage_looks(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    run(folder, "max_steps=1", f"export_dir={tmp_path}/model", "save_steps=1", "checkpoint_config.save_hf_model=true")
    again = write(tmp_path / "next", tmp_path / "model")
    first = model_in(tmp_path / "model").state_dict()
    saved = model_in(folder / "output" / "checkpoints" / "checkpoint-1" / "hf_model").state_dict()
    assert all(torch.equal(first[name], saved[name]) for name in first)
    run(again, "max_steps=1")


PREPARE = '''
"""Makes what the run reads."""

import json
from pathlib import Path


def make(config):
    (file,) = config.actor_train.data_args.file_name
    Path(file).write_text(json.dumps({"question": "1?", "answer": config.exp_name}) + "\\n")
'''


def test_what_isnt_there_is_prepared(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    (folder / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match="actor_train.data_args.file_name: no data file .*rows.jsonl"):
        run(folder)
    (folder / "make.py").write_text(PREPARE)
    rows = run(folder, f"prepare={folder}/make.py:make", "max_steps=1")
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
        config_of(write(tmp_path, tiny_model), *overrides)


def test_warnings_are_about_what_does_not_act(tiny_model: Path, tmp_path: Path) -> None:
    warnings = warnings_of(config_of(write(tmp_path, tiny_model), "validation_share=0.1", "train_on=all"))
    assert [warning.split(",")[0] for warning in warnings] == [
        "rows are held out",
        "train_on: all is for conversations; a prompt with a response has one message of the assistant",
    ]


def test_a_bad_row_ends_the_start_with_its_line(tiny_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_model)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"question": "1?", "answer": ""}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:21: the response in 'answer' is empty"):
        run(folder)


def test_a_failed_step_keeps_no_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, tiny_model)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Fsdp2Strategy, "train_step", fail)
    with pytest.raises((RuntimeError, WorkerFailed), match="broken"):
        run(folder)
    assert not (folder / "output" / "hf_model").exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_takes_the_steps_that_fsdp2_takes(tiny_model: Path, tmp_path: Path, backend: str) -> None:
    options = ("actor_train.training_args.adam_epsilon=1e-4", "validation_share=0.2", "eval_steps=3")
    expected = run(write(tmp_path / "fsdp2", tiny_model), *options)
    rows = run(write(tmp_path / "other", tiny_model), *BACKENDS[backend], *options)
    for row, other in zip(rows, expected, strict=True):
        for key in ("sft/loss", "actor/grad_norm", "actor/lr", "val/loss", "val/token_accuracy"):
            assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4), key
    mine, theirs = (model_in(tmp_path / name / "output" / "hf_model").state_dict() for name in ("other", "fsdp2"))
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_goes_on_where_it_was(tiny_model: Path, tmp_path: Path, backend: str) -> None:
    options = (*BACKENDS[backend], "save_steps=2")
    expected = run(write(tmp_path / "whole", tiny_model), *options, "max_steps=4")
    parts = write(tmp_path / "parts", tiny_model)
    run(parts, *options, "max_steps=2")
    resumed = run(parts, *options, "max_steps=4", "resume_from_checkpoint=auto")
    losses = [[row["sft/loss"] for row in rows] for rows in (resumed, expected)]
    assert losses[0] == losses[1]


def test_two_ranks_take_the_steps_of_one(tiny_model: Path, tmp_path: Path) -> None:
    args = "actor_train.training_args"
    options = (f"{args}.per_device_train_batch_size=1", "num_train_epochs=1", "max_steps=0")
    inline = run(write(tmp_path / "inline", tiny_model), *options, f"{args}.gradient_accumulation_steps=6")
    ray = run(
        write(tmp_path / "ray", tiny_model),
        *options,
        "executor=ray",
        "num_gpus_per_node=2",
        "actor_train.device_mapping='0-1'",
    )
    assert [row["sft/rows"] for row in ray] == [6, 6, 6, 2]
    for mine, theirs in zip(inline, ray, strict=True):
        assert mine["sft/loss"] == pytest.approx(theirs["sft/loss"], rel=1e-4)
        assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
