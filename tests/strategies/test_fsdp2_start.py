"""Several ranks of FSDP2 start without any of them holding a whole model, and with the same numbers."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from start_contract import LARGE, LAYER, MIB, check_starts, peak_of_a_start
from test_fsdp2_ranks import fsdp_spec
from tiny_models import build_tiny_model, build_tiny_picture_model

from roll.strategies.hf.fsdp2 import shard_module
from roll.strategies.hf.streamed import StreamedWeights
from roll.workbench.planning.architecture import read_architecture


def test_weights_from_slices_are_those_of_a_model_that_was_loaded_whole(ranks, model_of, tmp_path):
    half, lora = {"dtype": "bf16"}, {"lora_rank": 4, "lora_alpha": 8.0, "dtype": "bf16"}
    packed = {"use_sequence_packing": True}
    frozen = {"freeze_module_prefix": ("model.layers.0.", "model.embed_tokens")}
    specs = {
        "tied": fsdp_spec(model_of(), worker=packed),
        "a head of its own, frozen layers": fsdp_spec(model_of(tie_word_embeddings=False), model=frozen),
        "biases, stored wider than computed": fsdp_spec(model_of("qwen2"), model=half),
        "experts": fsdp_spec(model_of("qwen3_moe"), worker=packed),
        "experts under other names": fsdp_spec(model_of("mixtral")),
        "rows of three experts": fsdp_spec(model_of("qwen3_moe", num_experts=3)),
        "rows of an expert under other names": fsdp_spec(model_of("mixtral", num_local_experts=3), model=half),
        "critic": fsdp_spec(model_of("qwen3"), kind="value"),
        "adapters": fsdp_spec(model_of(), model=lora),
        "of a picture model": fsdp_spec(build_tiny_picture_model(tmp_path / "pictures", "qwen3_5_moe")),
    }
    check_starts(ranks, specs)


def test_a_model_whose_files_say_something_else_is_loaded_by_transformers(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = build_tiny_model(tmp_path / "model")
    spec = fsdp_spec(folder)
    assert StreamedWeights.open(spec, torch.float32) is not None
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    assert StreamedWeights.open(spec, torch.float32) is not None  # tied, and twice the same
    save_file({**tensors, "lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    assert StreamedWeights.open(spec, torch.float32) is None
    tensors.pop("model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    assert StreamedWeights.open(spec, torch.float32) is None  # transformers would invent it


def moments(strategy):
    """Bytes of an optimizer's states, which are sharded as well."""
    states = (state for optimizer in strategy._optimizers for state in optimizer.state.values())
    values = (value for state in states for value in state.values())
    return sum(value.to_local().nbytes for value in values if hasattr(value, "to_local"))


def test_a_rank_starts_in_the_memory_of_its_shard_and_one_layer(ranks, model_of, tmp_path):
    large = build_tiny_model(tmp_path / "large", **LARGE)
    stored = (large / "model.safetensors").stat().st_size
    limit = stored / 4 + LAYER + 100 * MIB
    assert stored > 1.5 * limit
    for above in ranks.run(peak_of_a_start, 4, (fsdp_spec(model_of()), fsdp_spec(large)), moments):
        assert above <= limit, f"{above / MIB:.0f} MiB of a model of {stored / MIB:.0f} MiB"


def lay_out(name: str, shards: int) -> float:
    """Seconds that it takes over 512 ranks; in a process that has no process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    from roll.configs.schema.strategy_config import Fsdp2Config
    from roll.strategies.hf.hf_build import blocks
    from roll.strategies.hf.hf_model import PolicyModel
    from roll.workbench.planning.architecture import known_sizes, read_architecture

    config, size = AutoConfig.for_model(**known_sizes(name)), read_architecture(name, {}, "pretrain").count()
    started = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=17, world_size=512)
    try:
        with torch.device("meta"):
            module = PolicyModel(AutoModelForCausalLM.from_config(config), 1.0)
        shard_module(module, list(blocks(module.lm)), Fsdp2Config(fsdp_size=shards), torch.bfloat16, "cpu", 512)
        parameters = list(module.parameters())
        assert sum(p.numel() for p in parameters) == size
        assert all(p.is_meta for p in parameters)
        mine = sum(p.to_local().numel() for p in parameters)
        assert mine == pytest.approx(size / shards, rel=0.02)
    finally:
        dist.destroy_process_group()
    return time.perf_counter() - started


@pytest.fixture(scope="module")
def another_process():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        yield processes


# 64 ranks have two of the 128 experts each, 512 some rows of all.
@pytest.mark.parametrize(
    ("name", "billions", "shards"),
    [
        ("meta-llama/Llama-3.1-70B", 70.55, 512),
        ("Qwen/Qwen3-235B-A22B", 235.09, 64),
        ("Qwen/Qwen3-235B-A22B", 235.09, 512),
    ],
)
def test_a_large_model_is_laid_out_over_512_ranks_within_minutes(another_process, name, billions, shards):
    assert read_architecture(name, {}, "pretrain").count() == pytest.approx(billions * 1e9, rel=1e-4)
    assert another_process.submit(lay_out, name, shards).result(timeout=300) < (60 if shards == 512 else 120)
