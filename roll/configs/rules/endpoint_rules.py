"""Rules about services that a run asks, whatever for. Each yields what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from urllib.parse import urlsplit

from roll.configs.errors import NO_VALUE, Violation, no_effect
from roll.configs.schema.distill_args import TeacherConfig
from roll.configs.schema.engine_config import EndpointConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.sft_config import SFTConfig

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_TOKENIZER = ("model_name_or_path", "trust_remote_code", "model_config_kwargs")
"""Keys of `model_args` that act where the weights are elsewhere: the tokenizer and config.json are read here."""
_ACTING = ("model_args", "strategy_args", "tags", "device_mapping", "world_size", "num_gpus_per_worker", "system_envs")
"""Keys of a teacher that act wherever its weights are."""


def endpoint_rules(path: str, endpoint: str, model: str | None, variable: str | None) -> Iterator[Violation]:
    """Check the address, the model's name and the variable of the key, which stand below `path`."""
    fix = f"{path}.endpoint=http://localhost:8000/v1"
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound, parts = False, urlsplit("")
    if not sound:
        yield Violation(f"{path}.endpoint", "an address such as http://host:8000/v1", fix, endpoint)
    elif parts.username or parts.password or parts.query or parts.fragment:
        # Not shown: what stands there may be a key.
        expected = f"an address without user, password, ? or #: keys belong in {path}.api_key_env's variable"
        yield Violation(f"{path}.endpoint", expected, fix, NO_VALUE)
    if not model:
        yield Violation(f"{path}.model", "the model's name at the endpoint", f"{path}.model=<name>", model)
    if variable is not None and not _VARIABLE.fullmatch(variable):
        expected = "the name of an environment variable, never the key itself"
        yield Violation(
            f"{path}.api_key_env", expected, f"{path}.api_key_env=OPENAI_API_KEY, and export that", NO_VALUE
        )


def endpoint_teacher_rules(config: RLConfig | SFTConfig) -> Iterator[Violation]:
    """Teachers behind services: what these can't tell, and keys that act on weights that are here."""
    for role, worker in config.sections.items():
        options = worker.strategy_args.strategy_config
        if not isinstance(worker, TeacherConfig) or not isinstance(options, EndpointConfig):
            continue
        path = f"{role}.strategy_args.strategy_config"
        if options.endpoint is None:
            fix = f"{path}={{endpoint: http://localhost:8000/v1, model: <name>}}"
            yield Violation(f"{path}.endpoint", "the address of the service", fix, None)
        else:
            yield from endpoint_rules(path, options.endpoint, options.model, options.api_key_env)
        if config.temperature != 1:
            expected = "1 with a teacher behind a service, which tells log-probs at temperature 1"
            key = "actor_infer.generating_args.temperature"
            yield Violation(key, expected, f"{key}=1, or a teacher with weights here", config.temperature)
        if config.distill.top_k is None and (not isinstance(config, RLConfig) or config.teacher_loss):
            expected = "a number: no service tells the log-probs of all tokens"
            yield Violation("distill.top_k", expected, "distill.top_k=20", None)
        yield from _idle_keys(role, worker)


def _idle_keys(role: str, worker: TeacherConfig) -> Iterator[Violation]:
    plain = TeacherConfig()
    sections = (
        (role, worker, plain, _ACTING),
        (f"{role}.model_args", worker.model_args, plain.model_args, _OF_TOKENIZER),
    )
    for path, section, default, acting in sections:
        for spec in fields(section):  # type: ignore[arg-type]
            value = getattr(section, spec.name)
            if spec.name not in acting and value != getattr(default, spec.name):
                yield no_effect(f"{path}.{spec.name}", "the model's weights are behind the service", value=value)
