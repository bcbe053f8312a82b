"""SGLang as an inference engine. Importing this package loads neither SGLang nor torch; `build` does.

    AsyncEngine -> SglangBackend (engine.py) -> socket (channel.py) -> host.py, a process with `sgl.Engine` -> SGLang's
    scheduler and detokenizer processes

SGLang answers the death of one of its processes by killing the process that called it and everything below. So the
caller is a process of its own, and its end is `EngineDied` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from roll.configs.base import ModelArgs
    from roll.configs.engines import SglangConfig
    from roll.strategies.base import InferEngine


def build(
    args: ModelArgs,
    options: SglangConfig,
    *,
    max_running_requests: int,
    max_sequence_length: int,
    seed: int,
    partial_rollout: Literal["resume", "restart"],
    slots: tuple[int, ...] = (),
    update_buffer_bytes: int = 256 << 20,
) -> InferEngine:
    """Start one engine with its processes; blocks until it can take requests.

    Args:
        args: the model.
        options: of this engine.
        max_running_requests: responses that are decoded at once.
        max_sequence_length: longest prompt plus response of the run.
        seed: of the engine's sampling. SGLang ignores the key that each response has.
        partial_rollout: what a weight update does to responses on their way.
        slots: device slots of the rank that holds the engine, for its name in messages.
        update_buffer_bytes: host memory through which weights go to the engine's processes.

    Raises:
        ValueError: SGLang isn't installed, or the model can't be described.
        EngineDied: the engine didn't come up.
    """
    from roll.strategies.sglang.engine import build_engine

    return build_engine(
        args,
        options,
        max_running_requests=max_running_requests,
        max_sequence_length=max_sequence_length,
        seed=seed,
        partial_rollout=partial_rollout,
        slots=slots,
        update_buffer_bytes=update_buffer_bytes,
    )
