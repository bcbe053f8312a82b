"""`save_best` in whole runs: which checkpoints stay, also after kills and resumes, and how the best one is found."""

from __future__ import annotations

import os
from pathlib import Path

import preferences
import pytest
from safetensors.torch import load_file
from toy import config_of, run_toy, write_toy
from toy_env import write_toy_env
from toy_sft import write_sft

from roll.checkpoint import CheckpointStore
from roll.checkpoint.best import best_of
from roll.cli.__main__ import main
from roll.configs.catalog.validation_metrics import NEVER
from roll.configs.rules.save_best import validation_metrics
from roll.pipelines import run_pipeline
from roll.pipelines.offline.sft import SFTPipeline
from roll.pipelines.run.loop import Loop
from roll.pipelines.run.run_result import RunResult

BEST = ("save_best=val/loss", "eval_steps=1", "validation_share=0.2", "max_steps=5", "export_model=false")
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 5: 6.0}
"""Best at step 2; an equal one at step 4 doesn't take its place."""


@pytest.fixture
def losses(monkeypatch):
    """What the validations give, by step."""
    values = dict(LOSSES)
    monkeypatch.setattr(SFTPipeline, "evaluate", lambda _self, step: {"val/loss": values[step]})
    return values


def there(folder: Path) -> list[str]:
    root = folder / "output" / "checkpoints"
    return sorted(path.name.removeprefix("checkpoint-") for path in root.glob("checkpoint-*"))


def link(folder: Path) -> str:
    return os.readlink(folder / "output" / "checkpoints" / "best")


@pytest.mark.parametrize("way", ["false", "true"], ids=["in the step", "in the background"])
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), ["1", "2"]),  # steps 1 and 2 were the best when they were validated
        (("checkpoint_config.max_to_keep=1",), ["2"]),
        (("save_steps=1", "checkpoint_config.max_to_keep=1"), ["2", "5"]),
        (("save_steps=3",), ["2", "3", "5"]),
        (("save_steps=1", "checkpoint_config.max_to_keep=null"), ["1", "2", "3", "4", "5"]),
    ],
)
def test_the_best_checkpoint_stays_besides_the_newest(tiny_model, tmp_path, losses, more, expected, way):
    folder = write_sft(tmp_path, tiny_model)
    run_toy(folder, *BEST, *more, f"checkpoint_config.async_save={way}")
    assert there(folder) == expected
    assert link(folder) == "checkpoint-2"
    best = best_of(CheckpointStore(folder / "output" / "checkpoints").latest().meta)
    assert (best.metric, best.value, best.step) == ("val/loss", 3.0, 2)


def test_the_best_one_is_exported_served_and_resumed_from_by_its_name(tiny_model, tmp_path, losses, capsys):
    folder = write_sft(tmp_path, tiny_model)
    config = config_of(folder, *BEST, "save_steps=1")
    run_pipeline(config)
    assert "best, val/loss 3" in capsys.readouterr().err.replace("\n", " ")
    run = folder / "output"
    assert RunResult(run, config).best_checkpoint == run / "checkpoints" / "checkpoint-2"
    assert main(["export", str(run), "--step", "best", "-o", str(tmp_path / "a")]) == 0
    assert "the model of step 2 is in" in capsys.readouterr().err
    assert main(["export", str(run / "checkpoints" / "best"), "-o", str(tmp_path / "b")]) == 0
    assert main(["export", str(run), "--step", "2", "-o", str(tmp_path / "c")]) == 0
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(a[name].equal(b[name]) and a[name].equal(c[name]) for name in c)
    rows = run_toy(folder, *BEST, "resume_from_checkpoint=best", "max_steps=3")
    assert [row["step"] for row in rows] == [1, 2, 3]
    with pytest.raises(SystemExit):
        main(["export", str(run), "--step", "beste"])
    assert "expected the number of a step, or best" in capsys.readouterr().err


def test_a_run_without_a_best_checkpoint_says_so(tiny_model, tmp_path, capsys):
    folder = write_sft(tmp_path, tiny_model)
    run_toy(folder, "save_steps=1", "max_steps=1", "export_model=false")
    assert main(["export", str(folder / "output"), "--step", "best"]) == 2
    assert "has no best checkpoint; save_best chooses one" in capsys.readouterr().err


