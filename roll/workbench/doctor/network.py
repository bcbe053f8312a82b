"""Loopback, ports, proxies, Ray and the model hub."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from roll.workbench.doctor.findings import Finding, ProbeFailed, ask_python

_RAY_S = 60.0
_HUB_S = 3.0
_SKEWED_S = 120.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_LOCAL_RAY = """
import json, pathlib
from roll.distributed.ray_session import PrivateFolder, connect, disconnect
folder = PrivateFolder()
try:
    connect(None, folder.path)
    import ray
    assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=40) == 7
    print()
    print(json.dumps({"resources": ray.cluster_resources()}))
    disconnect()
finally:
    folder.remove()
"""
_CLUSTER = """
import json, pathlib
from roll.distributed.ray_session import connect, disconnect
connect(%r, pathlib.Path("roll-doctor"))
import ray
nodes = [{"alive": node["Alive"], "address": node["NodeManagerAddress"]} for node in ray.nodes()]
print()
print(json.dumps({"nodes": nodes}))
disconnect()
"""


def loopback() -> Iterator[Finding]:
    """Check whether processes of this machine reach each other under the names that libraries use."""
    for name in ("localhost", socket.gethostname()):
        try:
            address = socket.gethostbyname(name)
            with socket.create_server(("", 0)) as server:
                socket.create_connection((address, server.getsockname()[1]), timeout=2).close()
        except OSError as error:
            where = f"{name} ({'this host' if name != 'localhost' else 'loopback'})"
            fix = f"a line in /etc/hosts: 127.0.0.1 {name}; allow loopback in the firewall"
            yield Finding("problem", "loopback", f"{where} can't be reached: {error}", fix)
    yield from _free_ports()
    yield from _proxies()


def _free_ports() -> Iterator[Finding]:
    """Check for a range of temporary ports that is large enough: every rank, engine and Ray process takes some."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return
    if high - low < 1000:
        message = f"{high - low + 1} for programs to choose from; Ray and the ranks of a run take hundreds"
        yield Finding("warning", "ports", message, "sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    else:
        yield Finding("ok", "ports", f"{low} to {high} for programs to choose from")


def _proxies() -> Iterator[Finding]:
    names = [name for name in _PROXIES if os.environ.get(name)]
    without = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if names and not {"localhost", "127.0.0.1", "*"} & {each.strip() for each in without.split(",")}:
        message = (
            f"{', '.join(names)} is set without an exception for this machine: engines and judges here aren't reached"
        )
        yield Finding("warning", "proxy", message, "export no_proxy=localhost,127.0.0.1,.local")


def ray() -> Iterator[Finding]:
    """Check a cluster of our own as runs start it, and the one that RAY_ADDRESS names."""
    began = time.monotonic()
    try:
        ask_python(_LOCAL_RAY, timeout_s=_RAY_S)
    except ProbeFailed as error:
        message = f"a cluster on this machine doesn't start: {error}"
        yield Finding("problem", "Ray", message, "executor: inline works without Ray, with one process for each role")
    else:
        yield Finding("ok", "Ray", f"a cluster on this machine starts and answers in {time.monotonic() - began:.0f} s")
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        yield from _cluster(address)
    elif (current := _current_cluster_file()).is_file():
        yield from _cluster("auto", current.read_text().strip())


def _current_cluster_file() -> Path:
    """Return where `ray start` leaves the address of the cluster that this machine belongs to."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")


def _cluster(address: str, shown: str = "") -> Iterator[Finding]:
    shown = shown or f"RAY_ADDRESS={address}"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=3).close()
        except OSError as error:
            fix = "start it there with ray start --head, or unset RAY_ADDRESS"
            yield Finding("problem", "Ray", f"nothing answers at {shown}: {error}", fix)
            return
    try:
        nodes = ask_python(_CLUSTER % address, timeout_s=_RAY_S)["nodes"]
    except ProbeFailed as error:
        fix = "the same versions of Python and Ray on all machines; or unset RAY_ADDRESS"
        yield Finding("problem", "Ray", f"the cluster at {shown} can't be joined: {error}", fix)
        return
    dead = [node["address"] for node in nodes if not node["alive"]]
    message = f"{len(nodes) - len(dead)} machines alive in the cluster at {shown.removeprefix('RAY_ADDRESS=')}"
    if dead:
        yield Finding("warning", "Ray", f"{message}, gone: {', '.join(dead)}", "ray start there again")
    else:
        yield Finding("ok", "Ray", message)


def hub() -> Iterator[Finding]:
    """Check whether models can be fetched, and the time that its server has."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "ON", "YES"):
        yield Finding("note", "hub", "HF_HUB_OFFLINE is set: only models of folders and of the cache can be used")
        return
    if not urlsplit(endpoint).hostname:
        yield Finding("problem", "hub", f"HF_ENDPOINT={endpoint} is no address", "unset HF_ENDPOINT")
        return
    try:
        with build_opener(ProxyHandler()).open(
            Request(f"{endpoint}/api/models", method="HEAD"), timeout=_HUB_S
        ) as reply:
            date = reply.headers.get("Date")
    except HTTPError as error:
        date = error.headers.get("Date")  # it answers, and that is what was asked
    except (URLError, OSError, ValueError) as error:
        message = f"{endpoint} can't be reached ({getattr(error, 'reason', error)})"
        yield Finding(
            "warning", "hub", message, "use models in folders, set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1"
        )
        return
    skew = time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0
    if abs(skew) > _SKEWED_S:
        message = f"this machine's clock differs from the hub's by {skew:+.0f} s: certificates and tokens are refused"
        yield Finding("problem", "clock", message, "timedatectl set-ntp true")
    yield Finding("ok", "hub", f"{endpoint} answers")
