"""Fine-tuning, preferences and rewards with pictures, from a YAML to a model; runs in float32 (`dtype: fp32`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image
from tiny_pictures import PLACE, build_tiny_picture_model
from transformers import AutoTokenizer

from roll.configs.checks.prerequisites import prerequisite_violations
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.schema.offline_config import OfflineConfig
from roll.data.data_check import Progress
from roll.pipelines import run_pipeline
from roll.pipelines.run_data import RunData

JOB = """
pipeline: {pipeline}
executor: inline
track_with: [jsonl]
output_dir: {folder}/out
pretrain: {folder}/model
max_steps: 3
eval_steps: 3
sequence_length: 120
actor_train:
  model_args: {{dtype: fp32, disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-3, per_device_train_batch_size: 4}}
  data_args: {{file_name: {folder}/rows.jsonl, images: images, shuffle: false}}
validation: {{data_args: {{file_name: {folder}/held_out.jsonl}}}}
"""

RLVR = """
pipeline: rlvr
seed: 3
executor: inline
track_with: [jsonl]
output_dir: {folder}/out
pretrain: {folder}/model
max_steps: 2
rollout_batch_size: 4
num_return_sequences_in_group: 4
prompt_length: 60
response_length: 3
rewards: {{even: {{name: "{folder}/even.py:even"}}}}
actor_train:
  model_args: {{dtype: fp32, disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-3, per_device_train_batch_size: 16, gradient_accumulation_steps: 1}}
  data_args: {{file_name: {folder}/prompts.jsonl, images: images, shuffle: false}}
actor_infer:
  model_args: {{dtype: fp32}}
  generating_args: {{temperature: 1.0, ignore_eos: true}}
"""
"""verl's rows."""
EVEN = """
def even(response, task):
    (picture,) = task.pictures
    return float((sum(map(ord, response)) + picture.width) % 2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows for both pipelines with pictures and without, and jobs."""
    folder = tmp_path_factory.mktemp("pictures")
    build_tiny_picture_model(folder / "model")
    for number in range(8):
        size = (56, 28 * (1 + number % 2))
        pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rows = [row(number) for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row(number, "held")) + "\n" for number in range(4)))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(verl_row(number)) + "\n" for number in range(4)))
    (folder / "even.py").write_text(EVEN)
    (folder / "rlvr.yaml").write_text(RLVR.format(folder=folder))
    (folder / "sft.yaml").write_text(JOB.format(pipeline="sft", folder=folder))
    dpo = JOB.format(pipeline="dpo", folder=folder)
    (folder / "dpo.yaml").write_text(f"{dpo}reference: {{model_args: {{dtype: fp32}}}}\n")
    return folder


def row(number: int, word: str = "what") -> dict[str, Any]:
    """A row of both pipelines; every third is of text alone, the sixth has two pictures."""
    images = [] if number % 3 == 2 else [f"{number}.png"] * (1 + (number == 6))
    prompt = [{"role": "user", "content": "<image>" * len(images) + word}]
    return {"prompt": prompt, "completion": "yes", "chosen": "yes", "rejected": "no", "images": images}


