"""Small passes of `hf_infer` run on one thread, large ones on all, and nothing else in the process notices."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from tiny_models import build_tiny_model
from torch import nn

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.hf import compute_threads as threads
from roll.strategies.engines.hf.compute_threads import ForwardThreads
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.training.pretrained import load_causal_lm

# 64 * 64 and 64 * 192 weights: 8 Ki in the average matrix, so 1,024 tokens are 8 Mi multiplications.
SMALL = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 192, bias=False))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_pass_is_shared_when_its_average_product_has_more_than_eight_million_multiplications():
    sizes = ForwardThreads(SMALL)
    assert not sizes.shares(1024)
    assert sizes.shares(1025)


def test_a_large_matrix_is_shared_for_a_single_token_because_reading_it_takes_long():
    # 1,024 * 1,025 weights, read in the time of 8 multiplications each.
    assert ForwardThreads(nn.Linear(1024, 1025, bias=False)).shares(1)
    assert not ForwardThreads(nn.Linear(1024, 1024, bias=False)).shares(1)


def test_an_accelerator_is_left_alone():
    assert ForwardThreads(nn.Linear(8, 8, device="meta")).shares(1)


def test_only_the_thread_of_a_small_pass_computes_alone_and_it_gets_its_threads_back(two_threads):
    elsewhere = []
    with ForwardThreads(SMALL).of(1):
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert elsewhere == [2]
    assert torch.get_num_threads() == 2
    with ForwardThreads(SMALL).of(1025):
        assert torch.get_num_threads() == 2


def test_a_small_pass_that_fails_gives_its_threads_back(two_threads):
    with pytest.raises(FloatingPointError), ForwardThreads(SMALL).of(1):
        raise FloatingPointError
    assert torch.get_num_threads() == 2


def test_a_torch_without_openmp_keeps_its_threads(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "_limit", lambda: None)
    with ForwardThreads(SMALL).of(1):
        assert torch.get_num_threads() == 2


def test_large_operators_of_a_small_pass_get_all_threads(two_threads):
    # 8 Ki weights: from 257 tokens a product has more than 2 Mi multiplications.
    for tokens, expected in ((256, 1), (257, 2)):
        with ForwardThreads(SMALL).of(tokens) as large:
            with large:
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 1
            with contextlib.suppress(FloatingPointError), large:
                raise FloatingPointError
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    with ForwardThreads(SMALL).of(1025) as large, large:
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("through_transformers", [False, True])
def test_hf_infer_decodes_a_small_model_on_one_thread(tmp_path, two_threads, through_transformers, monkeypatch):
    model = load_causal_lm(ModelArgs(model_name_or_path=str(build_tiny_model(tmp_path))), torch.float32)
    engine = HfInfer(model, eos_token_ids=(), pad_token_id=0, max_running_requests=2, max_context=200)
    if through_transformers:
        engine._decode_step = None
    seen = []
    for name in ("_prefilled", "_forward_rows"):
        compute = getattr(engine, name)

        def watched(*args, compute=compute):
            seen.append(torch.get_num_threads())
            return compute(*args)

        monkeypatch.setattr(engine, name, watched)
    params = SamplingParams(max_new_tokens=3)
    engine.submit([Request(id="a", prompt_ids=(5, 6, 7), params=params, seed=1)])
    assert len(engine.poll(5)) == 1
    assert seen == [1, 1, 1]
    assert torch.get_num_threads() == 2


def test_the_head_of_a_small_decode_step_gets_all_threads_and_gives_the_same_bits(tmp_path, two_threads, monkeypatch):
    model = load_causal_lm(ModelArgs(model_name_or_path=str(build_tiny_model(tmp_path))), torch.float32)

    def responses(shared_from: int):
        # 2 Mi multiplications pay for another thread among small operators; no product of this model has as many.
        monkeypatch.setattr(threads, "_WORTH_SHARING_ALONE", shared_from)
        engine = HfInfer(model, eos_token_ids=(), pad_token_id=0, max_running_requests=2, max_context=200)
        head, seen = engine._decode_step._head, []

        class Watched:
            def __call__(self, hidden):
                seen.append(torch.get_num_threads())
                return head(hidden)

        engine._decode_step._head = Watched()
        engine.submit([Request(id="a", prompt_ids=(5, 6, 7), params=SamplingParams(max_new_tokens=4), seed=1)])
        (done,) = engine.poll(6)
        return seen, done.token_ids, done.logprobs

    alone, shared = responses(2 << 20), responses(0)
    assert alone[0] == [1, 1, 1]
    assert shared[0] == [2, 2, 2]
    assert shared[1:] == alone[1:]
