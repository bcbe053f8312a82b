"""What checkpoints of whole runs hold, how they are written and loaded, and where they go."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from pipeline_contract import CRITIC
from safetensors.torch import load_file
from same_runs import comparable, in_process, logged
from tiny_models import build_tiny_model
from toy import run_toy, write_toy

from roll.checkpoint import store
from roll.checkpoint.files import read_manifest
from roll.cli.__main__ import main

STEPS = ("max_steps=4", "save_steps=2", "adv_estimator=gae", *CRITIC, "checkpoint_config.max_to_keep=null")
STEPS += ("actor_train.training_args.lr_scheduler_type=cosine",)
ASYNC = "checkpoint_config.async_save=true"


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "output" / "checkpoints" / f"checkpoint-{step}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """A run that saves in the step, and what it logged."""
    folder = write_toy(tmp_path_factory.mktemp("checkpoints") / "whole", tiny_model)
    run_toy(folder, *STEPS, "checkpoint_config.save_contents=[model,optimizer,extra,hf_model]")
    return folder, logged(folder)


def test_the_controller_hashes_its_own_file_and_none_of_the_ranks(tiny_model, tmp_path, monkeypatch):
    hashed, original = [], store.hash_files
    monkeypatch.setattr(
        store, "hash_files", lambda folder, names, **how: hashed.extend(names) or original(folder, names, **how)
    )
    folder = write_toy(tmp_path / "run", tiny_model)
    run_toy(folder, "max_steps=1", "save_steps=1", "checkpoint_config.save_hf_model=true", "export_model=false")
    assert hashed
    assert not [name for name in hashed if name.startswith(("actor_train/", "hf_model/"))]
    names = read_manifest(checkpoint(folder, 1)).files
    assert {name.partition("/")[0] for name in names} >= {"actor_train", "hf_model", "pipeline.json"}


# --- in the background ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["inline", "ray"])
def test_a_run_that_saves_in_the_background_is_the_same_run(whole, tiny_model, tmp_path, executor, request):
    if executor == "ray":
        request.getfixturevalue("shared_ray")
    folder = write_toy(tmp_path / "run", tiny_model)
    run_toy(folder, *STEPS, ASYNC, "checkpoint_config.save_hf_model=true", f"executor={executor}")
    assert logged(folder) == whole[1]
    assert same(weights(checkpoint(folder, 4) / "hf_model"), weights(checkpoint(whole[0], 4) / "hf_model"))
    mine, theirs = (read_manifest(checkpoint(place, 2)) for place in (folder, whole[0]))
    assert mine.files.keys() == theirs.files.keys()
    names = [name for name in mine.files if name.endswith((".safetensors", "schedule.json", "pipeline.json"))]
    assert {name: mine.files[name] for name in names} == {name: theirs.files[name] for name in names}
    assert not list((folder / "output" / "checkpoints").glob(".checkpoint*"))


@pytest.mark.parametrize(
    ("moment", "nth", "left"),
    [
        ("background write", 9, []),
        ("background write", 25, ["checkpoint-2"]),
        ("background finish", 2, ["checkpoint-2"]),
    ],
)
def test_killed_while_it_writes_in_the_background_and_resumed_equals_never_killed(
    whole, tiny_model, tmp_path, moment, nth, left
):
    folder, settings = write_toy(tmp_path / "killed", tiny_model), (*STEPS, ASYNC)
    assert in_process(folder, settings, moment=moment, nth=nth) == -signal.SIGKILL
    assert sorted(path.name for path in checkpoint(folder, 2).parent.glob("checkpoint-*")) == left
    assert in_process(folder, settings, "resume_from_checkpoint=auto", "checkpoint_config.save_hf_model=true") == 0
    assert logged(folder) == whole[1]
    assert same(weights(checkpoint(folder, 4) / "hf_model"), weights(checkpoint(whole[0], 4) / "hf_model"))


def test_a_write_that_fails_in_the_background_ends_the_run_at_the_next_step(tiny_model, tmp_path, monkeypatch):
    from roll.checkpoint import CheckpointWriteError, background

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(background, "hash_files", full)
    folder = write_toy(tmp_path, tiny_model)
    with pytest.raises(
        CheckpointWriteError, match=r"checkpoint of step 1 couldn't be written.*actor_train rank 0.*space"
    ):
        run_toy(folder, "max_steps=4", "save_steps=1", ASYNC)
    assert [row["step"] for row in logged(folder)] in ([1], [1, 2])


def test_an_interrupt_finishes_the_checkpoint_on_its_way(tiny_model, tmp_path, monkeypatch):
    import time

    from roll.checkpoint import background
    from roll.pipelines.rl.engine_pipeline import EnginePipeline

    original, collect = background.hash_files, EnginePipeline.collect

    def slow(*args, **options):
        time.sleep(0.3)
        return original(*args, **options)

    def interrupted(self, step):
        if step == 2:
            raise KeyboardInterrupt
        return collect(self, step)

    monkeypatch.setattr(background, "hash_files", slow)
    monkeypatch.setattr(EnginePipeline, "collect", interrupted)
    folder = write_toy(tmp_path, tiny_model)
    with pytest.raises(KeyboardInterrupt):
        run_toy(folder, "max_steps=4", "save_steps=1", ASYNC)
    assert read_manifest(checkpoint(folder, 1)).step == 1


# --- contents ---------------------------------------------------------------------------------------------------------


def test_load_contents_model_starts_a_run_of_its_own_from_the_weights(whole, tiny_model, tmp_path):
    source = checkpoint(whole[0], 2)
    there = (f"resume_from_checkpoint={source}", "checkpoint_config.load_contents=[model]", "export_model=true")
    rows = comparable(run_toy(write_toy(tmp_path / "new", tiny_model), *STEPS, "seed=9", *there))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["actor/lr"] == whole[1][0]["actor/lr"]
    # The same run from the Hugging Face folder of that checkpoint: the actor's weights are all that it takes.
    actor_only = tuple(key for key in STEPS if key not in (*CRITIC, "adv_estimator=gae"))
    one = run_toy(write_toy(tmp_path / "one", tiny_model), *actor_only, f"pretrain={source / 'hf_model'}")
    two = run_toy(write_toy(tmp_path / "two", tiny_model), *actor_only, *there)
    assert comparable(two) == comparable(one)


def test_without_the_optimizer_the_run_goes_on_at_its_step(whole, tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    kept = "checkpoint_config.save_contents=[model,extra]"
    run_toy(folder, *STEPS, kept, "max_steps=2")
    assert not any("optimizer" in name for name in read_manifest(checkpoint(folder, 2)).meta["contents"])
    with pytest.raises(ValueError, match=r"lacks optimizer.*load_contents=\[model,extra\] goes on without"):
        run_toy(folder, *STEPS, f"resume_from_checkpoint={checkpoint(folder, 2)}")
    rows = run_toy(folder, *STEPS, kept, "resume_from_checkpoint=auto", "checkpoint_config.load_contents=[model,extra]")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["actor/lr"] == whole[1][2]["actor/lr"]
    assert rows[2]["reward/mean"] == whole[1][2]["reward/mean"]  # the same weights sampled
    assert rows[3]["actor/grad_norm"] != whole[1][3]["actor/grad_norm"]


def test_a_checkpoint_of_a_hugging_face_folder_alone_is_exported_and_not_resumed(tiny_model, tmp_path, capsys):
    folder = write_toy(tmp_path / "run", tiny_model)
    run_toy(folder, "max_steps=1", "save_steps=1", "checkpoint_config.save_contents=hf_model")
    source = checkpoint(folder, 1)
    assert not (source / "actor_train").exists()
    with pytest.raises(ValueError, match=r"lacks model and optimizer and extra.*pretrain=.*hf_model starts"):
        run_toy(folder, "max_steps=2", f"resume_from_checkpoint={source}")
    assert main(["export", str(source), "-o", str(tmp_path / "model")]) == 0
    assert same(weights(tmp_path / "model"), weights(folder / "output" / "hf_model"))
    assert main(["export", str(source), "-o", str(tmp_path / "half"), "--dtype", "bf16"]) == 2
    assert "holds no actor_train" in capsys.readouterr().err


# --- export -----------------------------------------------------------------------------------------------------------


def test_a_bare_checkpoint_is_exported_like_its_run_wherever_it_is_moved(whole, tmp_path, monkeypatch, capsys):
    source, moved = checkpoint(whole[0], 4), tmp_path / "elsewhere"
    shutil.copytree(source, moved)
    shutil.rmtree(moved / "hf_model")
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["files"] = {name: seen for name, seen in manifest["files"].items() if not name.startswith("hf_model/")}
    (moved / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(moved)]) == 0
    assert same(weights(tmp_path / "elsewhere-hf"), weights(source / "hf_model"))
    about = json.loads((tmp_path / "elsewhere-hf" / "roll_export.json").read_text())
    assert about == {"exp_name": "toy", "seed": 3, "step": 4}
    assert main(["export", str(moved), "--role", "critic", "--dtype", "bf16"]) == 0
    assert weights(tmp_path / "elsewhere-critic-hf")["score.weight"].dtype == torch.bfloat16
    assert main(["export", str(moved), "--step", "4", "-o", "x"]) == 2
    assert main(["export", str(moved), "--adapters", "-o", "x"]) == 2
    assert "was saved without LoRA" in capsys.readouterr().err
    (moved / "actor_train" / "schedule.json").write_text("{}")
    assert main(["export", str(moved), "-o", "x"]) == 2
    assert not (tmp_path / "x" / "config.json").exists()


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_adapters_are_merged_into_their_base_model_or_written_alone(tiny_model, tmp_path, capsys, kind):
    pytest.importorskip("peft")
    lora = ("actor_train.model_args.lora_rank=4", "actor_train.training_args.learning_rate=0.05")
    if kind == "policy":
        folder = write_toy(tmp_path / "run", tiny_model)
        run_toy(folder, *lora, "max_steps=2", "save_steps=2")
        source, whole = checkpoint(folder, 2), folder / "output" / "hf_model"
    else:
        config = tmp_path / "reward.yaml"
        pairs = [{"prompt": "a", "chosen": "b" * (i % 5 + 1), "rejected": "c"} for i in range(16)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        config.write_text(REWARD_MODEL.format(folder=tmp_path, model=tiny_model))
        assert main(["train", str(config), *lora]) == 0
        source = tmp_path / "output" / "checkpoints" / "checkpoint-2"
        whole = tmp_path / "output" / "hf_model"
    assert main(["export", str(source), "-o", str(tmp_path / "merged")]) == 0
    assert same(weights(tmp_path / "merged"), weights(whole))
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == json.loads(
        (whole / "config.json").read_text()
    )
    if kind == "reward":
        return
    assert main(["export", str(source), "-o", str(tmp_path / "adapters"), "--adapters"]) == 0
    theirs = load_file(whole / "adapter" / "adapter_model.safetensors")
    assert same(load_file(tmp_path / "adapters" / "adapter_model.safetensors"), theirs)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapters")
    merged = model.merge_and_unload().state_dict()
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(merged[name], tensor)
    other = build_tiny_model(tmp_path / "other", seed=5)
    assert main(["export", str(source), "-o", str(tmp_path / "wrong"), "--base", str(other)]) == 2
    assert "adapters of another base model" in capsys.readouterr().err


REWARD_MODEL = """
pipeline: reward_model
output_dir: {folder}/output
executor: inline
pretrain: {model}
sequence_length: 64
max_steps: 2
save_steps: 2
actor_train:
  data_args: {{file_name: {folder}/pairs.jsonl, prompt: prompt, template: plain}}
  training_args: {{per_device_train_batch_size: 8}}
