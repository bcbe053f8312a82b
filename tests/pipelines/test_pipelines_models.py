"""Models and tokenizers of the user's own: `external_lib`, `tokenizer_name_or_path`, `use_shm`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SMALL, again, run_small
from tiny_models import char_tokenizer
from toy import run_toy, write_toy

from roll.configs.checks import prerequisites
from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.utils import staging

LIBRARY = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class HouseConfig(LlamaConfig):
    model_type = "{name}"


class HouseModel(LlamaForCausalLM):
    config_class = HouseConfig


AutoConfig.register("{name}", HouseConfig)
AutoModelForCausalLM.register(HouseConfig, HouseModel)
"""


def house_model(folder: Path, model: Path, name: str) -> tuple[Path, Path]:
    """(a model of a type that only a library knows, that library)"""
    shutil.copytree(model, folder / name)
    file = folder / name / "config.json"
    config = {**json.loads(file.read_text()), "model_type": name, "architectures": ["HouseModel"]}
    file.write_text(json.dumps(config))
    (folder / "register.py").write_text(LIBRARY.format(name=name))
    return folder / name, folder / "register.py"


@pytest.mark.parametrize("where", ["", "actor_train.model_args."])
def test_a_library_registers_a_model_before_it_is_loaded(tiny_model, tmp_path, where):
    model, library = house_model(tmp_path, tiny_model, f"house{len(where)}")
    unknown = [f"{'actor_infer' if where else 'actor_train'}.model_args.model_name_or_path={tiny_model}"]
    mine = [] if not where else unknown  # of one role alone the engine takes the plain twin
    run = run_small(tmp_path / "run", model, f"{where}external_lib={library}", *mine)
    assert run.last["actor/optimizer_steps"] == 1
    assert type(run.strategies["actor_train"]._module.lm).__name__ == "HouseModel"


def test_workers_import_the_library_in_their_own_processes(tiny_model, tmp_path):
    model, library = house_model(tmp_path, tiny_model, "houseray")
    folder = write_toy(tmp_path / "run", model)
    before = set(staging.FOLDER.glob(f"{staging.PREFIX}*"))
    keys = ("executor=ray", f"external_lib=[{library}]", "num_gpus_per_node=2", "ray_init.num_cpus=3")
    shared = [f"{role}.model_args.use_shm=true" for role in ("actor_train", "actor_infer")]
    rows = run_toy(folder, *SMALL, *keys, *shared)
    assert rows[-1]["actor/optimizer_steps"] == 1
    assert set(staging.FOLDER.glob(f"{staging.PREFIX}*")) == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no_such_package.models", "there is no package 'no_such_package'"),
        ("nowhere/register.py", "a Python file that exists"),
        ("{folder}/wrong.py", "valid Python"),
    ],
)
def test_a_library_that_is_not_there_is_named_before_the_start(tiny_model, tmp_path, given, said):
    write_toy(tmp_path, tiny_model)
    (tmp_path / "wrong.py").write_text("def:\n")
    config = load_config(tmp_path, "toy", [f"actor_train.model_args.external_lib={given.format(folder=tmp_path)}"])
    with pytest.raises(ConfigError, match=rf"actor_train\.model_args\.external_lib: .*{said}"):
        check_prerequisites(config)


