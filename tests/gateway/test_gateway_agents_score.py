"""What agents give as a score, and where they are served: what is wrong is said with the way out."""

from __future__ import annotations

import asyncio
import socket

import pytest

from roll.envs.env_registry import EnvLoadError, load_env
from roll.gateway.agents.score import ScoreError, score_of
from roll.gateway.server import Gateway


def test_a_text_as_a_score_names_what_scores_texts():
    with pytest.raises(ScoreError, match=r"is 'forty', expected a number.*; a text is scored by .*`score: reward`"):
        score_of("forty", "what the agent's function returned")


def test_a_port_in_use_asks_for_another():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"can't listen at 127.0.0.1:{port}: .* in use; name another port"):
            asyncio.run(Gateway(host="127.0.0.1", port=port).start())


def test_a_misspelt_endpoint_is_recognised_among_the_environments():
    with pytest.raises(EnvLoadError, match="no environment 'endpointt'; did you mean 'endpoint'"):
        load_env("endpointt")
    with pytest.raises(EnvLoadError, match="endpoint stands for an agent.*val_only=true"):
        load_env("endpoint")
