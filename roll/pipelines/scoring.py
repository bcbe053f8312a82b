"""The reward processes of a run: one pool per domain, as the configuration describes them."""

from __future__ import annotations

from concurrent.futures import Future

from roll.configs.rlvr import RLVRConfig
from roll.rewards.base import RewardRequest, RewardResult, RewardSpec
from roll.rewards.pool import RewardPool


def reward_spec(config: RLVRConfig, domain: str) -> RewardSpec:
    """Which function scores a domain."""
    reward = config.rewards[domain]
    if reward.name == "custom":
        custom = config.custom_reward_function
        assert custom is not None, "configuration checks make sure that there is one"
        return RewardSpec(name=custom.name, path=custom.path, kwargs={**custom.reward_kwargs, **reward.reward_kwargs})
    assert reward.name is not None, "configuration checks make sure that a domain names its reward"
    return RewardSpec(name=reward.name, kwargs=reward.reward_kwargs)


class RewardProcesses:
    """One pool of processes per domain. A context manager; starts the processes without waiting for them."""

    def __init__(self, config: RLVRConfig) -> None:
        self._pools = {
            domain: RewardPool(
                {domain: reward_spec(config, domain)},
                num_processes=reward.world_size,
                timeout_s=reward.timeout_s,
                retries=config.reward_retries,
            )
            for domain, reward in config.rewards.items()
        }

    def wait_ready(self) -> None:
        """Wait until every function is loaded; raises `RewardLoadError` naming what is wrong."""
        for pool in self._pools.values():
            pool.wait_ready()

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one response."""
        return self._pools[request.domain].submit(request)

    def __enter__(self) -> RewardProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()
