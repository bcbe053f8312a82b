"""The first look at whether the trainer's model gives what the engines sample the same log-probs.

    engines  sample a few tokens behind two short prompts at once, so that one of them is padded where engines pad
    trainer  scores them
    compare  a difference larger than rounding ends the run

Once under the weights that the run begins with, which every engine has just loaded anew, and once under the first
weights that were trained: an engine that keeps the old ones is right before. A sync that is broken later is a matter of
`verify_weight_sync`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from roll.configs.schema.engine_config import SglangConfig, VllmConfig
from roll.configs.schema.rl_config import RLConfig
from roll.distributed.weights import WeightSyncError
from roll.distributed.worker import Worker
from roll.distributed.worker_errors import WorkerFailed
from roll.pipelines.rl.sync_probe import ProbeSample, probe_requests, sampled_and_scored
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.workers.engine_probe import EngineBusy

logger = logging.getLogger(__name__)

_TEXTS = ("The first letters of the alphabet are a, b, c,", "One, two")
_PROMPT_TOKENS = (8, 3)
_NEW_TOKENS = 12
_BUSY_TIMEOUT_S = 120.0  # while responses are under way, as ahead of training, an engine may have no place for others


class _Bounds(NamedTuple):
    """Nats by which log-probs of the same token may differ."""

    mean: float
    """Over the tokens of a response."""
    most: float
    """Of one token. Half precision may send a token to another expert: then it can be anything."""


_ANY = float("inf")
_SMALL = 2 * 32  # layers x hidden size of a model for which the numbers of fp32 are meant
_LARGE = 50.0  # times more where the model's size isn't known here
_ROUNDING = {"fp32": _Bounds(2e-5, 1e-4), "fp16": _Bounds(0.05, _ANY), "bf16": _Bounds(0.2, _ANY)}
"""By the coarsest dtype of trainer and engine."""
_ON_ACCELERATORS = _Bounds(0.02, _ANY)  # fp32 there: kernels may multiply in TF32
_QUANTISED = _Bounds(1.0, _ANY)
_OF_CACHES = {
    "auto": "fp32", "float32": "fp32", "float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
}  # fmt: skip
"""The engines' `kv_cache_dtype`, by what its rounding is at least; any other value is a quantised cache."""


def check_engines(config: RLConfig, clusters: Clusters, tokenizer: Any, version: int) -> None:
    """Compare the log-probs of a few tokens, of every engine with the trainer's.

    Raises `WeightSyncError` where they differ by more than rounding. With `train_infer_correction`, by which a run
    means to train on what another distribution has sampled, it is a warning.
    """
    lengths = tuple(max(1, min(length, config.max_sequence_length - _NEW_TOKENS)) for length in _PROMPT_TOKENS)
    tokens = min(_NEW_TOKENS, config.max_sequence_length - max(lengths))
    if tokens < 1:
        return
    requests = probe_requests(config, tokenizer, "check", version, list(zip(_TEXTS, lengths, strict=True)), tokens)
    bounds = _bounds(config, on_cpu=clusters.actor_train.call_rank(0, Worker.device) == "cpu")
    try:
        by_engine = sampled_and_scored(clusters, requests, version, _BUSY_TIMEOUT_S)
    except WorkerFailed as error:
        if error.type_name != EngineBusy.__name__:
            raise
        logger.warning("engines and trainer weren't compared under weights of version %d: %s", version, error)
        return
    for rank, samples in enumerate(by_engine):
        differences = torch.stack([(sample.mine - sample.theirs).abs() for sample in samples])
        mean, most = float(differences.mean(-1).max()), float(differences.max())
        if mean <= bounds.mean and most <= bounds.most:  # false for what isn't a number
            continue
        text = _message(config, rank, version, samples, mean, most, bounds)
        if config.train_infer_correction is None:
            raise WeightSyncError(text)
        logger.warning(text)


def _bounds(config: RLConfig, *, on_cpu: bool) -> _Bounds:
    """Return what rounding may do. A temperature below 1 makes every difference of logits larger; that of fp32 grows
    with the square root of how many numbers are added up one after the other."""
    options = config.actor_infer.strategy_args.strategy_config
    args = options.engine_args if isinstance(options, SglangConfig | VllmConfig) else {}
    cache = _OF_CACHES.get(str(args.get("kv_cache_dtype") or "auto"))
    quantised = isinstance(options, VllmConfig) and options.quantization is not None
    quantised |= bool(args.get("quantization")) or cache is None
    dtypes = (config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype, cache)
    bounds = [_ROUNDING[dtype] for dtype in dtypes if dtype not in ("fp32", None)]
    larger, exact = _growth(_model_config(config)), _ROUNDING["fp32"]
    bounds.append(_Bounds(larger * exact.mean, larger * exact.most))
    if not on_cpu:
        bounds.append(_ON_ACCELERATORS)
    if quantised:
        bounds.append(_QUANTISED)
    wider = max(1.0, 1 / config.temperature) if config.temperature else 1.0
    return _Bounds(wider * max(b.mean for b in bounds), wider * max(b.most for b in bounds))


def _message(
    config: RLConfig, rank: int, version: int, samples: Sequence[ProbeSample], mean: float, most: float, bounds: _Bounds
) -> str:
    worst = max(samples, key=lambda sample: float((sample.mine - sample.theirs).abs().max()))
    engine = config.actor_infer.strategy_args.strategy_name
    model_type = _model_config(config).get("model_type", str(config.model_path("actor_infer")))
    dtypes = f"{config.actor_train.model_args.dtype} and {config.actor_infer.model_args.dtype}"
    return (
        f"actor_infer rank {rank} ({engine}) and actor_train give what was just sampled under weights of version "
        f"{version} different log-probs, model type {model_type!r}: by {mean:.3g} nats in the mean and "
        f"{most:.3g} at most, rounding explains {bounds.mean:.3g} (dtypes {dtypes}). For tokens "
        f"{list(worst.token_ids)} after {list(worst.prompt_ids)} the engine says {_rounded(worst.mine)}, the trainer "
        f"{_rounded(worst.theirs)}. Training would be on another policy than the one that samples. Either the engine "
        "computes this model otherwise than transformers does, or it hasn't loaded the weights that it was sent: try "
        "another engine (actor_infer.strategy_args.strategy_name), and verify_weight_sync=checksum. To train on it "
        "all the same set train_infer_correction"
    )


def _model_config(config: RLConfig) -> dict[str, Any]:
    """Return the model's config.json; empty where there is none on this machine."""
    try:
        text = (Path(config.model_path("actor_infer")).expanduser() / "config.json").read_text(encoding="utf-8")
        tree = json.loads(text)
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _growth(described: dict[str, Any]) -> float:
    text = described.get("text_config") or described
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    width = text.get("hidden_size", text.get("n_embd"))
    if not isinstance(layers, int) or not isinstance(width, int):
        return _LARGE
    return max(1.0, math.sqrt(layers * width / _SMALL))


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
