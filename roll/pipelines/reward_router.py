"""Who scores a response: the processes of its domain's reward function, the reward model, or both by stated weights.

Everything is behind one `submit`: a request in, a future of its result out.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from roll.configs.schema.reward_config import REWARD_MODEL, RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.rewards.base import Reward, RewardRequest, RewardResult, RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.workers.reward import PART, TRUNCATED_PART, RewardModelClient

RULE_PART = "rule"  # A combined score's part: what the reward function gave, unweighted


def reward_spec(config: RLVRConfig, domain: str) -> RewardSpec:
    """Return which function scores a domain."""
    reward = config.rewards[domain]
    name, kwargs, key = reward.name, reward.reward_kwargs, f"rewards.{domain}.name"
    if reward.name == "custom":
        custom = config.custom_reward_function
        assert custom is not None, "configuration checks make sure that there is one"
        kwargs = {**custom.reward_kwargs, **reward.reward_kwargs}
        name, key = f"{custom.path}:{custom.name}", "custom_reward_function"
    return RewardSpec(
        name=name,
        kwargs=kwargs,
        key=key,
        sandbox=config.sandbox,
        environment=config.reward_env,
        concurrency=reward.concurrency,
    )


class RewardRouter:
    """The score of every domain: `submit` asks whom the configuration names.

    Starts a pool of processes for each domain with a reward function, without waiting; a context manager that ends
    them.
    """

    def __init__(self, config: RLVRConfig) -> None:
        self.model: RewardModelClient | None = None
        """Scores what the reward model scores; set when its cluster stands."""
        self._rewards = config.rewards
        self._pools = {
            domain: RewardPool(
                {domain: reward_spec(config, domain)},
                num_processes=reward.world_size,
                timeout_s=reward.timeout_s,
                retries=config.reward_retries,
                memory_limit_mb=reward.memory_limit_mb,
            )
            for domain, reward in config.rewards.items()
            if reward.name != REWARD_MODEL
        }

    def wait_ready(self) -> None:
        """Wait until every function is loaded; raises `RewardLoadError` naming what is wrong."""
        for pool in self._pools.values():
            pool.wait_ready()

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one response; a combined score is there when both its parts are."""
        reward = self._rewards[request.domain]
        if not reward.uses_reward_model:
            return self._pools[request.domain].submit(request)
        assert self.model is not None, "a model that a domain uses is started"
        model = self.model.submit(request)
        if reward.name == REWARD_MODEL:
            return model
        return _when_both(self._pools[request.domain].submit(request), model, reward)

    def __enter__(self) -> RewardRouter:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown()


def _when_both(rule: Future[RewardResult], model: Future[RewardResult], reward: RewardConfig) -> Future[RewardResult]:
    both: Future[RewardResult] = Future()

    def settle(_: object) -> None:
        if not both.set_running_or_notify_cancel():
            return
        try:
            both.set_result(combined(rule.result(), model.result(), reward))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the score
            both.set_exception(error)

    rule.add_done_callback(lambda _: model.add_done_callback(settle))
    return both


def combined(rule: RewardResult, model: RewardResult, reward: RewardConfig) -> RewardResult:
    """Return rule_weight * rule + reward_model_weight * model, with both and their own parts as parts.

    A failure of either is a failure of the score: half of a sum says nothing about the response.
    """
    both: dict[str, Any] = {"attempts": max(rule.attempts, model.attempts), "seconds": max(rule.seconds, model.seconds)}
    for who, result in (("reward function", rule), ("reward model", model)):
        if result.reward is None:
            return replace(result, error=f"{who}: {result.error}", **both)
    assert rule.reward is not None
    assert model.reward is not None
    assert reward.rule_weight is not None
    assert reward.reward_model_weight is not None
    taken = sorted({RULE_PART, PART, TRUNCATED_PART} & rule.reward.parts.keys())
    if taken:
        error = f"the reward function has parts called {taken}, names that a combined score needs; rename them"
        return RewardResult(id=rule.id, status="error", reward=None, error=error, **both)
    value = reward.rule_weight * rule.reward.value + reward.reward_model_weight * model.reward.value
    parts = {**rule.reward.parts, RULE_PART: rule.reward.value, **model.reward.parts}
    return RewardResult(id=rule.id, status="ok", reward=Reward(value, parts), **both)
