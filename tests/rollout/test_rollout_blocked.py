"""Lockstep engines while every episode is blocked: nothing is computed, and nobody spins."""

from __future__ import annotations

import asyncio

import pytest

from roll.rollout.engine_driver import RolloutStalled
from roll.rollout.lockstep_driver import LockstepDriver
from roll.strategies.base import Request, SamplingParams

REQUEST = Request(id="one/0", prompt_ids=(1,), params=SamplingParams(max_new_tokens=1), seed=0)


class NoEngines:
    """Ranks that nothing is asked of."""

    world_size = 1


async def all_blocked(driver, seconds):
    driver.mark_busy("one", "starting")
    driver.mark_blocked("one")
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, driver.mark_busy, "one", "goes on")
    await driver.wait_idle()
    begun = asyncio.get_running_loop().time()
    await driver.advance()
    return asyncio.get_running_loop().time() - begun


def test_a_round_with_nothing_to_do_waits_until_an_episode_goes_on():
    driver = LockstepDriver(NoEngines(), timeout=10.0)
    assert 0.1 <= driver.run(all_blocked(driver, 0.15)) < 5.0
    driver.close()


async def started_while_nobody_plays(driver):
    driver.mark_busy("one", "starting")  # as its group takes the place of one that has failed
    asyncio.get_running_loop().call_later(0.05, driver.mark_ended, "one")
    await driver.advance()
    await driver.wait_idle()


def test_an_episode_that_ends_without_a_call_is_not_waited_for_for_ever():
    driver = LockstepDriver(NoEngines(), timeout=2.0)
    driver.run(started_while_nobody_plays(driver))
    driver.close()


def test_a_round_in_which_nobody_ever_goes_on_is_a_stall():
    driver = LockstepDriver(NoEngines(), timeout=0.1)
    with pytest.raises(RolloutStalled, match="every episode waits for somebody else"):
        driver.run(all_blocked(driver, None))
    driver.close()


def test_a_round_before_which_a_group_has_taken_anothers_place_leaves_it_to_be_waited_for():
    """Such episodes are busy from their start on, and may ask for tokens without a word before."""
    driver = LockstepDriver(NoEngines(), timeout=0.1)

    async def replaced():
        driver.mark_busy("one", "starting")
        await driver.advance()

    driver.run(replaced())
    driver.close()


def test_an_episode_that_was_blocked_and_asks_for_tokens_is_news():
    driver = LockstepDriver(NoEngines(), timeout=5.0)

    async def asks():
        driver.mark_busy("one", "starting")
        driver.mark_blocked("one")
        asking = asyncio.get_running_loop().create_task(driver.generate("one", REQUEST))
        await driver.advance()
        asking.cancel()

    driver.run(asks())
    driver.close()
