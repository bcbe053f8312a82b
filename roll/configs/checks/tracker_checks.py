"""Trackers that send metrics to a service have its key. Files and variables are read; no tracker is imported.

Where the keys are looked for was read in wandb 0.31.0 (`sdk/lib/wbauth`, `sdk/wandb_settings.py`), swanlab 0.10.3
(`sdk/internal/settings`, `sdk/cmd/init`), and trackio 0.43.0 (`init`).
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from roll.configs.errors import Violation, problem
from roll.configs.schema.run_config import RunConfig

_WANDB_MACHINES = {"api.wandb.ai", "api.forge.coreweave.com", "default"}
"""Entries of a netrc file that wandb takes where nothing names a server: 0.31.0 sends to the second host, and takes the
first one's key for it."""
_WANDB_LOCAL = ("offline", "dryrun", "disabled")


def tracker_checks(config: RunConfig) -> Iterator[Violation]:
    """Check that every tracker that sends to a service can log in."""
    services = {"wandb": _wandb, "swanlab": _swanlab, "trackio": _trackio}
    for name in config.track_with:
        if name in services:
            yield from services[name](config.tracker_kwargs.get(name, {}))


def _wandb(options: Mapping[str, Any]) -> Iterator[Violation]:
    settings = _wandb_settings()
    mode = options.get("mode") or os.environ.get("WANDB_MODE") or settings.get("mode")
    if mode in _WANDB_LOCAL or settings.get("api_key"):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    server = os.environ.get("WANDB_BASE_URL") or settings.get("base_url")
    usual = [Path.home() / name for name in (".netrc", "_netrc")]
    named = os.environ.get("NETRC")
    file = Path(named).expanduser() if named else next((one for one in usual if one.exists()), usual[0])
    machines = _machines(file)
    wanted = _WANDB_MACHINES | ({urlsplit(server).netloc} if server else set())
    if not wanted & machines:
        host = f" for {server}" if server else ""
        sentence = f"wandb has no key{host}: neither WANDB_API_KEY, nor an entry in {file}, nor one in its settings"
        fix = "wandb login, export WANDB_API_KEY=..., or tracker_kwargs.wandb.mode=offline and `wandb sync` later"
        yield problem("track_with", sentence, fix, "wandb")


def _wandb_settings() -> dict[str, str]:
    """Return what wandb's settings files say, those of the working directory last."""
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    root = Path(os.environ.get("WANDB_DIR") or ".")
    settings: dict[str, str] = {}
    for file in (home / "settings", root / "wandb" / "settings", root / ".wandb" / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(file, encoding="utf-8")
            settings |= dict(parser["default"]) if parser.has_section("default") else {}
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # wandb takes such a file for an empty one
    return settings


def _machines(file: Path) -> set[str]:
    """Return the machines that a netrc file has keys of."""
    try:
        return {name for name, (_, _, password) in netrc.netrc(str(file)).hosts.items() if password}
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return set()


def _swanlab(options: Mapping[str, Any]) -> Iterator[Violation]:
    own, home = Path(".swanlab"), Path("~/.swanlab").expanduser()
    home = Path(os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or home)
    written = [*Path().glob("swanlab.y*ml"), *Path("/etc/swanlab").glob("*.y*ml"), Path(".env")]
    written += [folder / f"config.{ending}" for folder in (own, home) for ending in ("yaml", "yml")]
    mode = options.get("mode") or os.environ.get("SWANLAB_MODE") or "online"
    if mode != "online" or os.environ.get("SWANLAB_API_KEY") or any(file.is_file() for file in written):
        return  # a file of settings may hold a key or another mode
    if not any(_machines(folder / ".netrc") for folder in (own, home)):
        sentence = f"swanlab has no key: neither SWANLAB_API_KEY, nor one in {home / '.netrc'} or its settings"
        fix = "swanlab login, export SWANLAB_API_KEY=..., or tracker_kwargs.swanlab.mode=local"
        yield problem("track_with", sentence, fix, "swanlab")


def _trackio(options: Mapping[str, Any]) -> Iterator[Violation]:
    space = options.get("space_id") or os.environ.get("TRACKIO_SPACE_ID")
    server = None if space else os.environ.get("TRACKIO_SERVER_URL")
    if server and "write_token=" not in server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
        sentence = "TRACKIO_SERVER_URL has no write token"
        yield problem("track_with", sentence, "export TRACKIO_WRITE_TOKEN=...", "trackio")
    if not space:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        sentence = f"trackio sends to the Space {space}, and there is no token of the hub"
        yield problem("track_with", sentence, "hf auth login, or export HF_TOKEN=...", "trackio")