def verl_row(number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "<image>which?"}]
    return {"data_source": "d", "prompt": prompt, "images": [{"path": f"{number}.png"}], "reward_model": {
        "ground_truth": str(number)}}  # fmt: skip


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    """Run a job and return what it logged, a dictionary a step."""
    out = folder / f"out_{name}_{len(list(folder.glob('out_*')))}"
    config = load_config(folder, name, [f"output_dir={out}", *overrides])
    assert prerequisite_violations(config) == []
    run_pipeline(config)
    return [json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_rows_with_pictures_and_of_text_are_trained_and_validated(folder: Path, name: str) -> None:
    padded = run(folder, name)
    packed = run(folder, name, "actor_train.use_sequence_packing=true")
    key = {"sft": "sft/loss", "dpo": "preference/loss"}[name]
    for one, other in zip(padded, packed, strict=True):
        assert one[key] == pytest.approx(other[key], abs=1e-5)
    assert padded[-1]["val/loss"] == pytest.approx(packed[-1]["val/loss"], abs=1e-5)


def test_prompts_with_pictures_are_sampled_and_trained_alike(folder: Path) -> None:
    """verl's rows, unchanged: the engine's log-probs are the trainer's, before and after a weight sync."""
    steps = run(folder, "rlvr")
    assert len(steps) == 2
    for step in steps:
        assert step["mismatch/kl"] == pytest.approx(0, abs=1e-6)
        assert abs(step["mismatch/ratio_max"] - 1) < 1e-4
        assert step["actor/grad_norm"] > 0
    packed = run(folder, "rlvr", "actor_train.use_sequence_packing=true")
    assert packed[-1]["actor/loss"] == pytest.approx(steps[-1]["actor/loss"], abs=1e-5)


TWO = ("executor=ray", "num_gpus_per_node=2", "actor_train.device_mapping='0-1'")
HALF = "actor_train.training_args.per_device_train_batch_size={}"


@pytest.mark.parametrize(("name", "rows"), [("sft", 2), ("rlvr", 8)])
def test_two_ranks_under_ray_take_the_steps_of_one(shared_ray: None, folder: Path, name: str, rows: int) -> None:
    one, two = run(folder, name), run(folder, name, *TWO, HALF.format(rows))
    for mine, theirs in zip(one, two, strict=True):
        for metric in {"sft/loss", "actor/loss", "actor/grad_norm", "reward/mean", "val/loss"} & mine.keys():
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-5), metric
        assert ("mismatch/kl" in theirs) == (name == "rlvr")
        assert abs(theirs.get("mismatch/kl", 0)) < 1e-6


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_takes_the_steps_of_fsdp2(folder: Path, stage: int) -> None:
    backend = ("actor_train.strategy_args.strategy_name=deepspeed_train",
               f"+actor_train.strategy_args.strategy_config={{zero_optimization: {{stage: {stage}}}}}")  # fmt: skip
    for mine, theirs in zip(run(folder, "sft"), run(folder, "sft", *backend), strict=True):
        assert mine["sft/loss"] == pytest.approx(theirs["sft/loss"], rel=1e-5)
        assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)


