"""Whether endpoints are there, and their keys: notes of `roll check`, because a service may start later."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.engine_config import EndpointConfig
from roll.configs.schema.judge_config import JUDGE
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.utils.json_service import key_in, why_unreachable


def endpoint_notes(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield what the run would be refused for if it started now."""
    for path, endpoint, variable in _endpoints(config):
        if key_in(environ, variable) is None:
            yield f"{path}.api_key_env: the environment variable {variable} is not set here; export it for the run"
        why = why_unreachable(endpoint)
        if why is not None:
            yield f"{path}.endpoint: {why}; start the service before the run, or correct the address"


def _endpoints(config: RunConfig) -> Iterator[tuple[str, str, str | None]]:
    """Yield (path of its section, address, variable of its key) of each endpoint that the run will ask."""
    judge = config.judge if isinstance(config, RLVRConfig) and config.domains_of(JUDGE) else None
    if judge is not None and judge.endpoint is not None:
        yield "judge", judge.endpoint, judge.api_key_env
    for tag, env in config.custom_envs.items() if isinstance(config, AgenticConfig) else ():
        for role, role_config in env.roles.items():
            if role_config.endpoint is not None:
                yield f"custom_envs.{tag}.roles.{role}", role_config.endpoint, role_config.api_key_env
    for i, user in enumerate(config.interactions if isinstance(config, RLVRConfig) else ()):
        if user.endpoint is not None:
            yield f"interactions[{i}]", user.endpoint, user.api_key_env
    for role, worker in config.roles.items():
        options = worker.strategy_args.strategy_config
        if isinstance(options, EndpointConfig) and options.endpoint is not None:
            yield f"{role}.strategy_args.strategy_config", options.endpoint, options.api_key_env
