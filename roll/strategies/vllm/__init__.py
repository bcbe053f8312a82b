"""vLLM as an inference engine. Importing this package loads neither vLLM nor torch; `build` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from roll.configs.base import ModelArgs
    from roll.configs.engines import VllmConfig
    from roll.strategies.base import InferEngine


def build(
    args: ModelArgs,
    options: VllmConfig,
    *,
    max_running_requests: int,
    max_sequence_length: int,
    seed: int,
    partial_rollout: Literal["resume", "restart"],
    slots: Sequence[int] = (),
    update_buffer_bytes: int,
) -> InferEngine:
    """Start one engine with its processes; blocks until it can take requests.

    Args:
        args: the model.
        options: of this engine.
        max_running_requests: default of `options.max_num_seqs`.
        max_sequence_length: longest prompt plus response of the run; default of `options.max_model_len`.
        seed: of the engine; each request has its own, so it matters for nothing but `load_format: dummy`.
        partial_rollout: what a weight update does to responses on their way.
        slots: device slots of the rank that holds the engine, for its name in messages.
        update_buffer_bytes: host memory through which weights go to the engine's processes.

    Raises:
        ValueError: vLLM isn't installed or refuses an option.
        EngineDied: the engine didn't come up.
    """
    from roll.strategies.vllm.engine import build_engine

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
