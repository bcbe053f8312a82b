"""The agents of a run of `pipeline: agentic`: kinds of environments with `env_type: endpoint`."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.agents_config import AgentEnv
from roll.rewards.base import RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.rollout.agent import Agent
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.episode_slots import EpisodeSlots
from roll.types.metrics import Metrics
from roll.utils.readers import read_rows
from roll.utils.rows import DataError, Source

if TYPE_CHECKING:  # what makes them is imported where there are agents
    from roll.gateway.agents.agent_endpoint import RunEndpoint
    from roll.gateway.agents.agent_episodes import EndpointRollout, MakeSession


def read_tasks(tag: str, env: AgentEnv) -> tuple[Mapping[str, Any], ...]:
    """Return the tasks of a tag's file, if it has one. Raises `DataError` naming the key, the file and the line."""
    if env.tasks is None:
        return ()
    file, key = Path(env.tasks).expanduser(), f"custom_envs.{tag}.env_config.tasks"
    if not file.is_file():
        raise DataError(f"{key}: there is no file {str(file)!r} (looked from {str(Path.cwd())!r})")
    rows = []
    for row in read_rows(Source(file.stem, str(file), "jsonl")):
        try:
            json.dumps(row.values)
        except (TypeError, ValueError) as error:
            raise DataError(f"{key}: {row.where}: {error}") from None
        rows.append(dict(row.values))
    if not rows:
        raise DataError(f"{key}: {file} has no tasks; expected an object of JSON on each line")
    return tuple(rows)


logger = logging.getLogger(__name__)

COUNTED = tuple(f"agent/{name}" for name in ("episodes", "calls", "spent", "never_called", "crashes", "timeouts"))


class RunAgents:
    """Who plays the episodes of the tags with `env_type: endpoint`.

    Raises:
        ValueError: a file of tasks can't be read, or the chat template doesn't fit.
    """

    def __init__(self, config: AgenticConfig, tokenizer: Any, tags: Collection[str]) -> None:
        self.envs: dict[str, AgentEnv] = {
            tag: env for tag in tags if (env := config.custom_envs[tag].agent) is not None
        }
        self.rows = {tag: read_tasks(tag, env) for tag, env in self.envs.items()}
        self._config, self._tokenizer = config, tokenizer
        self._endpoint: RunEndpoint | None = None
        self._counters: Counter[str] = Counter()
        self._slots: dict[str, EpisodeSlots | None] = {}
        self._rewards = {tag: self._reward_pool(tag, env) for tag, env in self.envs.items() if env.reward is not None}

    @staticmethod
    def _reward_pool(tag: str, env: AgentEnv) -> RewardPool:
        assert env.reward is not None
        key = f"custom_envs.{tag}.env_config.reward.name"
        spec = RewardSpec(name=env.reward.name, kwargs=env.reward.reward_kwargs, key=key)
        return RewardPool({tag: spec}, num_processes=env.reward.world_size, timeout_s=env.reward.timeout_s)

    def wait_ready(self) -> None:
        """Wait until reward functions are loaded; raises `RewardLoadError`."""
        for pool in self._rewards.values():
            pool.wait_ready()

    def rollouts(self, driver: EngineDriver, agents: Mapping[str, Agent]) -> dict[str, EndpointRollout]:
        """Return what plays the episodes of the tags that programs play, of those that there is an agent for."""
        if self._endpoint is None and self.envs:
            from roll.gateway.agents.agent_endpoint import RunEndpoint

            self._endpoint = RunEndpoint(self._config.gateway, self.envs, self._config.output_path, driver)
        return {tag: self._rollout(tag, driver, agent) for tag, agent in agents.items() if tag in self.envs}

    def _rollout(self, tag: str, driver: EngineDriver, agent: Agent) -> EndpointRollout:
        from roll.gateway.agents.agent_episodes import EndpointRollout

        env = self.envs[tag]
        assert self._endpoint is not None
        if tag not in self._slots:  # training and validation share them
            self._slots[tag] = None if env.max_agents is None else EpisodeSlots(driver, env.max_agents)
        slots = self._slots[tag]

        def held(episode: str) -> AbstractAsyncContextManager[None]:
            return nullcontext() if slots is None else slots.acquire(episode)

        return EndpointRollout(
            tag,
            env,
            self._endpoint,
            make_session=self._sessions(tag, agent),
            slots=held,
            log_folder=self._config.logging_path / "agents",
            submit_reward=self._rewards[tag].submit if tag in self._rewards else None,
            counters=self._counters,
        )

    def _sessions(self, tag: str, agent: Agent) -> MakeSession:
        from roll.gateway.agents.sessions import session_maker

        tags = self._config.custom_envs[tag].thinking_tags
        assert self._endpoint is not None
        models = self._endpoint.models[tag]
        return session_maker(self.envs[tag], agent, self._tokenizer, thinking_tags=tags, models=models)

    def take_metrics(self) -> Metrics:
        """Return what has happened to agents since the last call; nothing without any."""
        metrics = Metrics()
        for name in COUNTED if self.envs else ():
            metrics.add_sum(name, self._counters.pop(name, 0))
        return metrics

    def stop(self, driver: EngineDriver) -> None:
        """End the agents and the endpoint, in the engines' event loop."""
        if self._endpoint is None:
            return
        try:
            driver.run(self._endpoint.stop())
        except Exception as error:  # noqa: BLE001 - the run is over, and what it was is worth more than this
            logger.warning("the endpoint's end failed: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """End the processes of reward functions."""
        for pool in self._rewards.values():
            pool.shutdown()