def test_a_library_that_fails_to_import_is_named(tiny_model, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')\n")
    with pytest.raises(ValueError, match=r"external_lib: '.*broken\.py' fails to import: RuntimeError: no licence"):
        run_small(tmp_path / "run", tiny_model, f"external_lib={tmp_path}/broken.py")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def without_tokenizer(folder: Path, model: Path) -> Path:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*", "chat_template*"))
    return folder


def moved_tokenizer(folder: Path) -> Any:
    """The characters' tokenizer with other numbers for `l` and `U`."""
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    read = json.loads(file.read_text())
    vocab = read["model"]["vocab"]
    vocab["l"], vocab["U"] = vocab["U"], vocab["l"]
    file.write_text(json.dumps(read))
    return vocab


def test_prompts_and_responses_go_through_a_tokenizer_of_its_own(tiny_model, tmp_path):
    model = without_tokenizer(tmp_path / "bare", tiny_model)
    vocab = moved_tokenizer(tmp_path / "tokenizer")
    key = f"actor_train.model_args.tokenizer_name_or_path={tmp_path}/tokenizer"
    run = run_small(tmp_path / "run", model, key, "actor_train.data_args.shuffle=false", dump=True)
    for row in run.rollouts():
        assert row.token_ids[: len(row.prompt)] == [vocab[letter] for letter in row.prompt]
    exported = json.loads((tmp_path / "run" / "output" / "hf_model" / "tokenizer.json").read_text())
    assert exported["model"]["vocab"] == vocab


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tiny_model, tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.add_tokens([f"<more{i}>" for i in range(500)])
    tokenizer.save_pretrained(tmp_path / "large")
    key = f"actor_train.model_args.tokenizer_name_or_path={tmp_path}/large"
    with pytest.raises(ValueError, match=r"tokenizer_name_or_path: .* has the token '<more499>' with number \d+, but"):
        run_small(tmp_path / "run", tiny_model, key)


def test_roles_that_read_the_actors_tokens_have_its_tokenizer(tiny_model, tmp_path):
    write_toy(tmp_path, tiny_model)
    with pytest.raises(ConfigError, match=r"actor_infer\.model_args\.tokenizer_name_or_path: .*tokens of actor_train"):
        load_config(tmp_path, "toy", [f"actor_infer.model_args.tokenizer_name_or_path={tiny_model}"])
    given = [f"actor_train.model_args.tokenizer_name_or_path={tmp_path}/nothing"]
    config = load_config(tmp_path, "toy", given)
    assert config.tokenizer_path("actor_infer") == config.tokenizer_path("actor_train") == f"{tmp_path}/nothing"
    with pytest.raises(ConfigError, match=r"tokenizer_name_or_path: .* expected a folder that exists"):
        check_prerequisites(config)


# --- shared memory ---------------------------------------------------------------------------------------------------


def test_weights_are_read_from_shared_memory_which_is_given_back(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "FOLDER", tmp_path / "shm")
    staging.FOLDER.mkdir()
    read = []
    original = staging._copy
    monkeypatch.setattr(staging, "_copy", lambda copy, *more: (read.append(copy), original(copy, *more)))
    shared = [f"{role}.model_args.use_shm=true" for role in ("actor_train", "actor_infer")]
    run = run_small(tmp_path / "run", tiny_model, *shared)
    assert len(read) == 1  # one copy for both roles
    assert not list(staging.FOLDER.iterdir())
    plain = again(tmp_path / "run")
    for name, weight in run.weights().items():
        assert torch.equal(weight, plain.weights()[name])


@pytest.mark.parametrize("name", ["org/name", "{folder}/weights.gguf"])
def test_only_a_folder_can_be_copied(tiny_model, tmp_path, monkeypatch, name):
    write_toy(tmp_path, tiny_model)
    (tmp_path / "weights.gguf").touch()
    monkeypatch.setattr(prerequisites, "hub_problem", lambda _: "")
    key = f"actor_train.model_args.model_name_or_path={name.format(folder=tmp_path)}"
    config = load_config(tmp_path, "toy", ["actor_train.model_args.use_shm=true", key])
    with pytest.raises(ConfigError, match=r"actor_train\.model_args\.use_shm: .* isn't a folder here"):
        check_prerequisites(config)


@pytest.mark.parametrize(
    ("key", "given", "taken"),
    [
        ("actor_train.strategy_args.strategy_name", "fsdp_train", "fsdp2_train"),
        ("actor_train.model_args.dtype", "bfloat16", "bf16"),
        ("actor_train.model_args.dtype", "torch.float32", "fp32"),
        ("actor_train.model_args.attn_implementation", "sdpa", "sdpa"),
        ("actor_train.training_args.lr_scheduler_type", "constant_with_warmup", "constant"),
        ("actor_train.training_args.lr_scheduler_type", "cosine_with_min_lr", "cosine"),
        ("actor_train.training_args.optimizer", "AdamW", "adamw"),
    ],
)
def test_values_as_other_projects_spell_them(tiny_model, tmp_path, key, given, taken):
    write_toy(tmp_path, tiny_model)
    found: Any = load_config(tmp_path, "toy", [f"++{key}={given}"])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == taken


def test_names_of_modules_may_be_one_text_with_commas(tiny_model, tmp_path):
    write_toy(tmp_path, tiny_model)
    key = "actor_train.model_args.freeze_module_prefix"
    config = load_config(tmp_path, "toy", [f"{key}='model.embed_tokens, model.layers.0'"])
    assert config.actor_train.model_args.freeze_module_prefix == ("model.embed_tokens", "model.layers.0")


@pytest.mark.parametrize("given", ["fsdp", "megatron"])
def test_a_backend_without_train_or_infer_is_told_both(tiny_model, tmp_path, given):
    write_toy(tmp_path, tiny_model)
    with pytest.raises(ConfigError, match=r"strategy_name: .*_train for a role that trains"):
        load_config(tmp_path, "toy", [f"++actor_train.strategy_args.strategy_name={given}"])