"""


# --- elsewhere --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_a_run_goes_on_from_a_remote_address_after_its_disk_is_gone(whole, tiny_model, tmp_path, background):
    address = f"file://{tmp_path}/bucket/run"
    settings = (*STEPS, f"checkpoint_config.output_dir={address}", f"checkpoint_config.async_save={background}")
    folder = write_toy(tmp_path / "one", tiny_model)
    run_toy(folder, *settings, "max_steps=2", "actor_train.training_args.warmup_steps=0")
    assert (tmp_path / "bucket" / "run" / "checkpoint-2" / "manifest.json").is_file()
    shutil.rmtree(folder / "output" / "checkpoints")
    rows = run_toy(folder, *settings, "resume_from_checkpoint=auto", "checkpoint_config.delete_after_load=true")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["reward/mean"] == whole[1][2]["reward/mean"]
    there = sorted(path.name for path in (folder / "output" / "checkpoints").glob("checkpoint-*"))
    assert there == ["checkpoint-4"], "the downloaded copy was deleted"
    assert sorted(path.name for path in (tmp_path / "bucket" / "run").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    with pytest.raises(ValueError, match="holds the checkpoints of an earlier run, the newest of step 4"):
        run_toy(write_toy(tmp_path / "two", tiny_model), *settings)
    assert main(["export", f"{address}/checkpoint-4", "-o", str(tmp_path / "model")]) == 0
    assert same(weights(tmp_path / "model"), weights(folder / "output" / "hf_model"))


def test_an_upload_that_fails_is_told_and_fails_the_run_at_its_end(tiny_model, tmp_path, monkeypatch, caplog):
    from roll.checkpoint import CheckpointWriteError
    from roll.checkpoint import remote_store as remote

    def gone(*_):
        raise ConnectionError("no route")

    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(remote.RemoteCheckpoints, "_put", gone)
    folder = write_toy(tmp_path / "run", tiny_model)
    with pytest.raises(CheckpointWriteError, match=r"complete in .*checkpoint-2, but not in memory://.*no route"):
        run_toy(folder, "max_steps=2", "save_steps=1", "checkpoint_config.output_dir=memory://bucket/failing")
    assert "the upload of checkpoint-1" in caplog.text
    assert [row["step"] for row in logged(folder)] == [1, 2]
    assert read_manifest(checkpoint(folder, 2)).step == 2


def test_delete_after_load_waits_for_the_next_checkpoint(tiny_model, tmp_path, monkeypatch):
    first = write_toy(tmp_path / "first", tiny_model)
    run_toy(first, "max_steps=1", "save_steps=1")
    source, folder = checkpoint(first, 1), write_toy(tmp_path / "second", tiny_model)
    keys = (f"resume_from_checkpoint={source}", "checkpoint_config.delete_after_load=true")
    run_toy(folder, *keys, "max_steps=1")
    assert source.is_dir(), "nothing was saved, so this is the only good state"
    run_toy(folder, *keys, "max_steps=2", "save_steps=2")
    assert checkpoint(folder, 2).is_dir()
    assert not source.exists()


# --- of other programs ------------------------------------------------------------------------------------------------


def test_a_folder_of_another_program_is_exported_with_a_base_model_and_runs_nothing(tiny_model, tmp_path, capsys):
    pytest.importorskip("deepspeed")
    step, target = tmp_path / "theirs" / "global_step3", tmp_path / "model"
    step.mkdir(parents=True)
    (tmp_path / "theirs" / "latest").write_text("global_step3\n")
    expected = weights(tiny_model)
    module = {f"module.wrapped.{name}": tensor.half() for name, tensor in expected.items()}
    torch.save({"module": module}, step / "mp_rank_00_model_states.pt")
    command = ["export", str(tmp_path / "theirs"), "-o", str(target)]
    assert main(command) == 2
    assert "name one with the same configuration and tokenizer with --base" in capsys.readouterr().err
    assert main([*command, "--base", str(tiny_model)]) == 0
    assert same(weights(target), {name: tensor.half().float() for name, tensor in expected.items()})
    other = build_tiny_model(tmp_path / "other", hidden=64)
    assert main(["export", str(step), "-o", str(tmp_path / "x"), "--base", str(other)]) == 2
    assert "the model has (" in capsys.readouterr().err
    torch.save({"module": module, "more": _Touch(tmp_path / "touched")}, step / "mp_rank_00_model_states.pt")
    assert main(["export", str(step), "-o", str(tmp_path / "y"), "--base", str(tiny_model)]) == 2
    assert "could run code" in capsys.readouterr().err
    assert not (tmp_path / "touched").exists()


class _Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


BACKENDS = {
    "deepspeed": ("deepspeed_train", "{zero_optimization: {stage: 3}}"),
    "megatron": ("megatron_train", "{tensor_model_parallel_size: 2}"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_of_every_backend_save_in_the_background_and_resume(shared_ray, tiny_model, tmp_path, backend):
    pytest.importorskip(backend)
    name, options = BACKENDS[backend]
    settings = (
        "max_steps=4",
        "save_steps=2",
        ASYNC,
        "executor=ray",
        "num_gpus_per_node=2",
        "actor_train.device_mapping='0-1'",
        f"actor_train.training_args.gradient_accumulation_steps={1 if backend == 'deepspeed' else 2}",
        f"actor_train.strategy_args={{strategy_name: {name}, strategy_config: {options}}}",
    )
    folder = write_toy(tmp_path, tiny_model)
    rows = comparable(run_toy(folder, *settings, "checkpoint_config.max_to_keep=null"))
    exported = weights(folder / "output" / "hf_model")
    source = checkpoint(folder, 2)
    assert main(["export", str(checkpoint(folder, 4)), "-o", str(tmp_path / "merged")]) == 0
    assert same(weights(tmp_path / "merged"), exported)
    again = comparable(run_toy(folder, *settings, f"resume_from_checkpoint={source}"))
    assert again == rows
    assert same(weights(folder / "output" / "hf_model"), exported)
