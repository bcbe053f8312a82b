"""`roll check` refuses models that vLLM can't sample from on this machine, from their config.json alone."""

from __future__ import annotations

import pytest
from test_configs_model_families import SAMPLER, SHAPE, found_for

from roll.configs.checks.machine_checks import MISSING, Machine
from roll.configs.checks.vllm_models import delta_rule_obstacle
from roll.utils.processor import Processor

HYBRID = {
    **SHAPE, "model_type": "qwen3_5_text", "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
PICTURES = {"model_type": "qwen3_5", "text_config": HYBRID, "vision_config": {"depth": 1}}
DTYPE = "actor_infer.model_args.dtype"
BF16, FAST = (f"{DTYPE}=bf16",), Processor("GenuineIntel", frozenset({"avx512_bf16"}))
ADAPTERS = ("lora_sync=adapters", "actor_train.model_args.lora_rank=4")


@pytest.mark.parametrize("tree", [HYBRID, PICTURES], ids=["text", "pictures"])
def test_a_gated_delta_rule_without_an_accelerator_takes_bf16(tmp_path, tree):
    here = Machine(processor=FAST)
    assert "in bf16 only, and dtype is fp32" in found_for(tmp_path, tree, "vllm", machine=here)[DTYPE]
    assert "in bf16 only, and dtype is fp32" in found_for(tmp_path, tree, "vllm", [f"{DTYPE}=auto"], here)[DTYPE]
    assert found_for(tmp_path, tree, "vllm", BF16, here) == {}
    assert found_for(tmp_path, tree, "vllm", machine=Machine(accelerators=("NVIDIA H200",))) == {}
    assert found_for(tmp_path, tree, "hf_infer", machine=here) == {}


def test_a_processor_or_heads_that_the_kernels_do_not_take_are_named(tmp_path):
    old = Machine(processor=Processor("GenuineIntel", frozenset({"avx512f"})))
    assert "avx512_bf16, which this processor doesn't have" in found_for(tmp_path, HYBRID, "vllm", BF16, old)[SAMPLER]
    for key, value in ((128, 64), (32, 32)):
        other = {**HYBRID, "linear_key_head_dim": key, "linear_value_head_dim": value}
        found = found_for(tmp_path, other, "vllm", BF16, Machine(processor=FAST))[SAMPLER]
        assert "with heads of 64 or 128 numbers, and this model has" in found
    assert delta_rule_obstacle({"model_type": "llama"}, "fp32", frozenset()) == ""


def test_adapters_by_themselves_are_refused_where_layers_are_fused_or_named_otherwise(tmp_path):
    here = Machine(processor=FAST)
    assert "send merged weights" in found_for(tmp_path, HYBRID, "vllm", (*BF16, *ADAPTERS), here)[SAMPLER]
    device = Machine(accelerators=("NVIDIA H200",))
    assert "names the layers" in found_for(tmp_path, PICTURES, "vllm", ADAPTERS, device)["lora_sync"]
    assert found_for(tmp_path, HYBRID, "vllm", ADAPTERS, device) == {}


def test_a_package_that_vllms_module_imports_is_named_with_the_way_to_get_it(tmp_path):
    bare = Machine(packages=frozenset(MISSING) - {"torchvision"}, accelerators=("NVIDIA H200",))
    found = found_for(tmp_path, HYBRID, "vllm", machine=bare)[SAMPLER]
    assert "imports torchvision, which isn't there" in found
    assert "pip install --no-deps torchvision" in found
    assert found_for(tmp_path, {**HYBRID, "model_type": "qwen3_next"}, "vllm", machine=bare) == {}
