"""Models of the hub that are planned without a download, and files that leave values to whoever starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.cli.plan import read
from roll.configs.errors import ConfigError
from roll.workbench.planning.architecture import UnknownModel, known_sizes, read_architecture

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}
"""Parameters as known of these models, tied ones once; written down from memory, not read off their pages."""


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_well_known_model_has_as_many_parameters_as_is_known_of_it(name: str, count: int):
    assert read_architecture(name, {}, "pretrain").count() == count


def test_another_model_is_refused_with_what_to_fetch():
    assert known_sizes("Qwen/Qwen2.5-7B-Mine") is None
    with pytest.raises(UnknownModel, match="hf download Qwen/Qwen2.5-7B-Mine config.json"):
        read_architecture("Qwen/Qwen2.5-7B-Mine", {}, "pretrain")


def test_files_that_are_still_to_be_given_do_not_matter(tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "pipeline: rlvr\nrows: ???\npretrain: Qwen/Qwen2.5-0.5B\nmax_steps: 1\nrewards: {m: {name: exact}}\n"
        "actor_train: {data_args: {file_name: '${rows}', prompt: prompt}}\n",
        "utf-8",
    )
    assert read(file, []).pretrain == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ConfigError, match="colour"):
        read(file, ["colour=blue"])
