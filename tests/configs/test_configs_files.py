"""The shipped YAML, the reference page and the JSON Schema, the command, and what importing costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from built_parts import with_parts
from config_reference import docstrings, line_of
from config_schema import json_schema, text
from jsonschema import Draft202012Validator

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from data_tokenizers import word_tokenizer

from roll.cli.train import start_pipeline
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.loss_table import LOSSES
from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.catalog.tracker_table import TRACKERS
from roll.configs.parsing import loader
from roll.configs.parsing.build_config import build
from roll.configs.parsing.loader import PIPELINES, load_config, to_yaml
from roll.configs.parsing.schema_places import sections_of
from roll.configs.rules.validate import warnings_of
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.env_config import CustomEnv, EnvManager
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.strategy_config import STRATEGIES, OwnStrategyConfig, StrategyArgs

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (REPOSITORY / "examples").rglob("*.yaml"))
PRESETS = sorted((REPOSITORY / "configs").glob("*.yaml"))
ENVS = sorted((REPOSITORY / "configs" / "envs").glob("*.yaml"))
QUESTIONS = {"pretrain": "some/model", "train_file": "train.jsonl", "test_file": "test.jsonl"}


def answers(file: Path) -> list[str]:
    """Overrides for what an example, or one that it builds on, leaves to its user."""
    tree = yaml.safe_load(file.read_text())
    bases = [file.parent / f"{entry.split('@')[0]}.yaml" for entry in tree.get("defaults", []) if entry != "_self_"]
    inherited = {answer for base in bases for answer in answers(base) if answer.split("=")[0] not in tree}
    return sorted(inherited | {f"{key}={QUESTIONS[key]}" for key, value in tree.items() if value == "???"})


@pytest.fixture(scope="module", autouse=True)
def each_file_is_composed_once():
    """What Hydra makes of an example, which takes most of the time, serves all tests of this module."""
    compose, kept = loader._composed, {}

    def composed(file, overrides):
        if file not in EXAMPLES:
            return compose(file, overrides)
        key = (file, *overrides)
        if key not in kept:
            kept[key] = compose(file, overrides)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_composed", composed)
        yield


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads_and_fits_the_schema_but_for_an_unknown_key(file, validator):
    config = load_config(file.parent, file.stem, answers(file))
    assert warnings_of(config) == []
    # What is made for accelerators samples with an engine that is made for them.
    if ("gpu" in file.stem or file.stem == "rlvr_qwen2.5_0.5b") and "actor_infer" in config.roles:
        assert config.actor_infer.strategy_args.strategy_name in ("vllm", "sglang")
    plain, _ = loader.compose_file(file, answers(file))
    errors = [error.message for error in validator.iter_errors(json.loads(json.dumps({**plain, "sead": 1})))]
    assert errors == ["Additional properties are not allowed ('sead' was unexpected)"]


@pytest.mark.parametrize("file", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_one_section_of_its_own_name_that_some_strategy_takes(file):
    tree = yaml.safe_load(file.read_text())
    assert list(tree) == [file.stem]
    assert any(not build(options, tree[file.stem])[1] for options in STRATEGIES.values())


@pytest.mark.parametrize("file", ENVS, ids=lambda path: path.stem)
def test_every_preset_of_an_environment_can_be_played(file):
    from roll.envs.env_registry import build_env, env_spec

    tree = yaml.safe_load(file.read_text())
    assert list(tree) == [file.stem]
    env, violations = build(CustomEnv, tree[file.stem])
    assert violations == []
    build_env(env_spec(file.stem, env, EnvManager())).reset(0, {})


@pytest.mark.parametrize("file", [file for file in EXAMPLES if file.stem.startswith("agentic")], ids=lambda f: f.stem)
def test_environments_of_every_example_can_be_made(file, tmp_path, monkeypatch):
    from roll.envs.env_registry import check_envs

    monkeypatch.chdir(REPOSITORY)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    given = [f"{key.split('=')[0]}={rows}" if "_file" in key else key for key in answers(file)]
    config = load_config(file.parent, file.stem, given)
    python = config.env_workers.python
    if python is not None:
        environment = python.removesuffix("/bin/python")
        # Only those that the Makefile makes may be missing: another one is a slip of the pen.
        assert environment in (REPOSITORY / "Makefile").read_text("utf-8").split(), python
        # The last thing that the Makefile writes there: an environment may be half made, as while .ci/run fetches it.
        if not Path(environment, ".installed").exists():
            pytest.skip(f"{environment} isn't here: make install-hubs")
    check_envs(config)


@pytest.mark.parametrize("name", ["rlvr/rlvr_qwen2.5_0.5b", "agentic/agentic_sokoban_qwen2.5_0.5b"])
def test_one_example_of_a_pipeline_spells_out_every_key(name):
    file = REPOSITORY / "examples" / f"{name}.yaml"
    whole = yaml.safe_load(to_yaml(load_config(file.parent, file.stem, answers(file))))
    written = yaml.safe_load(file.read_text())

    def missing(full: object, given: object, path: str) -> list[str]:
        if not isinstance(full, dict) or not isinstance(given, dict):
            return []
        return [f"{path}{key}" for key in full if key not in given] + [
            entry for key in full for entry in missing(full[key], given.get(key), f"{path}{key}.")
        ]

    assert missing(whole, written, "") == []


PAGE = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")


def table_rows(page: str) -> dict[str, list[list[str]]]:
    """The cells after the first of each row that begins with a key, by that key."""
    rows: dict[str, list[list[str]]] = {}
    for key, rest in re.findall(r"^\| `([^`]+)` \| (.*) \|$", page, re.MULTILINE):
        rows.setdefault(key, []).append(rest.split(" | "))
    return rows


def test_the_built_page_has_every_key_of_every_section_with_its_meaning():
    rows = table_rows(with_parts(PAGE))
    missing = []
    for cls in {section for pipeline in PIPELINES.values() for section in sections(pipeline)}:
        texts = docstrings(cls)
        for spec in fields(cls):
            meaning = (texts[spec.name] + line_of(spec)).replace("|", "\\|")
            if not any(" | ".join(cells).endswith(meaning) for cells in rows.get(spec.name, [])):
                missing.append(f"{cls.__name__}.{spec.name}")
    assert set(missing) <= {f"{cls.__name__}.pipeline" for cls in PIPELINES.values()}


def test_the_built_page_has_every_option_of_trackers_estimators_and_losses():
    rows = table_rows(with_parts(PAGE))
    tables = {"track_with": TRACKERS, "adv_estimator": ESTIMATORS, "policy_loss": LOSSES}
    tables["loss_type"] = PREFERENCE_LOSSES
    for key, entries in tables.items():
        assert f"\n## Options of `{key}`\n" in with_parts(PAGE)
        for name, entry in entries.items():
            assert {f"`{option}`" for option in entry.options} <= {cells[0] for cells in rows.get(name, [])}


def test_the_short_table_names_keys_that_exist_with_their_defaults():
    short, every = PAGE.split("## The keys that most files set")[1].split("\n## ")[0], with_parts(PAGE)
    rows = table_rows(short)
    assert len(rows) >= 20
    assert [spec.default for spec in fields(AgenticConfig) if spec.name == "adv_estimator"] == ["reinforce"]
    for path, ((default, _),) in rows.items():
        section, _, key = path.rpartition(".")
        cells = table_rows(every.split("\n## Top level of every pipeline")[1])[key]
        assert default in [row[1] for row in cells], path
        heading = section.replace("<role>", "actor_train") or "Top level"
        assert re.search(rf"^## .*{re.escape(heading)}.*$", every, re.MULTILINE), path


def sections(cls: type = RLVRConfig) -> set[type]:
    from typing import get_type_hints

    found = {cls}
    for hint in get_type_hints(cls).values():
        for section, _ in sections_of(hint):
            found |= sections(section)
    return found | {*STRATEGIES.values(), OwnStrategyConfig}


def test_every_key_says_what_it_means():
    for cls in sections() | sections(AgenticConfig):
        told = docstrings(cls)
        assert {f.name for f in fields(cls)} <= set(told), cls
        assert all(text.endswith(".") for text in told.values()), cls


def test_a_default_starts_nothing_that_was_not_asked_for():
    config = RLVRConfig(pipeline="rlvr", rewards={})
    assert list(config.roles) == ["actor_train", "actor_infer"]
    assert not (config.val_before_train or config.eval_steps or config.save_steps or config.validation)
    assert StrategyArgs(strategy_name="hf_infer").strategy_config == STRATEGIES["hf_infer"]()


def test_importing_the_configuration_needs_nothing_heavy():
    code = (
        "import importlib, json, pkgutil, sys, roll.configs\n"
        "for module in pkgutil.iter_modules(roll.configs.__path__):\n"
        "    importlib.import_module('roll.configs.' + module.name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"torch", "ray", "transformers", "datasets", "hydra", "omegaconf", "yaml", "numpy"}


def test_print_config_shows_every_key_and_check_shows_the_arithmetic(job, capsys, checks_start_no_process):
    named = ["--config_path", ".", "--config_name", "job"]
    assert start_pipeline([*named, "--print_config", "seed=7"], REPOSITORY / "examples") == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["seed"] == 7
    assert set(tree) == {f.name for f in fields(RLVRConfig)}
    word_tokenizer().save_pretrained(job / "model")
    (job / "model/model.safetensors").touch()
    (job / "model/config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    rows = [{"question": "w1 w1?", "ground_truth": "2", "tag": tag} for tag in ("words", "algebra")]
    (job / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert start_pipeline([*named, "--check"], REPOSITORY / "examples") == 0
    said = capsys.readouterr().out
    assert "4 prompts x 4 responses = 16 responses per step" in said
    assert "share slots: actor_train+actor_infer" in said


def test_the_folder_may_be_given_from_the_examples(tmp_path):
    command = [sys.executable, REPOSITORY / "examples" / "start_pipeline.py", "--print_config"]
    command += ["--config_path", "quickstart", "--config_name", "rlvr_smollm2"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, timeout=300)


def test_a_configuration_with_every_key_of_an_earlier_version_loads(job):
    # Runs have written every key with its default, and this one's was `linear`.
    config = load_config(job, "job", ["actor_train.training_args.wsd_decay_style=linear"])
    assert config.actor_train.training_args.lr_scheduler_type == "constant"


# --- the JSON Schema for editors --------------------------------------------------------------------------------------


def test_the_committed_schema_is_the_one_that_the_classes_give():
    committed = (REPOSITORY / "configs" / "schema.json").read_text("utf-8")
    assert committed == text(), "run `make docs`"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": "forty"}, "'forty' is not valid"),
        ({"seed": -1}, "-1 is not valid"),
        ({"actor_train": {"learning_rate": 1}}, "is not valid"),
        ({"truncation": "midle"}, "'midle' is not valid"),
        ({"pipeline": "rlhf"}, "'rlhf' is not valid"),
        ({"train_env_manager": {}}, "'train_env_manager' was unexpected"),
    ],
)
def test_a_wrong_value_is_marked(validator, change, words):
    job = {"pipeline": "rlvr", "rewards": {"math": {"name": "math_rule"}}}
    assert validator.is_valid(job)
    assert validator.is_valid({**job, "seed": "${other}", "defaults": ["base"], "track_with": "stdout"})
    assert validator.is_valid({"pipeline": "my.py:pairs", "beta": 0.1})
    assert any(words in error.message for error in validator.iter_errors({**job, **change}))
