"""The cases of `engine_contract.py` on real SGLang, in the environment that `make install-sglang-cpu` makes."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec

import device_stand_in
import engine_contract
import psutil
import pytest
import torch
from device_stand_in import OnDevice
from engine_contract import EngineUnderTest
from tiny_models import build_tiny_model

from roll.configs.schema.engine_config import SglangConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import EngineSettings, RequestRefused, SamplingParams
from roll.strategies.engines.buckets import SharedBucket, on_device
from roll.strategies.engines.engine_processes import marked_processes
from roll.strategies.training.pretrained import named_tensors

pytestmark = pytest.mark.skipif(
    find_spec("sglang") is None or find_spec("sgl_kernel") is None,
    reason="needs SGLang: make install-sglang-cpu, then .venv-sglang/bin/python -m pytest "
    "tests/strategies/test_engines_sglang.py",
)

MAX_CONTEXT = 240
PROMISES = frozenset({"top_p", "top_k"})


def build(path, **options):
    from roll.strategies.engines.sglang.sglang_engine import build

    return build(
        ModelArgs(model_name_or_path=str(path)),
        SglangConfig(**options),
        # A small buffer, so that they take several buckets, and some are larger than one.
        EngineSettings(max_running_requests=16, max_sequence_length=MAX_CONTEXT, seed=3, update_buffer_bytes=40_000),
    )


@pytest.fixture(scope="module")
def under_test(tmp_path_factory):
    path = build_tiny_model(tmp_path_factory.mktemp("sglang") / "qwen2", "qwen2")
    engine = build(path)
    yield EngineUnderTest(engine, path, MAX_CONTEXT, promises=PROMISES, loads_in_place=False)
    engine.close()


@pytest.mark.parametrize("case", engine_contract.CASES, ids=engine_contract.ids)
def test_sglang_keeps_the_contract(under_test, case):
    under_test.number += 1
    case(under_test)


def weights_on_the_device_reach_every_process(t, monkeypatch):
    """The owner takes them to be on an accelerator, and SGLang's processes open what stands in for its memory."""
    t.number += 1
    backend, paths = t.engine._backend, []
    call = backend._call

    async def spied(name, *arguments):
        if name == "bucket":
            paths.append(arguments[0])
        return await call(name, *arguments)

    with torch.no_grad():
        for parameter in t.model.parameters():
            parameter.mul_(1.1)
    with monkeypatch.context() as patch:
        device_stand_in.install(patch)
        patch.setattr(backend, "_call", spied)
        weights = ((name, tensor.detach().as_subclass(OnDevice)) for name, tensor in named_tensors(t.model))
        t.engine.update_weights(t.engine.version + 1, weights)
    assert len(paths) > 1 and any(map(on_device, paths))  # slices of experts are tensors of the host here
    t.remember()
    request = t.request("r", [9, 8, 7], max_new_tokens=20)
    t.check(request, t.run([request])["r"])


def test_weights_on_the_device_reach_sglang_by_the_handle_of_a_bucket(under_test, monkeypatch):
    weights_on_the_device_reach_every_process(under_test, monkeypatch)


def test_top_p_along_with_top_k_is_a_share_of_the_whole_distribution_and_log_probs_say_so(under_test):
    # Other engines take the share of what top-k leaves. Either way the log-prob is that of the draw.
    t = under_test
    t.number += 1
    requests = [t.request(f"r{i}", [9, 8, 7], top_k=4, top_p=0.02, temperature=0.8) for i in range(4)]
    for name, completion in t.run(requests).items():
        table = t.logprob_tables(t.request(name, [9, 8, 7], temperature=0.8), completion).exp()
        for probs, token, logprob in zip(table, completion.token_ids, completion.logprobs, strict=True):
            ordered, index = probs.sort(descending=True)
            kept = (ordered.cumsum(-1) - ordered <= 0.02) & (torch.arange(len(ordered)) < 4)
            assert token in index[kept]
            assert logprob == pytest.approx(float((probs[token] / ordered[kept].sum()).log()), abs=1e-5)


