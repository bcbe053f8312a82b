"""Slots on several machines: a Ray cluster of two nodes that believe they have eight accelerators each."""

from __future__ import annotations

import pytest

from roll.distributed.executors import make_executor
from roll.distributed.placement import RolePlacement
from roll.distributed.ray_slots import _by_address, _by_number, _refuse_too_few, machine_sizes
from roll.distributed.worker import machine_id

ray = pytest.importorskip("ray")


def test_machines_are_filled_one_after_the_other():
    assert machine_sizes(12, None) == [12]
    assert machine_sizes(16, 8) == [8, 8]
    assert machine_sizes(12, 8) == [8, 4]
    assert machine_sizes(3, 8) == [3]


def test_addresses_are_ordered_as_numbers():
    given = ["10.0.0.10", "host", "10.0.0.9", "fe80::1"]
    assert sorted(given, key=_by_address) == ["10.0.0.9", "10.0.0.10", "fe80::1", "host"]


def test_devices_may_have_names_instead_of_numbers():
    """CUDA_VISIBLE_DEVICES may list UUIDs, or parts of a GPU (MIG)."""
    assert sorted(["10", "9", "1"], key=_by_number) == ["1", "9", "10"]
    given = ["MIG-8f3b/1/0", "GPU-5a1c", "MIG-8f3b/2/0"]
    assert sorted(given, key=_by_number) == given


def nodes(*gpus):
    return [{"NodeManagerAddress": f"10.0.0.{i}", "Resources": {"GPU": float(n)}} for i, n in enumerate(gpus)]


def test_machines_that_could_never_hold_the_slots_are_refused_at_once():
    _refuse_too_few([8, 4], nodes(0, 8, 8), "GPU")
    with pytest.raises(ValueError, match=r"0 to 11 on 2 machines of 8 .num_gpus_per_node.*12 GPU.*10.0.0.0: 8"):
        _refuse_too_few([8, 4], nodes(8, 2, 2), "GPU")
    with pytest.raises(ValueError, match=r"on 2 machines of 2 .*has 1 machine\(s\)"):
        _refuse_too_few([2, 2], nodes(0), "CPU")


def test_a_role_of_eight_slots_is_on_one_machine_whichever_comes_first(tmp_path, monkeypatch):
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    from roll.distributed.ray_session import _LOOPBACK_ONLY

    # A run on one machine, in a test before, may have turned off clusters in this process.
    monkeypatch.setenv(_LOOPBACK_ONLY, "1")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    memory = {"object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, **memory})
    roles = [
        RolePlacement("actor_train", tuple((slot,) for slot in range(8))),
        RolePlacement("actor_infer", ((8, 9, 10, 11),)),
    ]
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=8, object_store_memory=100 << 20)
        seen = []
        for _ in range(4):
            given = {"rpc_timeout": 60, "log_dir": tmp_path, "ray_address": cluster.address, "slots_per_machine": 8}
            with make_executor("ray", roles, **given) as executor:
                slots = executor._reserved.slots
                asked = executor.on_each_machine(machine_id)
            assert [len({slot.node for slot in slots[a:b]}) for a, b in ((0, 8), (8, 12))] == [1, 1]
            assert [slot.device for slot in slots[:8]] == [str(number) for number in range(8)]
            assert set(asked.values()) == {slot.node for slot in slots}
            assert all(node[:8] in name for name, node in asked.items())
            seen.append(tuple(slot.node for slot in slots))
        assert len({slots[0] for slots in seen}) <= 2

        given["slots_per_machine"] = 16
        with pytest.raises(ValueError, match="the cluster has 16 GPU"):
            make_executor("ray", roles, **given)
    finally:
        ray.shutdown()
        cluster.shutdown()
