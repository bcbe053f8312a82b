"""`vllm`, the real one, keeps what every engine promises. One engine for all cases, and one on two ranks."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from engine_contract import (
    CASES,
    EngineUnderTest,
    a_killed_process_ends_the_engine_within_seconds,
    a_wrong_weight_update_is_refused_and_leaves_no_stale_engine,
    after_each_weight_update_log_probs_are_those_of_the_new_weights,
    ids,
    many_requests_at_once_of_all_lengths_come_back_complete,
)
from safetensors.torch import load_file

from roll.configs.catalog.family_table import FAMILIES
from roll.configs.schema.engine_config import VllmConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import EngineSettings, RequestRefused, SamplingParams
from roll.strategies.engines.engine_processes import MARK, OWNER, kill_marked, marked_processes
from roll.strategies.engines.vllm import vllm_engine as engine_module
from roll.strategies.engines.vllm.vllm_engine import VllmBackend, build
from roll.strategies.hf.checkpoint_names import CheckpointNames, WayBack
from roll.strategies.hf.description import describe_model
from roll.strategies.training.pretrained import load_causal_lm, load_tokenizer, named_tensors

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, which isn't installed")

RUN = EngineSettings(max_running_requests=64, max_sequence_length=256, seed=0, update_buffer_bytes=1 << 20)


@pytest.fixture(scope="module")
def tested(model_of):
    path = model_of("qwen3", hidden=128)
    engine = build(
        ModelArgs(model_name_or_path=str(path)),
        VllmConfig(block_size=32, engine_args={"kv_cache_memory_bytes": 64 << 20}),
        replace(RUN, update_buffer_bytes=100_000),  # some tensors are larger
    )
    yield EngineUnderTest(engine, path, max_context=256)
    mark = engine._backend._mark
    engine.close()
    assert marked_processes(mark) == []


@needs_vllm
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_vllm(tested, case):
    case(tested)


@needs_vllm
def test_vllm_refuses_a_temperature_that_it_would_change(tested):
    for temperature in (0.001, 2.5):
        with pytest.raises(ValueError, match="vllm takes 0"):
            tested.engine.submit([tested.request("r", [9], temperature=temperature)])


@needs_vllm
def test_what_vllm_itself_refuses_is_no_death(tested):
    # Past the checks of `AsyncEngine`: vLLM says no when it reads the parameters, or when it sees the request.
    backend, loop = tested.engine._backend, tested.engine._loop.thread.loop

    async def draw(**params):
        params = SamplingParams(**{"max_new_tokens": 4, "ignore_eos": True, **params})
        async for _ in backend.stream("bad", [9, 8], params, 0, final_only=True):
            pass

    for wrong, message in (({"top_p": 3.0}, "top_p"), ({"stop_token_ids": (1 << 30,)}, "out-of-vocab")):
        with pytest.raises(RequestRefused, match=message):
            asyncio.run_coroutine_threadsafe(draw(**wrong), loop).result(60)
    request = tested.request("r", [9, 8], top_k=1 << 62, stop_token_ids=(5, 1 << 30))
    assert tested.run([request])["r"].num_tokens > 0


@needs_vllm
def test_a_pass_of_vllm_on_an_h100_reads_as_many_prompt_tokens_as_with_its_own_llm_class(monkeypatch, model_of):
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    start = Mock(return_value=AsyncMock())
    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    options = {"model": str(model_of("qwen3", hidden=128)), "enable_chunked_prefill": True}
    asyncio.run(VllmBackend(options, description=None).start())
    ((arguments,), given) = start.call_args
    h100 = SimpleNamespace(
        get_device_total_memory=lambda: 85_017_755_648, get_device_name=lambda: "NVIDIA H100 80GB HBM3",
        is_tpu=lambda: False, is_cpu=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(arg_utils, "current_platform", h100)
    model = SimpleNamespace(max_model_len=4096, is_multimodal_model=False)

    def budget(context):
        mine = copy.copy(arguments)
        mine._set_default_max_num_seqs_and_batched_tokens_args(
            context, model, SimpleNamespace(use_batched_dp_moe=False)
        )
        return mine.max_num_batched_tokens

    assert budget(given["usage_context"]) == 16_384
    assert budget(UsageContext.ENGINE_CONTEXT) == 2_048  # that of an engine which isn't told


def test_every_declared_option_of_vllm_reaches_it(monkeypatch, model_of):
    made = []
    monkeypatch.setattr(engine_module, "started", lambda _, backend, *rest: made.append(backend))
    options = VllmConfig(
        tensor_parallel_size=2, load_format="dummy", gpu_memory_utilization=0.5, block_size=32, max_model_len=128,
        max_num_seqs=8, max_num_batched_tokens=512, enable_prefix_caching=False, enforce_eager=False,
        quantization="int8", engine_args={"scheduling_policy": "priority"},
    )  # fmt: skip
    build(ModelArgs(model_name_or_path=str(model_of("qwen3", hidden=128))), options, RUN)
    reached = made[0]._arguments
    declared = {"quantization": "int8_per_channel_weight_only", "scheduling_policy": "priority"}
    expected = {**options.declared_arguments, **declared}
    assert {name: reached[name] for name in expected} == expected
    assert {spec.name for spec in fields(options)} - {"engine_args", "sleep_level"} <= expected.keys()


@needs_vllm
def test_vllm_itself_reads_the_options_of_fp8_rollouts_as_they_are_meant(monkeypatch, model_of):
    """By `fp8` vLLM 0.32 means files that hold fp8 already, and a trainer sends others."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.layers.quantization import get_quantization_config

    made = []
    monkeypatch.setattr(engine_module, "started", lambda _, backend, *rest: made.append(backend))
    options = VllmConfig(quantization="fp8", engine_args={"kv_cache_dtype": "fp8"})
    build(ModelArgs(model_name_or_path=str(model_of("qwen3", hidden=128)), dtype="bf16"), options, RUN)
    arguments = AsyncEngineArgs(**made[0]._arguments)
    model = arguments.create_model_config()
    quantised = get_quantization_config(model.quantization)
    assert (model.dtype, arguments.kv_cache_dtype) == (torch.bfloat16, "fp8")
    assert quantised is get_quantization_config("online") and quantised is not get_quantization_config("fp8")
    assert model.quantization_config.linear.weight.dtype == torch.float8_e4m3fn


