"""What policies are compared with: an agent that acts at random, and one that plays the environment's `solution`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from roll.envs.base import Env, InvalidAction, StepResult
from roll.utils.seeding import stable_hash

TEXTS = ("0", "1", "7", "yes", "no", "A", "hello there", "(1 + 2) * 3")
"""What the random agent says to an environment that takes any text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineScore:
    """What an agent achieved."""

    agent: str
    episodes: int
    unplayed: int = 0  # Episodes for which there is no solution; they count as no success
    successes: int
    mean_return: float  # Of the episodes played
    mean_steps: float
    seconds_per_step: float

    @property
    def success_rate(self) -> float:
        """Over all episodes."""
        return self.successes / self.episodes


def success_metrics(result: StepResult) -> dict[str, float]:
    """Return a step's metrics of success, by name: `success`, or `success/<role>` of each role."""
    return {name: value for name, value in result.metrics.items() if name == "success" or name.startswith("success/")}


def random_action(env: Env, rng: random.Random) -> str:
    """Return what the environment draws itself, else one of its actions, or of `TEXTS`."""
    drawn = env.sample_action(rng)
    return rng.choice(env.actions or TEXTS) if drawn is None else drawn


def random_score(make: Callable[[], Env], seeds: Iterable[int], max_steps: int) -> BaselineScore:
    """Plays each seed at random until the end, or for `max_steps` actions."""

    def endless(env: Env, seed: int) -> Iterator[str]:
        rng = random.Random(stable_hash("random-agent", seed))
        while True:
            yield random_action(env, rng)

    return _score("random", make, seeds, max_steps, endless)


def scripted_score(make: Callable[[], Env], seeds: Iterable[int], max_steps: int) -> BaselineScore | None:
    """Plays each seed's solution for `max_steps` actions; None when there is none for any."""

    def solved(env: Env, seed: int) -> Iterator[str] | None:  # noqa: ARG001 - the environment knows its seed
        actions: Sequence[str] | None = env.solution(max_steps)
        return None if actions is None else iter(actions)

    score = _score("solution", make, seeds, max_steps, solved)
    return None if score.unplayed == score.episodes else score


def _score(
    agent: str,
    make: Callable[[], Env],
    seeds: Iterable[int],
    max_steps: int,
    actions_of: Callable[[Env, int], Iterator[str] | None],
) -> BaselineScore:
    env = make()
    returns: list[float] = []
    episodes = successes = steps = 0
    seconds = 0.0
    for seed in seeds:
        episodes += 1
        env.reset(seed, {})
        actions = actions_of(env, seed)
        if actions is None:
            continue
        begun = time.perf_counter()
        results = list(_played(env, actions, max_steps))
        seconds += time.perf_counter() - begun
        steps += len(results)
        returns.append(sum(result.reward for result in results if result is not None))
        last = next((result for result in reversed(results) if result is not None), None)
        successes += int(last is not None and 1 in success_metrics(last).values())
    env.close()
    played = max(1, len(returns))
    return BaselineScore(
        agent=agent,
        episodes=episodes,
        unplayed=episodes - len(returns),
        successes=successes,
        mean_return=sum(returns) / played,
        mean_steps=steps / played,
        seconds_per_step=seconds / max(1, steps),
    )


def _played(env: Env, actions: Iterator[str], max_steps: int) -> Iterator[StepResult | None]:
    """Yield the results up to the end; None for an invalid action."""
    for _, action in zip(range(max_steps), actions, strict=False):
        try:
            result = env.step(action)
        except InvalidAction:
            yield None
            continue
        yield result
        if result.terminated or result.truncated:
            return
