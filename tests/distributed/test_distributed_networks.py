"""Which network the ranks of a role meet on."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from roll.distributed.placement import RolePlacement
from roll.distributed.ray_executor import RayExecutor, _unexpanded
from roll.distributed.ray_slots import Reservation
from roll.distributed.ray_worker import WorkerShell, interface_to


def test_the_interface_is_that_of_the_route_and_not_that_of_the_machines_name():
    loopback = interface_to("127.0.0.1")
    assert "127.0.0.1" in [each.address for each in psutil.net_if_addrs()[loopback]]
    assert interface_to("no-such-host.invalid") is None


@pytest.mark.parametrize(("world", "given", "expected"), [(2, None, "eth7"), (2, "ib0", "ib0"), (1, None, None)])
def test_ranks_on_several_machines_meet_on_the_interface_that_leads_to_the_first(monkeypatch, world, given, expected):
    monkeypatch.setattr(os, "environ", {})  # what a worker's process is told stays out of this one's
    monkeypatch.setattr("roll.distributed.ray_worker.interface_to", lambda address: {"10.1.2.3": "eth7"}[address])
    monkeypatch.setattr("pickle.loads", lambda packed: (lambda info: info, SimpleNamespace(timeout=1.0), ()))
    env = {"WORLD_SIZE": str(world), "MASTER_ADDR": "10.1.2.3", **({"GLOO_SOCKET_IFNAME": given} if given else {})}
    assert WorkerShell.__new__(WorkerShell).build(env, {}, b"") is None
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_values_with_dollar_signs_are_not_changed_by_ray():
    """Ray's own function for the variables of a worker; it drops `${NAME}`, which the worker then sets again."""
    from ray._private.utils import update_envs

    before = dict(os.environ)
    try:
        update_envs(_unexpanded({"ROLL_A": "$HOME/x$", "ROLL_B": "plain"}))
        assert (os.environ["ROLL_A"], os.environ["ROLL_B"]) == ("$HOME/x$", "plain")
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert _unexpanded({"A": "plain"}) == {"A": "plain"}


def test_choices_of_networks_reach_machines_that_were_joined(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    executor = RayExecutor.__new__(RayExecutor)
    executor._own_ray, executor._reserved = False, Reservation(False, ())
    env = executor._env(RolePlacement("actor_train", ((0,),), {"NCCL_DEBUG": "WARN"}), [])
    assert (env["NCCL_SOCKET_IFNAME"], env["NCCL_DEBUG"]) == ("ib0", "WARN")
