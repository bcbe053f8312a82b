"""Megatron's CUDA calls mean the CPU inside the platform block, and nothing has changed after it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from roll.strategies.megatron.platform import _stand_ins, cpu_platform

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the platform is for machines without one")


def attributes():
    """Everything that the platform touches, as it is now."""
    return [(owner, name, owner.__dict__.get(name)) for owner, name, _ in _stand_ins()]


def test_cuda_means_the_cpu_inside():
    with cpu_platform():
        tensors = [
            torch.zeros(2, device="cuda"),
            torch.tensor(1.0, device=torch.device("cuda", 0), pin_memory=True),
            torch.empty(3, device=torch.cuda.current_device()),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(device="cuda"),
        ]
        assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_all_attributes_return_after_nested_blocks_and_exceptions():
    before = attributes()
    with cpu_platform(), cpu_platform():
        assert attributes() != before
    assert attributes() == before
    with pytest.raises(RuntimeError, match="broken"), cpu_platform():
        raise RuntimeError("broken")
    assert attributes() == before
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_a_block_in_another_thread_keeps_the_stand_ins_until_it_ends():
    before, inside, leave = attributes(), threading.Event(), threading.Event()

    def other():
        with cpu_platform():
            inside.set()
            leave.wait(10)
            assert torch.zeros(1, device="cuda").device.type == "cpu"

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with cpu_platform():
        pass
    assert torch.cuda.current_device() == torch.device("cpu")
    # The device keyword is a matter of the thread that opened the block.
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    leave.set()
    thread.join(10)
    assert attributes() == before


def test_the_generator_state_is_that_of_the_cpu():
    from megatron.core.tensor_parallel import random

    with cpu_platform():
        torch.cuda.manual_seed(5)
        state = random._get_cuda_rng_state()
        first = torch.rand(3)
        random._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


def _uneven_exchange(info):
    import numpy as np

    from roll.distributed.process_group import init_process_group

    init_process_group(info, "gloo")
    with cpu_platform():
        sent = torch.arange(3.0) + 10 * info.rank
        received = torch.empty(2 if info.rank == 0 else 4)
        splits = np.array([1, 2])
        dist.all_to_all_single(received, sent, torch.tensor([1, 1]) * (1 + info.rank), splits)
    return received.tolist()


def test_uneven_exchanges_take_numpy_and_tensor_splits(ranks):
    assert ranks.run(_uneven_exchange, 2) == [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]]
