"""Who scores a response: its domain's reward function, a reward model, the judge, or several by stated weights.

Everything is behind one `submit`: a request in, a future of its result out.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from roll.configs.schema.reward_config import RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.pipelines.workers.judge_worker import JudgeClient
from roll.rewards.base import Reward, RewardRequest, RewardResult, RewardSpec, Scorer, explained
from roll.rewards.reward_pool import RewardPool
from roll.types.metrics import Metrics

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
    usual: dict[str, Any] = {
        "sandbox": config.sandbox,
        "environment": config.reward_env,
        "concurrency": reward.concurrency,
    }
    parts = {
        part_name: (
            part.weight,
            RewardSpec(
                name=part.name, kwargs=part.reward_kwargs, key=f"rewards.{domain}.parts.{part_name}.name", **usual
            ),
        )
        for part_name, part in reward.parts.items()
    }
    return RewardSpec(name=name, kwargs=kwargs, key=key, parts=parts, **usual)


def in_run(spec: RewardSpec, max_steps: int | None) -> RewardSpec:
    """Return a spec, and those of its parts, for requests of a run's episodes."""
    parts = {name: (weight, in_run(part, max_steps)) for name, (weight, part) in spec.parts.items()}
    return replace(spec, in_run=True, max_steps=max_steps, parts=parts)


class RewardRouter:
    """The score of every domain: `submit` asks whom the configuration names.

    Starts a pool of processes for each domain with a reward function, without waiting; a context manager that ends
    them.
    """

    def __init__(self, config: RLVRConfig) -> None:
        self.models: dict[str, Scorer] = {}
        """Score what the configuration leaves to models, by role; set when their clusters stand."""
        self._rewards = config.rewards
        self._pools = {
            domain: RewardPool(
                {domain: in_run(reward_spec(config, domain), None if config.num_train_epochs else config.max_steps)},
                num_processes=reward.world_size,
                timeout_s=reward.timeout_s,
                retries=config.reward_retries,
                memory_limit_mb=reward.memory_limit_mb,
            )
            for domain, reward in config.rewards.items()
            if reward.is_function
        }

    def wait_ready(self) -> None:
        """Wait until every function is loaded; raises `RewardLoadError` naming what is wrong."""
        for pool in self._pools.values():
            pool.wait_ready()

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one response; a combined score is there when all its terms are."""
        reward = self._rewards[request.domain]
        # Models first: they gather what one turn of the event loop submits.
        added = {role: self.models[role].submit(request) for role in reward.added}
        if reward.is_function:
            own = self._pools[request.domain].submit(request)
        else:
            own = self.models[reward.name].submit(request)
        return _when_all(own, added, reward) if added else own

    def take_metrics(self) -> Metrics:
        """Return what the judge counted since the last call."""
        judge = self.models.get("judge")
        return judge.take_metrics() if isinstance(judge, JudgeClient) else Metrics()

    def __enter__(self) -> RewardRouter:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown()


def _when_all(
    own: Future[RewardResult], added: Mapping[str, Future[RewardResult]], reward: RewardConfig
) -> Future[RewardResult]:
    total: Future[RewardResult] = Future()
    waited = [own, *added.values()]

    def settle(_: object) -> None:
        if not all(future.done() for future in waited) or not total.set_running_or_notify_cancel():
            return
        try:
            results = {role: future.result() for role, future in added.items()}
            total.set_result(combined(own.result(), results, reward))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the score
            total.set_exception(error)

    def chain(rest: list[Future[RewardResult]]) -> None:
        # One after the other, so that exactly one callback finds all of them done.
        if len(rest) == 1:
            rest[0].add_done_callback(settle)
        else:
            rest[0].add_done_callback(lambda _: chain(rest[1:]))

    chain(waited)
    return total


def combined(own: RewardResult, added: Mapping[str, RewardResult], reward: RewardConfig) -> RewardResult:
    """Return the sum of rule_weight * what `name` gave and every added model's score by its weight, with all of them
    and their own parts as parts.

    A failure of one is a failure of the score: a piece of a sum says nothing about the response. A function that
    doesn't score this row is left out of its sum.
    """
    first = "reward function" if reward.is_function else reward.name.replace("_", " ")
    everyone = {first: own, **{role.replace("_", " "): result for role, result in added.items()}}
    both: dict[str, Any] = {
        "attempts": max(result.attempts for result in everyone.values()),
        "seconds": max(result.seconds for result in everyone.values()),
    }
    for who, result in everyone.items():
        if result.reward is None and result.status != "unscored":
            return replace(result, error=f"{who}: {result.error}", **both)
    assert reward.rule_weight is not None
    parts, theirs = {} if own.reward is None else dict(own.reward.parts), {}
    value = 0.0
    if own.reward is not None:
        value = reward.rule_weight * own.reward.value
        theirs = {RULE_PART: own.reward.value} if reward.is_function else {}
    for role, result in added.items():
        assert result.reward is not None
        value += reward.added[role] * result.reward.value
        theirs.update(result.reward.parts)
    taken = sorted(theirs.keys() & parts.keys())
    if taken:
        error = f"the reward function has parts called {taken}, names that a combined score needs; rename them"
        return RewardResult(id=own.id, status="error", reward=None, error=error, **both)
    why = {who: result.reward.explanation for who, result in everyone.items() if result.reward is not None}
    stated = None if own.reward is None else own.reward.answer
    summed = Reward(value, {**parts, **theirs}, stated, explained(why))
    return RewardResult(id=own.id, status="ok", reward=summed, **both)
