"""Unit-test stand-ins: engines that answer from a script, environments from a function."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from roll.envs.base import Message, Observation, StepResult
from roll.rewards.base import Reward, RewardResult
from roll.rollout.agent import Agent
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.lockstep_driver import LockstepDriver
from roll.rollout.scheduler import CollectPlan, RolloutScheduler
from roll.strategies.base import Completion, SamplingParams
from roll.types.trajectory import EpisodeError, Task


class ScriptedRanks:
    """Engines whose response to a request takes `length(request)` decode steps; token = the request's prompt end."""

    def __init__(self, world_size=1, length=lambda request: 1, slots=10_000):
        self.world_size = world_size
        self.length = length
        self.slots = slots
        self.running = [{} for _ in range(world_size)]
        self.batches: list[list[str]] = []
        self.most_running = 0

    async def submit(self, rank, requests):
        self.batches.append([r.id for r in requests])
        for request in requests:
            self.running[rank][request.id] = [request, 0]
        self.most_running = max(self.most_running, sum(map(len, self.running)))

    async def poll(self, rank, budget):
        done = []
        for request_id, entry in list(self.running[rank].items())[: self.slots]:
            request, steps = entry
            entry[1] = steps + budget
            if entry[1] >= self.length(request):
                del self.running[rank][request_id]
                done.append(self._completion(request, int(self.length(request)), "stop"))
        return done

    async def abort(self, rank, request_ids):
        stopped = []
        for request_id in request_ids:
            request, steps = self.running[rank].pop(request_id)
            stopped.append(self._completion(request, int(steps), "abort"))
        return stopped

    @staticmethod
    def _completion(request, length, reason):
        return Completion(
            id=request.id,
            token_ids=(request.prompt_ids[-1],) * length,
            logprobs=(-1.0,) * length,
            versions=(0,) * length,
            finish_reason=reason,
            steps=length,
        )


class NumberTokenizer:
    """Token ids as decimal numbers."""

    chat_template = None

    def __call__(self, text, add_special_tokens=False):
        return type("Ids", (), {"input_ids": [int(word) for word in text.split()]})

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def make_tasks(n, **payload):
    return [
        Task(id=f"t{i}", source="test", payload={"number": i, **payload}, seed=i, tag="numbers", domain="numbers")
        for i in range(n)
    ]


class Source:
    """Tasks in order, endless by epochs unless `endless` is off."""

    def __init__(self, tasks, endless=False):
        self.tasks = list(tasks)
        self.returned: list[str] = []
        self.taken: list[str] = []

    def take(self, n):
        taken, self.tasks = self.tasks[:n], self.tasks[n:]
        self.taken += [task.id for task in taken]
        return taken

    def put_back(self, tasks):
        self.returned += [task.id for task in tasks]
        self.tasks = [*tasks, *self.tasks]


def first_prompt(task, observation):
    return (1, task.payload["number"] + 10)


def instant(score):
    """A reward that is there at once: `score(request)` gives a number, or an error text."""

    def submit(request):
        future: Future = Future()
        outcome = score(request)
        if isinstance(outcome, str):
            future.set_result(RewardResult(id=request.id, status="error", reward=None, error=outcome, attempts=2))
        else:
            future.set_result(RewardResult(id=request.id, status="ok", reward=Reward(float(outcome), {"part": 1.0})))
        return future

    return submit


def make_scheduler(
    ranks, submit=None, make_env=None, *, timeout=5.0, max_turns=1, limit=1000, round_steps=4, **options
):
    engines = LockstepDriver(ranks, round_steps=round_steps, timeout=timeout)
    submit = submit or instant(lambda request: float(request.id[-1:] or 0))
    player = EpisodePlayer(
        engines,
        Agent(NumberTokenizer(), first_prompt, chat=False),
        make_env or (lambda task, name: RewardEnv(submit, task, name)),
        max_sequence_length=limit,
        max_turns=max_turns,
    )
    return RolloutScheduler(engines, player, seed=1, **options)


def make_plan(groups=4, group_size=2, **options):
    options.setdefault("max_prompts", 10 * groups)
    options.setdefault("params", SamplingParams(max_new_tokens=50))
    return CollectPlan(step=1, purpose="train", groups=groups, group_size=group_size, **options)


class EchoEnv:
    """Two turns: asks again with the number of the first answer's tokens, then ends with reward 1."""

    def __init__(self):
        self.actions: list[str] = []

    def reset(self, seed, options):
        self.actions = []
        return Observation((Message("user", "?"),))

    def step(self, action):
        self.actions.append(action)
        if len(self.actions) == 1:
            return StepResult(reward=0.25, terminated=False, observation=Observation((Message("user", "7 8"),)))
        return StepResult(reward=1.0, terminated=True, metrics={"turns": 2.0})

    def close(self):
        pass


class ThreadedEnv:
    """Runs a plain `Env` in a thread, with a time limit per call."""

    waits_for = "environment"

    def __init__(self, env, timeout=600.0):
        self._env = env
        self._timeout = timeout

    async def reset(self, task):
        return await self._run(lambda: self._env.reset(task.seed, task.payload))

    async def step(self, action):
        return await self._run(lambda: self._env.step(action.text))

    async def _run(self, call):
        try:
            return await asyncio.wait_for(asyncio.to_thread(call), self._timeout)
        except TimeoutError:
            raise EpisodeError("timeout", f"{type(self._env).__name__} took over {self._timeout:g} s") from None
        except Exception as error:
            raise EpisodeError("env_error", f"{type(self._env).__name__}: {type(error).__name__}: {error}") from error

    async def close(self):
        self._env.close()
