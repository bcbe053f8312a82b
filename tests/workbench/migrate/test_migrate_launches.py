"""Launch scripts with options, files of configuration that they name or write, and what becomes of every key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from migrated_mutations import mutated, problems

from roll.workbench.migrate import finish, peers
from roll.workbench.migrate.draft import Draft
from roll.workbench.migrate.overrides import at, leaves_of, scalar
from roll.workbench.migrate.report import MigrationReport
from roll.workbench.migrate.sources import read_source
from roll.workbench.migrate.translate import migrate

VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.rollout.name=vllm "


def source(tmp_path: Path, text: str, name: str = "run.sh") -> Any:
    (tmp_path / name).write_text(text, "utf-8")
    return read_source(tmp_path / name)


def fates(tmp_path: Path, text: str, name: str = "run.sh") -> dict[str, tuple[str, str]]:
    (tmp_path / name).write_text(text, "utf-8")
    report, _ = migrate(tmp_path / name)
    assert len({use.key for use in report.uses}) == len(report.uses)
    return {use.key: (use.fate, use.note) for use in report.uses}


@pytest.mark.parametrize(
    ("command", "system", "job"),
    [
        ("trl grpo {}", "trl", "grpo"),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 --config_file z.yaml dpo.py {}", "trl", "dpo"),
        ("python trl/scripts/sft.py {}", "trl", "sft"),
        ("uv run python -m trl.scripts.reward {}", "trl", "reward"),
        ("torchrun --nproc_per_node=2 my_training.py --dataset_name x {}", "trl", "my_training"),
        ("python -m torch.distributed.run --nproc_per_node 2 x/grpo.py {}", "trl", "grpo"),
        ("bash -c 'trl kto {}'", "trl", "kto"),
        ("sh <<EOF\ntrl rloo {}\nEOF", "trl", "rloo"),
        ("CMD='trl grpo {}'\n$CMD | tee log 2>&1", "trl", "grpo"),
    ],
)
def test_options_of_trl_are_read_whoever_starts_them(command, system, job, tmp_path):
    text = command.format("--model_name_or_path a/b --learning-rate=1e-6 --a.b one 2 --bf16 --seed -1 --n true")
    found = source(tmp_path, f"set -x\npython prepare.py --out d\n{text}\n")
    found.tree.pop("dataset_name", None)
    assert (found.system, found.job) == (system, job)
    assert found.tree == {
        "model_name_or_path": "a/b", "learning_rate": 1e-6, "a": {"b": ["one", 2]}, "bf16": True, "seed": -1, "n": True,
    }  # fmt: skip


def test_processes_of_a_launcher_are_known_or_named(tmp_path: Path):
    assert source(tmp_path, "accelerate launch --num_processes 8 sft.py --packing").processes == {"all": 8}
    found = source(tmp_path, "torchrun --nnodes=2 --nproc_per_node=$N sft.py --packing")
    assert found.processes == {"machines": 2} and any("--nproc_per_node=$N" in note for note in found.notes)


def test_options_that_are_switched_off_or_that_the_script_does_not_know_are_told(tmp_path: Path):
    options = '--no_shuffle_dataset --beta $B --num_generations $1 --seed 4 $MORE "$@"'
    found = source(tmp_path, f"B=3\ntrl grpo {options}\n")
    assert found.tree["shuffle_dataset"] is False and (found.tree["beta"], found.tree["seed"]) == (3, 4)
    assert found.tree["num_generations"].parts == ("$1",)
    assert [note.partition(" isn't")[0] for note in found.notes] == ["line 2: $MORE", "line 2: $@"]


def test_a_file_that_the_command_names_is_read_under_its_options(tmp_path: Path):
    (tmp_path / "dpo.yaml").write_text("model_name_or_path: a/b\nbeta: 0.1\nseed: 1\n")
    found = source(tmp_path, "trl dpo --config dpo.yaml --beta 0.2")
    assert found.tree == {"model_name_or_path": "a/b", "beta": 0.2, "seed": 1}
    document = "cat > own.yaml <<'EOF'\nbeta: 0.3\nmax_length: 64\nEOF\n"
    found = source(tmp_path, f"{document}trl dpo --config own.yaml --seed 3")
    assert found.tree == {"beta": 0.3, "max_length": 64, "seed": 3}
    (tmp_path / "run.sh").write_text("trl dpo --config gone.yaml --beta 0.2")
    report, _ = migrate(tmp_path / "run.sh")
    assert any("there is no file gone.yaml" in line for line in report.missing)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("trainer: {nnodes: 2}\ndata: {train_batch_size: 64}\n")
    found = source(tmp_path, f"{VERL} --config-path conf --config-name=mine data.train_batch_size=32")
    assert found.tree["trainer"] == {"nnodes": 2} and found.tree["data"]["train_batch_size"] == 32
    assert not found.notes


def test_hydras_own_files_are_read(tmp_path: Path):
    listed = "- data.train_files=a.parquet\n- +trainer.nnodes=2\n- ~data.seed\n"
    found = source(tmp_path, listed, "overrides.yaml")
    assert found.tree == {"data": {"train_files": "a.parquet"}, "trainer": {"nnodes": 2}}
    assert found.deleted == ["data.seed"]
    with pytest.raises(ValueError, match="give roll migrate the config.yaml beside it"):
        source(tmp_path, "hydra: {run: {dir: x}}\n", "hydra.yaml")
    assert source(tmp_path, '{\n\t"beta": 0.1\n}', "a.json").tree == {"beta": 0.1}
    with pytest.raises(ValueError, match="line 2: it starts ROLL with --config_name a"):
        source(tmp_path, "\npython examples/start_rlvr_pipeline.py --config_name a")


def test_a_value_in_place_of_a_section_does_not_take_its_keys_along_in_silence(tmp_path: Path):
    found = fates(tmp_path, VERL + "+data.x.y=1 +data.x.z.a=2 data.x=3")
    assert {key for key, (fate, _) in found.items() if fate == "absent"} == {"data.x", "data.x.y", "data.x.z.a"}


def test_words_and_conditions_that_change_the_job_are_named_with_their_lines(tmp_path: Path):
    found = source(
        tmp_path,
        "N=4\nif [ $# -gt 1 ]; then\n  N=8\nfi\nA=(1 2)\nA[0]=3\n"
        f"{VERL} trainer.nnodes=$N data.seed=${{A[0]}} oops \\\n  $EXTRA -m\n",
    )
    assert found.tree["trainer"]["nnodes"] == 8
    assert [note.partition(":")[0] + note.partition(":")[2][:9] for note in found.notes] == [
        "line 7 oops is ", "line 8 $EXTRA i", "line 3 N depend",
    ]  # fmt: skip
    assert "A[0]" in found.tree["data"]["seed"].parts[0]


def test_references_reach_what_verl_itself_brings(tmp_path: Path):
    # verl's own data.max_prompt_length is 512, and its actor's rollout_n is the rollout's n.
    found = source(tmp_path, VERL + "data.max_response_length='${data.max_prompt_length}'")
    assert found.tree["data"]["max_response_length"] == 512
    tree = {"actor_rollout_ref": {"rollout": {"n": 7}}, "data": {"max_prompt_length": 99}}
    found = peers.defaults("verl", tree, "main_ppo")
    assert found["actor_rollout_ref.actor.rollout_n"] == 7 and found["actor_rollout_ref.rollout.prompt_length"] == 99


def test_an_unknown_key_asks_with_the_nearest_row_even_where_something_refers_to_its_section(tmp_path: Path):
    found = fates(
        tmp_path,
        "data: {train_files: a.parquet, max_prompt_length: 64, max_promt_length: 3, own: 5}\n"
        "trainer: {x: '${data.max_prompt_length}', nnodes: '${data.own}'}\n"
        "actor_rollout_ref: {actr: {clip_ratio: 0.1}}\n",
        "job.yaml",
    )
    assert found["data.max_promt_length"] == (
        "absent", "nothing is known about this key; did you mean data.max_prompt_length?"
    )  # fmt: skip
    assert found["trainer.x"][0] == "absent" and found["data.own"][0] == "translated"
    assert found["actor_rollout_ref.actr.clip_ratio"][1].endswith("did you mean actor_rollout_ref.actor.clip_ratio?")


def test_only_a_sections_own_switch_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from roll.workbench.migrate import translate
    from roll.workbench.migrate.report import KeyUse
    from roll.workbench.migrate.table import PeerKey

    row = PeerKey(key="a.x", fate="absent", default_text="true")

    def why(key: str, value: Any, row: PeerKey, tree: Any = None, theirs: Any = None) -> str:
        return translate._why_unneeded(KeyUse(key=key, value=value, fate="absent"), row, tree or {}, theirs or {})

    free = PeerKey(key="a.variables.**", fate="absent")
    assert not why("a.variables.enable_thinking", False, free) and why("a.variables.x", None, free)
    assert not why("a.variables", {"x": False, "y": None}, free) and why("a.s", {"enable": False, "x": 3}, free)
    assert not why("a.x", False, row) and why("a.x", True, row)  # their default is true
    assert not why("a.y", 1, free, theirs={"a.y": True})
    assert why("a.s.x", 5, free, {"a": {"s": {"enable": False}}})
    assert why("a.s.x", 5, free, theirs={"a.s.enable": False})


@pytest.mark.parametrize(
    ("text", "value"),
    [("1_000", 1000), ("1e-6", 1e-6), (".5", 0.5), ("NULL", None), ('{"a": [1]}', {"a": [1]}), ("[a]", "[a]"),
     ("1e999", "1e999"), ("a,b", "a,b"), ("007", 7), ("-", "-")],
)  # fmt: skip
def test_values_of_options(text: str, value: Any):
    assert scalar(text) == value


def test_every_key_of_a_file_is_in_exactly_one_list_and_nothing_in_it_obeys_a_terminal(tmp_path: Path):
    tree = {
        "model_name_or_path": "a/b\x1b[2J", "num_generations": 4, "beta\x9b": 1, "optim": "adamw\x1b",
        "peft": {"x": [{}]},
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(tree))
    report, _ = migrate(tmp_path / "a.json", "trl")
    assert sorted(use.key for use in report.uses) == sorted(path for path, _ in leaves_of(tree))
    shown = report.text() + report.json() + "".join(report.missing)
    assert not any((ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160 for letter in shown)


def test_every_key_of_mutated_files_is_in_the_report(tmp_path: Path):
    assert not [problem for seed in range(24) for problem in problems(*mutated(seed, tmp_path))]


@pytest.mark.parametrize(
    ("per_device", "passes", "expected"),
    # 4 prompts x 8 = 32 responses of one rank: 5 x 7 = 35 is too many, 5 doesn't divide 32: 4 x 7 neither, 4 x 4 does.
    [(5, 7, (4, 4)), (10**12, 1, (32, 1)), (8, 4, (8, 4)), (0, 3, (0, 3))],
)
def test_passes_fill_the_responses_of_a_step_whatever_was_written(per_device, passes, expected):
    draft = Draft("rlvr", {}, MigrationReport(source="a", system="b"))
    draft.put("rollout_batch_size", 4)
    args = "actor_train.training_args"
    draft.put(f"{args}.per_device_train_batch_size", per_device)
    draft.put(f"{args}.gradient_accumulation_steps", passes)
    finish._batches(draft)
    sizes = draft.get(f"{args}.per_device_train_batch_size"), draft.get(f"{args}.gradient_accumulation_steps")
    assert sizes == expected


def test_a_key_that_is_taken_out_does_not_come_back_as_its_default(tmp_path):
    job = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m"
    (tmp_path / "run.sh").write_text(f"{job}\n", "utf-8")
    assert at(migrate(tmp_path / "run.sh")[1], "track_with") == ["stdout", "wandb"]
    (tmp_path / "run.sh").write_text(f"{job} ~trainer.logger\n", "utf-8")
    report, tree = migrate(tmp_path / "run.sh")
    assert [use.fate for use in report.uses if use.key == "~trainer.logger"] == ["dead"]
    assert at(tree, "track_with") is None


def test_many_unknown_keys_are_all_asked_for(tmp_path):
    (tmp_path / "job.yaml").write_text("".join(f"learning_rat{i}: 1\n" for i in range(2000)), "utf-8")
    report, tree = migrate(tmp_path / "job.yaml", "trl")
    assert len(report.of("absent")) == 2000 and tree["exp_name"] == "???"
    assert sum("did you mean" in use.note for use in report.uses) <= 40
