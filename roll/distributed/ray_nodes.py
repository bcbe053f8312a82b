"""What Ray, and the network, know of the machine of a worker that doesn't answer."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.distributed.ray_worker import Home

_CONNECT_SECONDS = 3.0
_ASK_SECONDS = 10.0


def name_of(home: Home) -> str:
    """Return a machine's host name and address; host names may be the same on several."""
    return home.host if home.node in ("", home.host) else f"{home.host} ({home.node})"


def lost(home: Home, silent_seconds: float) -> str:
    """Return what is wrong with a worker's machine, as a sentence; empty: it is alive and answers.

    Args:
        home: where the worker is.
        silent_seconds: time since one of the role's workers there gave its last result.
    """
    node = _node(home.machine)
    since = f"its last result came {silent_seconds:.0f} s ago"
    if isinstance(node, str):
        return f"Ray itself doesn't answer any more ({node}): was the cluster's head stopped?"
    if not node.get("Alive", False):
        why = node.get("DeathReasonMessage") or "it was stopped, or it didn't answer Ray's health checks"
        return f"Its machine {name_of(home)} is dead to Ray ({why}); {since}"
    error = _unreachable(node)
    if not error:
        return ""
    where = f"{node.get('NodeManagerAddress')}:{node.get('NodeManagerPort')}"
    return (
        f"Its machine {name_of(home)} can't be reached: nothing answers at {where} ({error}), though Ray still counts "
        f"it as alive; {since}. Look at its network and whether it runs"
    )


def _node(machine: str) -> Mapping[str, Any] | str:
    """Return Ray's record of a machine; a text says why there is none."""
    import ray

    pool = ThreadPoolExecutor(1, thread_name_prefix="ray-nodes")
    try:
        nodes = pool.submit(ray.nodes).result(timeout=_ASK_SECONDS)
    except Exception as error:  # noqa: BLE001 - another error is being explained
        return str(error) or f"no answer in {_ASK_SECONDS:g} s"
    finally:
        pool.shutdown(wait=False)
    return next((node for node in nodes if node["NodeID"] == machine), {})


def _unreachable(node: Mapping[str, Any]) -> str:
    try:
        address = (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except (OSError, KeyError, ValueError) as error:
        return str(error)
    return ""
