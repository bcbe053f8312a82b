"""Whatever agents do to their conversations: what was sampled is what is trained, once (see agent_fuzz.py)."""

from __future__ import annotations

import pytest
from agent_fuzz import TEMPLATES, FuzzedAgent, FuzzLog, Logged, RandomRanks, check_identity, fuzz_tokenizer, play_fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.chat_format import ChatTemplate
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.lockstep_driver import LockstepDriver
from roll.strategies.base import SamplingParams

QUICK = settings(max_examples=10, deadline=None, derandomize=True)


def fuzzed(template, history, seed, *, lockstep=True, episodes=3, calls=25, limit=1500):
    tokenizer, tally = fuzz_tokenizer(template), FuzzLog()
    logged = Logged(RandomRanks(tokenizer, template))
    if lockstep:
        driver = LockstepDriver(logged, timeout=60.0)
    else:
        driver = ContinuousDriver(logged, max_running_requests=16, timeout=60.0)
    agent = FuzzedAgent(ChatTemplate(tokenizer), tokenizer, history, calls, tally, seed=seed)
    try:
        rollouts = play_fuzz(
            driver, tokenizer, agent, episodes=episodes, limit=limit, params=SamplingParams(max_new_tokens=60)
        )
    finally:
        driver.close()
    tokens = check_identity(rollouts, logged, tally)
    assert tokens == sum(t.num_response_tokens for t in rollouts.trajectories)
    return tally, rollouts


@given(template=st.sampled_from(list(TEMPLATES)), history=st.sampled_from(("carried", "rendered")), seed=st.integers(0))
@QUICK
def test_every_token_is_trained_once_in_the_context_it_was_sampled_in(template, history, seed):
    fuzzed(template, history, seed, lockstep=seed % 2 == 0)


@pytest.mark.parametrize("template", TEMPLATES)
def test_fuzzed_agents_do_all_that_they_are_to_do(template):
    log, rollouts = fuzzed(template, "carried", 5, episodes=2, calls=60)
    done = {"go_on", "edit", "drop_thinking", "ask_again", "at_once", "several", "disconnect", "cancelled", "summarise"}
    assert done | {f"mismatch_{name}" for name in ("template", "edited", "dropped_thinking")} <= set(log.counts)
    assert all(len(trajectory.branches) > 5 for trajectory in rollouts.trajectories)
