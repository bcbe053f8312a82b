"""Nim: rules, rewards, and the perfect player against a search of the whole game."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from roll.envs.base import InvalidAction, ResetNeeded
from roll.envs.conformance import check_env
from roll.envs.nim import Nim


def with_heaps(env: Nim, *heaps: int) -> Nim:
    env.reset(0, {})
    env._heaps = heaps
    return env


def test_roles_take_turns_and_the_last_stone_wins():
    env = with_heaps(Nim(), 5)
    result = env.step("3")
    assert (result.observation.role, result.observation.text) == ("second", "Stones: 2")
    assert (result.reward, dict(result.role_rewards)) == (0.0, {})
    assert result.metrics == {"won_positions": 1.0, "best_moves": 0.0}  # 5 is won by taking 1, which leaves 4
    end = env.step("2")
    assert end.terminated and end.observation is None
    assert end.role_rewards == {"first": -1.0, "second": 1.0}
    assert end.metrics == {"won_positions": 1.0, "best_moves": 1.0, "success/first": 0.0, "success/second": 1.0}
    with pytest.raises(ResetNeeded):
        env.step("1")


def test_the_last_stone_loses_where_asked():
    end = with_heaps(Nim(last_wins=False), 1).step("1")
    assert end.role_rewards == {"first": -1.0, "second": 1.0}


@pytest.mark.parametrize(
    ("heaps", "action", "said"),
    [
        ((2,), "3", "1 to 2"),
        ((2,), "0", "1 to 2"),
        ((2,), "1 1", "like 3"),
        ((2, 0), "2 1", "empty"),
        ((2, 2), "3 1", "no heap 3"),
    ],
)
def test_what_heaps_dont_permit_is_invalid_and_changes_nothing(heaps, action, said):
    env = with_heaps(Nim(num_heaps=len(heaps)), *heaps)
    with pytest.raises(InvalidAction, match=said):
        env.step(action)
    assert env._heaps == heaps


@cache
def searched(heaps: tuple[int, ...], max_take: int, last_wins: bool) -> bool:
    """Whether whoever moves can win, by search."""
    if not any(heaps):
        return not last_wins
    return any(
        not searched((*heaps[:i], stones - n, *heaps[i + 1 :]), max_take, last_wins)
        for i, stones in enumerate(heaps)
        for n in range(1, min(max_take, stones) + 1)
    )


@pytest.mark.parametrize("last_wins", [True, False])
@pytest.mark.parametrize(("num_heaps", "largest"), [(1, 13), (2, 7), (3, 4)])
@pytest.mark.parametrize("max_take", [1, 2, 3, None])
def test_the_perfect_player_wins_every_position_that_a_search_finds_won(num_heaps, largest, max_take, last_wins):
    env = Nim(num_heaps=num_heaps, min_heap=2, max_heap=largest, max_take=max_take, last_wins=last_wins)
    for heaps in itertools.product(range(largest + 1), repeat=num_heaps):
        if any(heaps):
            won = searched(heaps, max_take or largest, last_wins)
            with_heaps(env, *heaps)
            assert env._winning(heaps) is won, heaps
            for action in env.solution(1):
                end = env.step(action)
            assert end.role_rewards["first"] == (1 if won else -1), heaps


@pytest.mark.parametrize("config", [{}, {"num_heaps": 3, "max_heap": 6, "max_take": None, "last_wins": False}])
def test_it_conforms(config):
    found = [finding for finding in check_env(lambda: Nim(**config), seeds=range(4)) if finding.level == "error"]
    assert not found
