"""Whether a judge's endpoint is there, and its key: notes of `roll check`, because the service may start later."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from roll.configs.schema.judge_config import JUDGE
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig

_PROBE_SECONDS = 2.0


def why_unreachable(endpoint: str, timeout: float = _PROBE_SECONDS) -> str | None:
    """Return why nothing listens at the endpoint's address, or None. Sends nothing."""
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=timeout).close()
    except OSError as error:
        return f"{parts.hostname}:{port} can't be reached: {error.strerror or error}"
    return None


def judge_notes(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What the run would be refused for if it started now."""
    if not isinstance(config, RLVRConfig) or config.judge is None or not config.domains_of(JUDGE):
        return
    judge = config.judge
    if judge.endpoint is None:
        return
    if judge.api_key_env is not None and not environ.get(judge.api_key_env, "").strip():
        yield f"judge.api_key_env: the environment variable {judge.api_key_env} is not set here; export it for the run"
    why = why_unreachable(judge.endpoint)
    if why is not None:
        yield f"judge.endpoint: {why}; start the service before the run, or correct the address"
