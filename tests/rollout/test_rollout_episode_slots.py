"""Episodes that wait for room: in order, without holding up those that have it."""

from __future__ import annotations

import asyncio

import pytest
from fakes import NumberTokenizer, RewardEnv, ScriptedRanks, Source, first_prompt, instant, make_plan, make_tasks

from roll.rollout.agent import Agent
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.episode_slots import EpisodeSlots
from roll.rollout.lockstep_driver import LockstepDriver
from roll.rollout.scheduler import RolloutScheduler


class Room(RewardEnv):
    """Counts how many there are at once."""

    open, most = 0, 0

    async def reset(self, task):
        Room.open += 1
        Room.most = max(Room.most, Room.open)
        return await super().reset(task)

    async def close(self):
        Room.open -= 1
        await super().close()


@pytest.mark.parametrize("redundancy", [0, 2])
@pytest.mark.parametrize("room", [1, 3, 50])
def test_a_step_is_played_with_room_for_fewer_episodes_than_a_group_has(room, redundancy):
    Room.open = Room.most = 0
    ranks = ScriptedRanks(length=lambda request: 1 + sum(map(ord, request.id)) % 9)
    engines = LockstepDriver(ranks, round_steps=2, timeout=5.0)
    agent = Agent(NumberTokenizer(), first_prompt, chat=False)
    player = EpisodePlayer(
        engines,
        agent,
        lambda task, name: Room(instant(lambda _: 1.0), task, name),
        max_sequence_length=1000,
        max_episodes=room,
    )
    scheduler = RolloutScheduler(engines, player, seed=1)
    groups = scheduler.collect(Source(make_tasks(3)), make_plan(groups=3, group_size=4, redundancy=redundancy)).groups
    assert [len(group.survivors) for group in groups] == [4, 4, 4]
    assert Room.most == min(room, 3 * (4 + redundancy))
    assert Room.open == 0


class Engines:
    """Notes what places say about episodes."""

    def __init__(self):
        self.said = []

    def mark_blocked(self, episode):
        self.said.append(f"{episode} waits")

    def mark_busy(self, episode, doing):
        self.said.append(f"{episode} {doing}")


def test_who_comes_first_is_served_first_and_who_is_cancelled_leaves_no_gap():
    async def play():
        engines, order = Engines(), []
        slots = EpisodeSlots(engines, 1)

        async def episode(name):
            async with slots.acquire(name):
                order.append(name)

        async with slots.acquire("a"):
            tasks = {name: asyncio.ensure_future(episode(name)) for name in "bcd"}
            await asyncio.sleep(0)
            tasks["b"].cancel()  # while it waits
            await asyncio.sleep(0)
        tasks["c"].cancel()  # it has the place, and doesn't know it yet
        await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 1.0)
        await asyncio.wait_for(episode("e"), 1.0)
        return engines.said, order

    said, order = asyncio.run(play())
    assert order == ["d", "e"]
    assert said == ["b waits", "c waits", "d waits", "b cancelled", "c starting", "d starting"]
