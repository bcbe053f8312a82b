"""Ray's tokens: one of its own for a Ray that the run starts, and what a cluster that is joined asks for.

Left alone, Ray 2.60 writes a token to `~/.ray/auth_token` whenever a process starts a cluster of its own, and goes by
that file ever after: `ray start --head` then asks for tokens, and a driver that joins with `address="auto"` uses them,
also against a cluster that was started without, where its actors are cancelled before they run. So nothing is written
there, and a cluster that is joined is asked first.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_VARIABLES = (MODE, TOKEN, TOKEN_PATH)
_CONNECT_SECONDS = 10.0
_ASK_SECONDS = 30.0
_GUIDE = "docs/cluster.md says how"
_CANCELLED = "all references to the actor were removed"


class ClusterError(ValueError):
    """A Ray cluster can't be joined as it stands."""


def use_private_token(folder: Path) -> dict[str, str | None]:
    """Have the Ray that this process starts next ask for a token that only this user can read, in `folder`.

    Returns what `restore` takes. Does nothing where the user has turned tokens off (`RAY_AUTH_MODE=disabled`).
    """
    before = {name: os.environ.get(name) for name in _VARIABLES}
    if (before[MODE] or "").lower() != "disabled":
        file = folder / "auth_token"
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32))
        os.environ.update({MODE: "token", TOKEN_PATH: str(file)})
        os.environ.pop(TOKEN, None)  # Ray prefers it to the file
        _reread()
    return before


def restore(before: dict[str, str | None]) -> None:
    """Undo `use_private_token`, or what `agree_on_tokens` has chosen."""
    if before == {name: os.environ.get(name) for name in _VARIABLES}:
        return
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _reread()


def agree_on_tokens(address: str) -> dict[str, str | None]:
    """Use a token with the cluster at `address` if it asks for one, else none, whatever is set; see `restore`.

    Raises `ClusterError` if it asks for a token and there is none here, or another one.
    """
    before = {name: os.environ.get(name) for name in _VARIABLES}
    _set_mode("disabled")
    refusal = _refusal(address)
    if not refusal:
        return before
    _set_mode("token")
    try:
        if not _has_token():
            raise ClusterError(
                f"the Ray cluster at {address} asks for a token, and there is none here: copy ~/.ray/auth_token of the "
                f"machine of `ray start --head` to this one, or name it by {TOKEN_PATH}; {_GUIDE}"
            )
        if _refusal(address):
            raise ClusterError(
                f"the Ray cluster at {address} refuses the token of {_source()}: it was started with another one. Copy "
                f"that of the machine of `ray start --head`, or start the cluster again; {_GUIDE}"
            )
    except BaseException:
        restore(before)
        raise
    return before


def find_cluster(address: str) -> str:
    """Return the `host:port` of the cluster that `auto` or an address stands for; something listens there.

    Raises `ClusterError` where there is none: Ray itself would wait for minutes.
    """
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if named.startswith(("ray://", "http://", "https://")):
        kind = "Ray's client server" if named.startswith("ray://") else "the dashboard"
        raise ClusterError(
            f"RAY_ADDRESS={named} is the address of {kind}; name that of the cluster itself, such as HOST:6379, or "
            "unset RAY_ADDRESS on a machine of the cluster"
        )
    from ray._private import services

    try:
        resolved = services.canonicalize_bootstrap_address(address)
    except (ValueError, OSError) as error:
        raise ClusterError(f"RAY_ADDRESS={named} is no address of a Ray cluster, such as HOST:6379: {error}") from error
    if resolved is None:
        raise ClusterError(
            "num_nodes is more than 1, and there is no Ray cluster to join: this machine belongs to none, and "
            "RAY_ADDRESS names none. Start it with `ray start --head` here and `ray start --address=HOST:6379` on the "
            f"others; {_GUIDE}"
        )
    host, _, port = resolved.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        source = "RAY_ADDRESS" if named else "the last `ray start` here"
        raise ClusterError(
            f"no Ray answers at {resolved}, which {source} names: {error}. Start it there with `ray start --head`, or "
            f"name another by RAY_ADDRESS; {_GUIDE}"
        ) from error
    return resolved


def explain_cancelled(reason: str) -> str:
    """Return what to do about an actor that Ray cancelled before it ran; empty for other reasons."""
    if _CANCELLED not in reason or "never ran" not in reason:
        return ""
    return (
        "The process of Ray on that machine goes by another token, or by none, than the head: restart Ray on all "
        f"machines with the same {MODE} and the same token; {_GUIDE}"
    )


def _refusal(address: str) -> str:
    """Return why the cluster doesn't answer a process with this one's token; empty: it answers."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RaySystemError, RpcError

    try:
        GcsClient(address=address).internal_kv_get(b"session_name", b"session", timeout=_ASK_SECONDS)
    except AuthenticationError as error:
        return str(error) or "refused"
    except (RaySystemError, RpcError) as error:
        if "nauthenticated" in str(error) or "uthentication" in str(error):
            return str(error)
        raise ClusterError(
            f"the Ray cluster at {address} takes connections and doesn't answer ({error}): restart it with `ray stop` "
            "and `ray start --head`, and see that all machines have the same version of Ray"
        ) from error
    return ""


def _set_mode(mode: str) -> None:
    if os.environ.get(MODE) != mode:
        os.environ[MODE] = mode
        _reread()


def _has_token() -> bool:
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def _source() -> str:
    if os.environ.get(TOKEN):
        return TOKEN
    path = os.environ.get(TOKEN_PATH)
    return f"{TOKEN_PATH}={path}" if path else "~/.ray/auth_token"


def _reread() -> None:
    """Have Ray look at the variables again, which it has read where it was imported before."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