def test_a_resumed_run_compares_with_the_best_of_the_run_before(tiny_model, tmp_path, losses):
    folder = write_sft(tmp_path, tiny_model)
    run_toy(folder, *BEST, "save_steps=1", "max_steps=3")
    assert there(folder) == ["2", "3"]
    (folder / "output" / "checkpoints" / "best").unlink()  # as a kill before the link leaves it
    losses[4], losses[5] = 3.5, 3.2  # better than step 3, not than step 2
    run_toy(folder, *BEST, "save_steps=1", "resume_from_checkpoint=auto")
    assert there(folder) == ["2", "4", "5"]
    assert link(folder) == "checkpoint-2"
    losses[6] = 1.0
    run_toy(folder, *BEST, "save_steps=1", "resume_from_checkpoint=auto", "max_steps=6")
    assert there(folder) == ["5", "6"] and link(folder) == "checkpoint-6"


def test_a_resumed_run_never_deletes_the_best_one_that_it_was_loaded_from(tiny_model, tmp_path, losses):
    folder = write_sft(tmp_path, tiny_model)
    run_toy(folder, *BEST, "max_steps=2")
    more = ("resume_from_checkpoint=best", "checkpoint_config.delete_after_load=true", "save_steps=1")
    run_toy(folder, *BEST, *more, "max_steps=4")
    assert there(folder) == ["2", "3", "4"] and link(folder) == "checkpoint-2"


def test_another_metric_is_compared_anew_and_a_run_without_the_key_keeps_the_best(tiny_model, tmp_path, losses, caplog):
    folder = write_sft(tmp_path, tiny_model)
    run_toy(folder, *BEST, "save_steps=1", "max_steps=3")
    without = ("eval_steps=1", "validation_share=0.2", "save_steps=1", "export_model=false")
    run_toy(folder, *without, "resume_from_checkpoint=auto", "max_steps=5")
    assert there(folder) == ["2", "4", "5"], "carried on, though nothing is compared"
    losses[6], losses[7] = 9.0, 8.0
    other = ("save_best=max:val/loss", "resume_from_checkpoint=auto", "save_steps=1", "max_steps=7")
    run_toy(folder, *BEST, *other)
    assert "save_best is val/loss now" in caplog.text
    assert there(folder) == ["6", "7"] and link(folder) == "checkpoint-6"


def test_the_best_of_another_folder_is_no_bar(tiny_model, tmp_path, losses, caplog):
    folder = write_sft(tmp_path, tiny_model)
    run_toy(folder, *BEST, "save_steps=1", "max_steps=3")
    start = folder / "output" / "checkpoints" / "checkpoint-3"
    losses[4], losses[5] = 4.5, 4.6
    run_toy(folder, *BEST, f"resume_from_checkpoint={start}", f"output_dir={folder}/other")
    assert "isn't in" in caplog.text and "the next validation is the best" in caplog.text
    assert os.readlink(folder / "other" / "checkpoints" / "best") == "checkpoint-4"


def test_a_metric_that_is_no_number_or_absent_is_never_the_best_and_is_told(
    tiny_model, tmp_path, losses, caplog, capsys
):
    folder = write_sft(tmp_path, tiny_model)
    losses.update(dict.fromkeys(LOSSES, float("nan")))
    run_toy(folder, *BEST)
    assert there(folder) == []
    assert caplog.text.count("val/loss is nan, so that it is no candidate") == 1
    assert "save_best: no validation gave val/loss" in " ".join(capsys.readouterr().err.split())
    losses.update({1: float("nan"), 2: 4.0, 3: float("inf"), 4: float("-inf"), 5: 5.0})
    run_toy(folder, *BEST)
    assert there(folder) == ["2"]


def test_a_last_step_that_comes_as_a_surprise_is_compared_too(tiny_model, tmp_path, losses):
    folder = write_sft(tmp_path, tiny_model)  # 16 rows by 6: three steps an epoch
    run_toy(folder, *BEST, "eval_steps=2", "max_steps=0", "num_train_epochs=1")
    assert there(folder) == ["2"]
    losses[3] = 1.0
    run_toy(folder, *BEST, "eval_steps=2", "max_steps=0", "num_train_epochs=1", f"output_dir={folder}/output2")
    assert os.readlink(folder / "output2" / "checkpoints" / "best") == "checkpoint-3"


