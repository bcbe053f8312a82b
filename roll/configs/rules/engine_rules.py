"""Rules about inference engines: their arguments, and keys of the run that they can or can't act on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from roll.configs.catalog.strategy_table import STRATEGIES
from roll.configs.errors import Violation, no_effect
from roll.configs.schema.engine_config import SGLANG_COLDEST, EngineConfig, SglangConfig, VllmConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.worker_config import GeneratingArgs

VLLM_TEMPERATURES = (0.01, 2.0)
"""Lowest and highest temperature that vLLM samples at as it is told."""

_OPTIONS = "actor_infer.strategy_args.strategy_config"


def engine_rules(config: RLConfig) -> Iterator[Violation]:
    """Check `actor_infer` on an engine of its own, or on none."""
    worker = config.actor_infer
    options, name = worker.strategy_args.strategy_config, worker.strategy_args.strategy_name
    if not isinstance(options, EngineConfig):
        if config.engine_restarts > 1:
            expected = f"0 or 1, because nothing replaces {name}: the death of its worker ends the run"
            fix = "remove it, or actor_infer.strategy_args.strategy_name=vllm"
            yield Violation("engine_restarts", expected, fix, config.engine_restarts)
        return
    yield from _arguments(name, options)
    if options.load_format == "dummy" and config.val_only and not config.resume_from_checkpoint:
        expected = "weights to validate: with val_only nothing is trained that could fill in a dummy's"
        yield Violation(f"{_OPTIONS}.load_format", expected, f"{_OPTIONS}.load_format=auto", "dummy")
    if isinstance(options, VllmConfig):
        yield from _vllm_sizes(config, options)
    yield from _sampling(config, options)
    quantised = options.quantization if isinstance(options, VllmConfig) else options.engine_args.get("quantization")
    if quantised and config.verify_weight_sync == "logprob":
        expected = f"off or checksum with quantization {quantised}, which changes log-probs by more than a sync may"
        yield Violation("verify_weight_sync", expected, "verify_weight_sync=checksum", "logprob")


def _arguments(name: str, options: EngineConfig) -> Iterator[Violation]:
    """Arguments that the run sets, that have gone, or that have a key of their own; not whether the engine has them."""
    engine, declared = STRATEGIES[name].project, {spec.name for spec in fields(options)}
    for key, value in options.engine_args.items():
        path = f"{_OPTIONS}.{key}"
        if key in declared:
            why = f" in engine_args: {key} is a key of the section itself"
            yield no_effect(f"{_OPTIONS}.engine_args.{key}", why, f"{path}={value}", value)
        elif key in options.reserved:
            yield no_effect(path, f": the run itself tells {engine}", options.reserved[key], value)
        elif key in options.gone:
            yield Violation(path, f"an argument of {engine}", options.gone[key], value)
    stages = options.engine_args.get(options.pipeline_key, 1)
    if type(stages) is not int or stages < 1:
        yield Violation(f"{_OPTIONS}.{options.pipeline_key}", "a whole number >= 1", "", stages)


def _vllm_sizes(config: RLConfig, options: VllmConfig) -> Iterator[Violation]:
    longest, running = config.max_sequence_length, config.max_running_requests
    if options.max_model_len is not None and options.max_model_len < longest:
        source = "sequence_length" if config.sequence_length else "prompt_length + response_length"
        sums = "" if config.sequence_length else f" = {config.prompt_length} + {config.response_length}"
        expected = f"at least the run's longest sequence, {source}{sums} = {longest} tokens"
        yield Violation(f"{_OPTIONS}.max_model_len", expected, "raise it, or remove it", options.max_model_len)
    if options.max_num_seqs is not None and options.max_num_seqs > running:
        expected = f"at most max_running_requests ({running}), more requests are never sent to an engine"
        yield Violation(f"{_OPTIONS}.max_num_seqs", expected, "raise max_running_requests", options.max_num_seqs)
    budget, decoded = options.max_num_batched_tokens, options.max_num_seqs or running
    if budget is None:
        return
    if budget < decoded:
        source = "max_num_seqs" if options.max_num_seqs else "max_running_requests"
        expected = f"at least {source} ({decoded}): a pass has a token of every response that is decoded"
        yield Violation(f"{_OPTIONS}.max_num_batched_tokens", expected, f"raise it, or lower {source}", budget)
    length = options.max_model_len or longest
    if options.engine_args.get("enable_chunked_prefill") is False and budget < length:
        expected = f"at least the longest sequence, {length} tokens, because enable_chunked_prefill is false"
        yield Violation(f"{_OPTIONS}.max_num_batched_tokens", expected, "raise it", budget)


def _sampling(config: RLConfig, options: EngineConfig) -> Iterator[Violation]:
    """Refuse what an engine can't draw from, in training and in validation."""
    sections = {"actor_infer.generating_args": config.actor_infer.generating_args}
    if config.validation_sampling is not None:
        path, args = config.validation_sampling
        sections[path] = args
    for path, args in sections.items():
        if isinstance(options, SglangConfig) and args.repetition_penalty != 1:
            expected = "1 with sglang, which penalises sampled tokens only and not those of the prompt as others do"
            fix = "remove it, or actor_infer.strategy_args.strategy_name=vllm"
            yield Violation(f"{path}.repetition_penalty", expected, fix, args.repetition_penalty)
        yield from _temperatures(options, path, args)


def _temperatures(options: EngineConfig, path: str, args: GeneratingArgs) -> Iterator[Violation]:
    for key in ("temperature", "fire_temperature"):
        value = getattr(args, key)
        if not value:
            continue
        low, high = VLLM_TEMPERATURES
        fix = f"{path}.temperature=1" if key == "temperature" else "remove it, or lower it"
        if isinstance(options, VllmConfig) and not low <= value <= high:
            zero = "0 (greedy), or " if key == "temperature" else ""
            expected = f"{zero}{low:g} to {high:g}: vLLM would sample at another temperature than it is told"
            yield Violation(f"{path}.{key}", expected, fix, value)
        if isinstance(options, SglangConfig) and value < SGLANG_COLDEST:
            expected = f"0 (greedy), or {SGLANG_COLDEST:g} and more: below SGLang is greedy, and its log-probs aren't"
            yield Violation(f"{path}.{key}", expected, fix, value)
