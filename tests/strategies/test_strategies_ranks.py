"""Processes and ports of the ranks that tests play."""

from __future__ import annotations

import os
import socket

import pytest
from ranks import ephemeral_ports, free_port


def test_a_port_is_none_that_the_system_gives_away_and_none_that_is_taken():
    free = free_port()
    assert free not in ephemeral_ports()
    with socket.create_server(("127.0.0.1", free)):
        draws = iter([free, free, free_port()])
        assert free_port(lambda low, high: next(draws)) != free


def fails(info):
    if info.rank == 1:
        os._exit(3)
    raise ValueError("told")


def rank_of(info):
    return info.rank


def test_every_rank_that_fails_is_named_and_the_next_ranks_play_on(ranks):
    message = r"(?s)rank 0 of 2: .*ValueError: told.*rank 1 of 2: the process ended with exit code 3"
    with pytest.raises(RuntimeError, match=message):
        ranks.run(fails, 2)
    assert ranks.run(rank_of, 2) == [0, 1]