def test_a_run_that_is_killed_at_any_save_goes_on_to_the_same_best(tiny_model, tmp_path, losses, monkeypatch):
    save = Loop.save
    for killed in (2, 3):
        folder = write_sft(tmp_path / str(killed), tiny_model)

        def dies(self, step, killed=killed):
            if step == killed:
                raise KeyboardInterrupt
            save(self, step)

        monkeypatch.setattr(Loop, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            run_toy(folder, *BEST, "save_steps=1", "checkpoint_config.max_to_keep=1")
        monkeypatch.setattr(Loop, "save", save)
        run_toy(folder, *BEST, "save_steps=1", "checkpoint_config.max_to_keep=1", "resume_from_checkpoint=auto")
        assert (there(folder), link(folder)) == (["2", "5"], "checkpoint-2"), killed


def test_the_best_one_stays_at_an_address(tiny_model, tmp_path, losses):
    folder = write_sft(tmp_path, tiny_model)
    place = f"checkpoint_config.output_dir=file://{tmp_path}/bucket"
    more = (place, "save_steps=1", "checkpoint_config.max_to_keep=1")
    run_toy(folder, *BEST, *more, "max_steps=4")
    assert sorted(path.name for path in (tmp_path / "bucket").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    # On a machine that has nothing the newest is downloaded; the best one is still the bar, and stays where it is.
    again = ("resume_from_checkpoint=auto", f"output_dir={folder}/elsewhere")
    run_toy(folder, *BEST, *more, *again)
    assert sorted(path.name for path in (tmp_path / "bucket").iterdir()) == ["checkpoint-2", "checkpoint-5"]
    rows = run_toy(folder, *BEST, *more, "resume_from_checkpoint=best", f"output_dir={folder}/third", "max_steps=3")
    assert [row["step"] for row in rows] == [3]


# --- what each pipeline validation gives ------------------------------------------------------------------------------

HELD_OUT = ("eval_steps=1", "validation_share=0.2", "max_steps=1", "export_model=false")


def check_names(config, rows):
    """The rules know exactly the names that a validation gives, but for those that nobody compares by."""
    measured = {name for name in rows[-1] if name.startswith("val/")}
    assert measured - set(NEVER) == set(validation_metrics(config))


@pytest.mark.parametrize(
    ("pipeline", "single", "more", "value"),
    [
        ("dpo", False, ("loss_type=simpo",), "val/margin"),
        ("dpo", True, ("loss_type=kto", "actor_train.model_args.lora_rank=2"), "val/accuracy"),
        ("reward_model", False, (), "val/accuracy"),
        ("reward_model", True, ("loss_type=regression",), "val/loss"),
    ],
)
def test_the_best_checkpoint_of_preferences(tiny_model, tmp_path, pipeline, single, more, value):
    folder = preferences.write(tmp_path, tiny_model, pipeline, single=single)
    keys = (*HELD_OUT, *more, f"save_best={value}")
    rows = run_toy(folder, *keys)
    check_names(config_of(folder, *keys), rows)
    assert there(folder) == ["1"] and link(folder) == "checkpoint-1"


def test_the_best_checkpoint_of_fine_tuning(tiny_model, tmp_path):
    folder = write_sft(tmp_path, tiny_model)
    keys = (*HELD_OUT, "save_best=val/token_accuracy")
    check_names(config_of(folder, *keys), run_toy(folder, *keys))
    assert link(folder) == "checkpoint-1"


def test_the_best_checkpoint_of_rewards(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    keys = ("eval_steps=1", "max_steps=3", "save_best=val/case/reward", "export_model=false")
    rows = run_toy(folder, *keys, "checkpoint_config.max_to_keep=null")
    values = {row["step"]: row["val/case/reward"] for row in rows}
    best = [step for step in values if all(values[step] > values[before] for before in values if before < step)]
    assert there(folder) == [str(step) for step in best]
    assert link(folder) == f"checkpoint-{best[-1]}"
    check_names(config_of(folder, *keys), rows)


def test_the_best_checkpoint_of_a_distilled_model(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    keys = ("pipeline=distill", f"teacher.model_args.model_name_or_path={tiny_model}", "rollout_batch_size=8")
    run_toy(folder, *keys, "eval_steps=1", "max_steps=1", "save_best=val/accuracy", "export_model=false")
    assert link(folder) == "checkpoint-1"


def test_the_best_checkpoint_of_an_agent(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    keys = ("eval_steps=1", "max_steps=1", "save_best=val/letters/reward", "export_model=false")
    rows = run_toy(folder, *keys)
    check_names(config_of(folder, *keys), rows)
    assert link(folder) == "checkpoint-1"
