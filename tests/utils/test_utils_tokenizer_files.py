"""A tokenizer's folder, read without transformers, says of templates what the tokenizer itself says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_utils_response_ends import GEMMA, GLM, GPT_OSS, PAIR, PHI, TEXT, tokenizer

from roll.utils.response_ends import response_ends, template_ends
from roll.utils.tokenizer_files import tokenizer_files


@pytest.mark.parametrize("template", [GEMMA, GLM, GPT_OSS, PAIR, PHI, TEXT])
def test_files_answer_as_the_tokenizer_does(template: str, tmp_path: Path) -> None:
    own = tokenizer(template)
    own.save_pretrained(tmp_path)
    files = tokenizer_files(str(tmp_path))
    assert files is not None
    assert files.chat_template == template
    assert template_ends(files) == template_ends(own)
    assert response_ends(files, [3]) == response_ends(own, [3])


def test_what_isnt_a_folder_with_a_tokenizer_is_unknown(tmp_path: Path) -> None:
    assert tokenizer_files("org/name") is None
    assert tokenizer_files(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert tokenizer_files(str(tmp_path)) is None


def test_files_that_cannot_be_read_are_left_to_whoever_loads_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    assert tokenizer_files(str(tmp_path)) is None


def test_added_tokens_may_stand_behind_the_vocabulary(tmp_path: Path) -> None:
    vocabulary = {f"word{i}": i for i in range(120_000)}  # 2.4 million characters
    added = [{"id": 120_000, "content": "<|end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    files = tokenizer_files(str(tmp_path))
    assert files is not None
    assert files.added_tokens_decoder == {120_000: "<|end|>"}