def test_nothing_is_sampled_behind_the_end_of_a_response(under_test, monkeypatch):
    t = under_test
    t.number += 1
    backend, yielded = t.engine._backend, []
    stream = backend.stream

    async def counted(*args, **given):
        async for part in stream(*args, **given):
            yielded.append(len(part.tokens))
            yield part

    monkeypatch.setattr(backend, "stream", counted)
    stops = tuple(range(10, 60))  # of 106 tokens: a response has two or so
    for ignores_eos in (False, True):  # its own end of sequence goes on where that is asked for, other tokens end it
        yielded.clear()
        options = {"ignore_eos": ignores_eos, "stop_token_ids": stops, "max_new_tokens": 60}
        done = t.run([t.request(f"{ignores_eos}-{i}", [9, 8, 7], **options) for i in range(64)])
        reasons = [completion.finish_reason for completion in done.values()]
        assert reasons.count("stop") > 32  # the weights of an earlier test may say another token again and again
        kept = sum(completion.num_tokens for completion in done.values())
        assert sum(yielded) <= 1.05 * kept


def test_what_sglang_would_refuse_or_change_in_a_request_is_no_death(under_test):
    t = under_test
    t.number += 1
    with pytest.raises(ValueError, match="takes 0 .greedy. and 1e-06 or more"):
        t.engine.submit([t.request("cold", [9], temperature=1e-7)])
    for name, params in (
        ("whole", {"top_k": 1 << 40}),
        ("both", {"top_k": 1 << 62, "top_p": 0.5}),
        ("stops", {"stop_token_ids": (5, 1 << 40)}),
    ):
        assert t.run([t.request(name, [9, 8], **params)])[name].finish_reason in ("length", "stop")


def test_the_callers_environment_stays_as_it_was(under_test):
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_a_repetition_penalty_is_refused_because_sglang_leaves_out_the_prompt(under_test):
    with pytest.raises(ValueError, match="repetition_penalty 1.3"):
        under_test.engine.submit([under_test.request("r", [9], repetition_penalty=1.3)])


def test_what_sglang_refuses_is_reported_in_its_words(under_test):
    # Past the checks of `AsyncEngine`: SGLang itself must say no, and be heard.
    backend, loop = under_test.engine._backend, under_test.engine._loop.thread.loop

    async def draw():
        params = SamplingParams(max_new_tokens=4, top_p=3.0, ignore_eos=True)
        async for _ in backend.stream("bad", [9, 8], params, 0, final_only=True):
            pass

    async def bucket():
        memory = SharedBucket(1024)
        try:
            async for path, entries, _ in memory.fill(one_tensor()):
                await backend._call("bucket", path, entries)
        finally:
            memory.close()

    async def one_tensor():
        yield "model.norm.weight", torch.ones(32)

    with pytest.raises(RequestRefused, match="top_p"):
        asyncio.run_coroutine_threadsafe(draw(), loop).result(60)
    with pytest.raises(RuntimeError, match="begin_weight_update"):
        asyncio.run_coroutine_threadsafe(bucket(), loop).result(60)


def test_the_death_of_a_process_is_an_error_here_and_not_our_end(under_test):
    mark = under_test.engine._backend._mark
    scheduler = next(p for p in marked_processes(mark) if "scheduler" in " ".join(psutil.Process(p).cmdline()))
    engine_contract.a_killed_process_ends_the_engine_within_seconds(under_test, scheduler)
    assert not marked_processes(mark)


def test_stages_of_a_pipeline_get_the_same_weights(tmp_path, monkeypatch):
    path = build_tiny_model(tmp_path / "qwen2", "qwen2")
    engine = build(path, engine_args={"pp_size": 2})
    try:
        t = EngineUnderTest(engine, path, MAX_CONTEXT, promises=PROMISES, loads_in_place=False)
        engine_contract.after_each_weight_update_log_probs_are_those_of_the_new_weights(t)
        weights_on_the_device_reach_every_process(t, monkeypatch)
    finally:
        engine.close()
    assert not marked_processes(engine._backend._mark)


def test_two_ranks_share_a_model_with_experts_which_has_a_head_of_its_own(tmp_path, monkeypatch):
    tied = build_tiny_model(tmp_path / "tied", "qwen3_moe")
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        build(tied)
    path = build_tiny_model(tmp_path / "moe", "qwen3_moe", tie_word_embeddings=False)
    engine = build(path, tensor_parallel_size=2, load_format="dummy")
    try:
        t = EngineUnderTest(engine, path, MAX_CONTEXT, promises=PROMISES, loads_in_place=False)
        engine_contract.after_each_weight_update_log_probs_are_those_of_the_new_weights(t)
        weights_on_the_device_reach_every_process(t, monkeypatch)
        engine_contract.truncated_and_penalised_draws_report_the_log_probs_of_that_draw(t)
        engine_contract.responses_on_their_way_go_on_under_new_weights_and_each_token_is_right_under_its_own(t)
    finally:
        engine.close()
    assert not marked_processes(engine._backend._mark)