def test_what_is_learnt_depends_on_the_pictures(folder: Path) -> None:
    """A run that lost its pictures, or took others, would have the same loss."""
    seen = run(folder, "sft", "max_steps=1", "eval_steps=1")
    rows = [row(number) for number in range(8)]
    for number in (0, 1):  # one row's picture exchanged for another's of its size
        rows[number]["images"] = [f"{number + 2}.png"]
    (folder / "other.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    other = run(folder, "sft", "max_steps=1", "eval_steps=1", f"actor_train.data_args.file_name={folder}/other.jsonl")
    assert abs(seen[0]["sft/loss"] - other[0]["sft/loss"]) > 1e-4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["truncation=right"], "truncation: .*error or filter where rows have pictures.*may leave a part of a picture"),
        (["+teacher={model_args: {model_name_or_path: x}}"], "teacher: a teacher isn't given the pictures of rows"),
    ],
)
def test_what_rows_with_pictures_cannot_have_is_refused(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(folder, "sft", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["truncation=left"], "truncation: .*error or filter where rows have pictures"),
        (["replay_from=other"], "replay_from: recorded rollouts don't hold the pictures"),
        (["judge={model_args: {model_name_or_path: x}}", "rewards.even.name=judge"], "would judge blindly"),
    ],
)
def test_what_prompts_with_pictures_cannot_have_is_refused(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(folder, "rlvr", overrides)


@pytest.mark.parametrize("name", ["sft", "rlvr"])
def test_data_check_finds_a_column_without_pictures(folder: Path, tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "w", "completion": "yes", "answer": "yes"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = {}
    for column, file in (("images", folder / ("prompts.jsonl" if name == "rlvr" else "rows.jsonl")),
                         ("other", tmp_path / "rows.jsonl")):  # fmt: skip
        data = f"actor_train.data_args={{file_name: {file}, images: {column}}}"
        config = load_config(folder, name, [data])
        check = RunData(Progress(None), None)
        check.offline(config) if isinstance(config, OfflineConfig) else check.rlvr(config, {})
        found[column] = [
            remark.text for remark in check.remarks if remark.text.startswith("training") and remark.level == "stop"
        ]
    assert found["images"] == []
    assert found["other"] == ["training data: no row has a picture in the column that images names"]


@pytest.mark.parametrize("name", ["sft", "rlvr"])
def test_rows_of_text_with_a_pictures_token_are_found_before_the_start(folder: Path, tmp_path: Path, name: str) -> None:
    texts = ["what", f"what {PLACE}"]
    rows = [{"prompt": text, "completion": "yes", "answer": "yes"} for text in texts]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    data = f"actor_train.data_args={{file_name: {tmp_path}/text.jsonl, images: null}}"
    config = load_config(folder, name, [data, "validation=null", "eval_steps=0"])
    check = RunData(Progress(None), AutoTokenizer.from_pretrained(folder / "model"))
    check.offline(config) if isinstance(config, OfflineConfig) else check.rlvr(config, {})
    (stop,) = (remark.text for remark in check.remarks if remark.level == "stop")
    assert ":2" in stop and PLACE in stop and "name the column of its pictures in data_args.images" in stop
    with pytest.raises(ValueError, match="in whose place"):
        run(folder, name, data, "validation=null", "eval_steps=0")


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_validation_may_be_of_text_alone_where_training_shows_pictures(folder: Path, tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "what", "completion": "yes", "chosen": "yes", "rejected": "no"}] * 4
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    text = f"validation.data_args.file_name={tmp_path}/text.jsonl"
    assert "val/loss" in run(folder, name, text, "max_steps=1", "eval_steps=1")[-1]
    config = load_config(folder, name, [text])
    assert isinstance(config, OfflineConfig)
    check = RunData(Progress(None), None)
    check.offline(config)
    assert [remark.text for remark in check.remarks if remark.level == "stop"] == []


def test_a_column_of_pictures_that_the_rows_have_not_is_named_with_those_that_they_have(folder: Path) -> None:
    config = load_config(folder, "sft", ["actor_train.data_args.images=imgs", "validation=null", "eval_steps=0"])
    (violation,) = prerequisite_violations(config)
    assert violation.path == "actor_train.data_args.images"
    assert "images" in str(violation) and "rows.jsonl" in str(violation) and "'imgs'" in str(violation)


def test_images_with_a_model_of_text_are_refused_before_the_start(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    violations = prerequisite_violations(load_config(folder, "sft", [f"pretrain={tmp_path}"]))
    text = "\n".join(map(str, violations))
    assert "actor_train.data_args.images: models of type qwen2, as" in text
    assert "a model of one of these types: qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe" in text
    (tmp_path / "config.json").write_text((folder / "model" / "config.json").read_text())
    violations = prerequisite_violations(load_config(folder, "sft", [f"pretrain={tmp_path}"]))
    assert "has no preprocessor_config.json or processor_config.json" in "\n".join(map(str, violations))


def test_a_run_of_text_imports_nothing_for_pictures() -> None:
    import subprocess
    import sys

    code = (
        "import sys, roll.data.sft_rows, roll.data.preference_rows, roll.data.sources, roll.pipelines.offline.sft, "
        "roll.pipelines.offline.dpo, roll.pipelines.run_data, roll.pipelines.rl.rlvr, roll.rollout.episode_player\n"
        "names = ('PIL', 'roll.data.picture_reader', 'roll.data.row_pictures', 'roll.data.picture_chat', "
        "'roll.types.picture')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
