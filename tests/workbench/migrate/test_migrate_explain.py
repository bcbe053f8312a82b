"""`roll migrate --explain KEY`: what a key is here, with which value and default, or why it isn't."""

from __future__ import annotations

import json

import pytest

from roll.cli.__main__ import main
from roll.cli.completion import script
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import PIPELINES
from roll.configs.parsing.schema_places import homes_of
from roll.workbench.migrate import peers
from roll.workbench.migrate.explain import as_text, explain
from roll.workbench.migrate.table import systems


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["migrate", "--explain", *arguments]) == 0
    return capsys.readouterr().out


def test_a_key_is_explained_with_its_place_and_both_defaults(capsys: pytest.CaptureFixture[str]):
    text = answered(capsys, "actor_rollout_ref.rollout.n")
    assert "verl 0.9.1: actor_rollout_ref.rollout.n -> num_return_sequences_in_group" in text
    assert "by default: 1 there, 8 here" in text


def test_a_default_is_said_for_every_class_that_has_another_one(capsys: pytest.CaptureFixture[str]):
    text = answered(capsys, "num_generations", "--from", "trl")
    assert "by default: 8 (GRPOConfig), 2 (RLOOConfig) there, 8 here" in text
    text = answered(capsys, "learning_rate", "--from", "trl")
    # GRPO, RLOO, DPO, KTO 1e-6; SFT 2e-5; reward models 1e-4: nobody has the 5e-5 of transformers.
    assert "2e-05 (SFTConfig), 0.0001 (RewardConfig)" in text and "5e-05" not in text


@pytest.mark.parametrize(
    "typed", ["--num_generations", "--num-generations=4", " num_generations ", "+num_generations=4"]
)
def test_a_key_may_be_typed_as_on_a_command_line(typed: str):
    assert [answer.ours for answer in explain(typed)] == [("num_return_sequences_in_group",)]


@pytest.mark.parametrize("words", [["--algo.kl.init_coef"], ["--algo.kl.init_coef", "--json"], ["algo.kl.init_coef"]])
def test_a_flag_may_keep_its_dashes(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert "OpenRLHF 0.11.2" in answered(capsys, *words)
    assert main(["migrate", "--json", "--explain", "--algo.kl.init_coef", "--from", "openrlhf"]) == 0


def test_the_last_words_are_enough_and_several_projects_are_listed(capsys: pytest.CaptureFixture[str]):
    text = answered(capsys, "rollout.n")
    assert "verl 0.9.1: actor_rollout_ref.rollout.n ->" in text
    projects = {answer.project for answer in explain("warmup_ratio")}
    assert "TRL 1.16.0" in projects and any(project.startswith("Alibaba's ROLL") for project in projects)


def test_a_section_names_the_keys_below_it(capsys: pytest.CaptureFixture[str]):
    text = answered(capsys, "algorithm.rollout_correction")
    assert "algorithm.rollout_correction.rollout_is ->" in text and "likewise: " in text


def test_one_of_ours_names_the_keys_that_become_it(capsys: pytest.CaptureFixture[str]):
    text = answered(capsys, "rollout_batch_size")
    assert text.startswith("rollout_batch_size: a key here, by default 64\n")
    assert "  verl 0.9.1: data.train_batch_size\n" in text


@pytest.mark.parametrize("fate", ["translated", "decided", "dead", "quiet", "absent"])
def test_every_fate_is_told_apart(fate: str):
    words = {"translated": " -> ", "decided": "decided, so look at it", "dead": "needed by nothing here",
             "quiet": "no counterpart, and what is trained stays the same", "absent": "asks with ???"}  # fmt: skip
    rows = [(name, row) for name, system in systems().items() for row in system.rows if row.fate == fate and row.to]
    if not rows:
        pytest.skip(f"no row is {fate}")
    name, row = rows[0]
    text = as_text([answer for answer in explain(row.key, name.partition("_")[0]) if answer.fate == fate])
    assert row.key in text and words[fate] in text


def test_every_key_of_every_project_and_of_ours_is_explained():
    for name, system in systems().items():
        keys = [row.key for row in system.rows if row.key.strip("*.")]
        for key in {*keys[::7], *(key for job in peers.jobs(name).values() for key in list(job)[::17])}:
            assert as_text(explain(key, name.partition("_")[0]))
    for cls in PIPELINES.values():
        for word in list(homes_of(cls))[::25]:
            assert any(answer.fate == "ours" for answer in explain(word))


def test_what_nobody_has_is_a_mistake_with_the_nearest_names(capsys: pytest.CaptureFixture[str]):
    assert main(["migrate", "--explain", "num_generation"]) == 2
    assert "did you mean 'num_generations'" in capsys.readouterr().err
    for key in ("", ".", "a..b", "--", "x" * 200_000, "*", "**", "\x1b[2J"):
        with pytest.raises(ValueError, match="is no key of ROLL, verl, TRL or OpenRLHF") as caught:
            explain(key)
        assert not isinstance(caught.value, ConfigError) and len(str(caught.value)) < 400
        assert "'**'?" not in str(caught.value)


def test_the_answer_is_json_for_programs(capsys: pytest.CaptureFixture[str]):
    (answer,) = json.loads(answered(capsys, "num_generations", "--json"))
    assert answer["ours"] == ["num_return_sequences_in_group"] and answer["fate"] == "translated"
    assert answer["their_default"] == {"GRPOConfig": 8, "RLOOConfig": 2} and answer["our_default"] == 8


def test_a_file_and_a_key_are_not_taken_together(capsys: pytest.CaptureFixture[str]):
    assert main(["migrate", "old.yaml", "--explain", "num_generations", "-o", "new.yaml"]) == 2
    assert "leave out OLD, -o" in capsys.readouterr().err
    assert main(["migrate"]) == 2
    assert "roll migrate OLD, or roll migrate --explain KEY" in capsys.readouterr().err


def test_shells_complete_it():
    for shell in ("bash", "zsh", "fish"):
        assert "explain" in script(shell)