@needs_vllm
def test_vllm_with_wrong_weights_ends(tested):
    a_wrong_weight_update_is_refused_and_leaves_no_stale_engine(tested, "missing")


@needs_vllm
def test_vllm_on_two_ranks_gets_its_experts_from_updates_and_dies_with_any_of_its_processes(model_of):
    # Experts of 96 / 2 numbers are padded to 64 and packed on a CPU; a layer without them, a shared expert, a router
    # that has two names, a tied head.
    path = model_of("qwen2_moe", hidden=128, moe_intermediate_size=96, mlp_only_layers=[0])
    options = VllmConfig(
        tensor_parallel_size=2,
        load_format="dummy",
        max_num_batched_tokens=64,  # prompts are cut
        engine_args={"kv_cache_memory_bytes": 64 << 20},
    )
    engine = build(ModelArgs(model_name_or_path=str(path)), options, RUN)
    tested = EngineUnderTest(engine, path, max_context=256, loads_in_place=False)
    try:
        after_each_weight_update_log_probs_are_those_of_the_new_weights(tested)
        many_requests_at_once_of_all_lengths_come_back_complete(tested)
        workers = marked_processes(engine._backend._mark)
        a_killed_process_ends_the_engine_within_seconds(tested, workers[-1])
        assert marked_processes(engine._backend._mark) == []
    finally:
        engine.close()


@needs_vllm
def test_vllm_refuses_an_argument_that_it_doesnt_have(model_of):
    options = VllmConfig(engine_args={"no_such_argument": 1})
    with pytest.raises(ValueError, match="no argument 'no_such_argument'"):
        build(ModelArgs(model_name_or_path=str(model_of("qwen3", hidden=128))), options, RUN)


@needs_vllm
def test_on_a_cpu_a_model_with_small_heads_is_refused_before_the_engine_dies_of_it(tiny_model):
    with pytest.raises(ValueError, match="takes heads of 32, 64, 80"):
        build(ModelArgs(model_name_or_path=str(tiny_model)), VllmConfig(), RUN)


async def stream(tensors):
    for name, tensor in tensors.items():
        yield name, tensor


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.experts])
def test_names_for_engines_are_those_that_transformers_writes_into_checkpoints(model_of, family):
    path = model_of(family)
    model = load_causal_lm(ModelArgs(model_name_or_path=str(path)), torch.float32)
    written = load_file(path / "model.safetensors")
    way_back = WayBack(CheckpointNames(model))
    made = dict(part for name, t in named_tensors(model) for part in way_back.convert(name, t.detach()))
    assert made.keys() == written.keys()
    assert all(torch.equal(made[name], written[name]) for name in made)


def test_a_model_is_described_without_its_weights_and_weight_streams_are_held_against_that(tiny_family):
    args = ModelArgs(model_name_or_path=str(tiny_family))
    model = load_causal_lm(args, torch.float32)
    described = describe_model(args)
    weights = {name: tensor.detach() for name, tensor in named_tensors(model)}
    assert described.shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    turn_end = load_tokenizer(args).convert_tokens_to_ids("<|im_end|>")  # of its chat template
    assert described.eos_token_ids == {model.config.eos_token_id, turn_end}
    assert described.max_context == 256

    async def through(tensors):
        return [name async for name, _ in described.complete(stream(tensors))]

    assert asyncio.run(through(weights)) == list(weights)
    one = "model.norm.weight"
    for wrong, message in (
        ({name: tensor for name, tensor in weights.items() if name != one}, f"1 tensors untouched, e.g. .'{one}'"),
        ({**weights, "extra": torch.ones(1)}, "'extra', which the engine's model doesn't have"),
        ({**weights, one: torch.ones(1)}, r"has shape \(1,\), expected \(32,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(through(wrong))


def test_processes_are_found_and_killed_by_their_mark():
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    subprocess.run([sys.executable, "-c", child], env={**os.environ, MARK: "mine"}, check=True, timeout=30)
    (orphan,) = marked_processes("mine")
    assert marked_processes("others") == []
    kill_marked("mine")
    end = time.monotonic() + 10
    while marked_processes("mine") and time.monotonic() < end:
        time.sleep(0.01)
    assert marked_processes("mine") == [], orphan


def test_processes_end_with_their_owner_even_when_it_is_killed():
    module = "roll.strategies.engines.engine_processes"
    code = f"from {module} import end_with_owner as f; f(); print(1, flush=True); input()"
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    marks = {MARK: "owned", OWNER: str(owner.pid)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **marks}
    )
    try:
        assert child.stdout.readline() == b"1\n"
        assert child.poll() is None
        owner.kill()
        assert child.wait(10) == 1
    finally:
        child.kill()
        owner.kill()
        owner.wait(10)
