"""Ray's tokens: whose are used, and what is said where they don't fit."""

from __future__ import annotations

import os
import socket

import pytest

from roll.distributed import ray_auth

pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def variables(monkeypatch, tmp_path):
    """No tokens of this machine, and no token mode that Ray goes on with after the test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    ray_auth._reread()


def cluster(monkeypatch, token: str | None):
    """A cluster that asks for a token, or for none; like Ray's, it takes a token that it hasn't asked for."""

    def refusal(_: str) -> str:
        mine = os.environ.get("RAY_AUTH_TOKEN", "") if os.environ.get("RAY_AUTH_MODE") == "token" else ""
        return "" if token in (None, mine) else "InvalidAuthToken"

    monkeypatch.setattr(ray_auth, "_refusal", refusal)


@pytest.mark.parametrize("mode", [None, "token", "disabled"])
@pytest.mark.parametrize(("theirs", "used"), [(None, "disabled"), ("mine", "token")])
def test_a_joined_cluster_decides_whether_a_token_is_used_whatever_lies_in_the_home(monkeypatch, theirs, used, mode):
    cluster(monkeypatch, theirs)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    before = ray_auth.agree_on_tokens("10.0.0.1:6379")
    assert os.environ["RAY_AUTH_MODE"] == used
    ray_auth.restore(before)
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_a_cluster_that_asks_for_a_token_says_what_to_do_without_one_and_with_another(monkeypatch):
    cluster(monkeypatch, "theirs")
    with pytest.raises(
        ray_auth.ClusterError, match=r"10.0.0.1:6379 asks for a token, and there is none here: copy ~/.ray"
    ):
        ray_auth.agree_on_tokens("10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    with pytest.raises(ray_auth.ClusterError, match="refuses the token of RAY_AUTH_TOKEN: it was started with another"):
        ray_auth.agree_on_tokens("10.0.0.1:6379")
    assert "RAY_AUTH_MODE" not in os.environ


def test_tokens_that_the_user_turned_off_stay_off(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_auth.use_private_token(tmp_path)
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_an_address_where_no_cluster_answers_is_refused_at_once(monkeypatch):
    from ray._private import services

    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    for address, message in (
        (closed, f"no Ray answers at .*{closed.partition(':')[2]}, which RAY_ADDRESS names"),
        ("ray://10.0.0.1:10001", "address of Ray's client server; name that of the cluster itself"),
        ("http://10.0.0.1:8265", "address of the dashboard; name that of the cluster itself"),
        ("not an address", "RAY_ADDRESS=not an address is no address of a Ray cluster|no Ray answers"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ray_auth.ClusterError, match=message):
            ray_auth.find_cluster("auto")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda *_: None)
    with pytest.raises(ray_auth.ClusterError, match="no Ray cluster to join.*ray start --head"):
        ray_auth.find_cluster("auto")


def test_an_actor_that_ray_cancelled_because_of_its_token_says_what_to_do():
    reason = (
        "The actor is dead because all references to the actor were removed including lineage ref count.\n"
        "The actor never ran - it was cancelled before it started running."
    )
    assert "restart Ray on all machines with the same RAY_AUTH_MODE" in ray_auth.explain_cancelled(reason)
    assert ray_auth.explain_cancelled("The actor is dead because its owner has died.") == ""
