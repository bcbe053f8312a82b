"""Megatron-core on a machine without an accelerator, or without Transformer Engine.

Megatron names the CUDA device in a few places of an otherwise device-free code. Without an accelerator `cpu_platform`
lets these mean the CPU, while the block runs and no longer: it is the only place that changes other packages.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from roll.strategies.megatron.megatron_releases import cpu_replacements

_CPU = torch.device("cpu")


class _Stream:
    """Stands for a CUDA stream or event: on the CPU everything has happened when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        del stream

    wait_stream = wait_event = record = synchronize = wait


_THE_STREAM = _Stream()


class _CpuDevice(TorchFunctionMode):
    """`device="cuda"`, `Tensor.cuda()` and the names of CUDA tensor types mean the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda or func is Tensor.record_stream:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by these names.
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            # Pinned memory is for copies to the device.
            kwargs = {**kwargs, "device": _CPU, **({"pin_memory": False} if "pin_memory" in kwargs else {})}
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _null_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    del args, kwargs
    return contextlib.nullcontext()


def _backward(tensors: Any, grad_tensors: Any = None) -> None:
    """Run torch's own function, which puts function modes aside while it runs; layers may be recomputed in there."""
    outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    grads = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, Tensor) else tuple(grad_tensors)
    grads = tuple(torch.ones_like(o) if g is None else g for o, g in zip(outputs, grads, strict=True))
    torch.autograd.Variable._execution_engine.run_backward(
        outputs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _with_plain_ints(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for plain integers: gloo refuses the numpy ones that the expert dispatcher splits by."""

    def all_to_all_single(
        output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        splits = (None if s is None else [int(n) for n in s] for s in (output_split_sizes, input_split_sizes))
        return exchange(output, input, *splits, **kwargs)

    return all_to_all_single


def _gathered_unevenly(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Gather uneven parts with gloo, which gathers equal ones only; the expert dispatcher's ranks differ in tokens."""

    def all_gather(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if all(output.shape == tensor.shape for output in outputs):
            return gather(outputs, tensor, group, async_op)
        longest = max(len(output) for output in outputs)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in outputs]
        gather(parts, padded, group)
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part[: len(output)])
        return None

    return all_gather


def _scattered_unevenly(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Give every rank the sum of its part, the reverse of gathering."""

    def reduce_scatter(output: Tensor, inputs: list[Tensor], *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if all(part.shape == output.shape for part in inputs):
            return scatter(output, inputs, *args, group=group, **kwargs)
        summed = torch.cat(list(inputs))
        dist.all_reduce(summed, group=group)
        output.copy_(summed.split([len(part) for part in inputs])[dist.get_rank(group)])
        return None

    return reduce_scatter


class _NoFp8:
    """What Transformer Engine's manager says where nothing is computed in 8 bits."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _missing_names() -> list[tuple[Any, str, Any]]:
    """Return names that Megatron looks up without Transformer Engine too, but only defines with it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

    names: list[tuple[Any, str, Any]] = [
        (moe_utils, "te_general_gemm", None),
        (random, "FP8GlobalStateManager", _NoFp8),
        (random, "activation_recompute_forward", _null_context),
        (random, "fp8_autocast", _null_context),
    ]
    return [entry for entry in names if not hasattr(entry[0], entry[1])]


def _cpu_stand_ins() -> list[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import random

    def get_rng_state(*_: Any, **__: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(new_state)

    cuda: dict[str, Any] = {
        "current_device": lambda: _CPU,
        **dict.fromkeys(("Stream", "Event"), _Stream),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_, **__: _THE_STREAM),
        **dict.fromkeys(("synchronize", "empty_cache"), lambda *_, **__: None),
        "stream": _null_context,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
    }
    replaced: list[tuple[Any, str, Any]] = [(torch.cuda, name, stand_in) for name, stand_in in cuda.items()]
    replaced += [
        (random, "_get_cuda_rng_state", get_rng_state),
        (random, "_set_cuda_rng_state", set_rng_state),
        (torch.autograd, "backward", _backward),
        *cpu_replacements(random),
        (dist, "all_to_all_single", _with_plain_ints(dist.all_to_all_single)),
        (dist, "all_gather", _gathered_unevenly(dist.all_gather)),
        (dist, "reduce_scatter", _scattered_unevenly(dist.reduce_scatter)),
    ]
    return replaced


def _stand_ins() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, stand-in) of everything that is replaced on this machine."""
    return _missing_names() + ([] if torch.cuda.is_available() else _cpu_stand_ins())


_lock = threading.Lock()
_users = 0
_changes = contextlib.ExitStack()
_here = threading.local()  # has `open` while a block of this thread is open


def _install() -> None:
    global _users
    with _lock:
        if _users == 0:
            for owner, name, stand_in in _stand_ins():
                if name in owner.__dict__:
                    _changes.callback(setattr, owner, name, owner.__dict__[name])
                else:
                    _changes.callback(delattr, owner, name)
                setattr(owner, name, stand_in)
            if not torch.cuda.is_available():
                # Megatron decorates small functions with torch.compile; the C++ compiler takes 15 s for the first one.
                _changes.enter_context(torch.compiler.set_stance("force_eager"))
        _users += 1


def _remove() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _changes.close()


@contextlib.contextmanager
def cpu_platform() -> Iterator[None]:
    """Let Megatron run, while it is open, without Transformer Engine, and without an accelerator on the CPU.

    May be nested and opened from several threads. When the last block ends, all attributes are the ones from before.
    """
    if hasattr(_here, "open"):
        yield
        return
    _install()
    _here.open = True
    try:
        with contextlib.nullcontext() if torch.cuda.is_available() else _CpuDevice():
            yield
    finally:
        del _here.open
        _remove()
