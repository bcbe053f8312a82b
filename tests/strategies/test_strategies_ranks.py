"""Ports of process groups that tests make."""

from __future__ import annotations

import socket

from ranks import ephemeral_ports, free_port


def test_a_port_is_none_that_the_system_gives_away_and_none_that_is_taken():
    free = free_port()
    assert free not in ephemeral_ports()
    with socket.create_server(("127.0.0.1", free)):
        draws = iter([free, free, free_port()])
        assert free_port(lambda low, high: next(draws)) != free
