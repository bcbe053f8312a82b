"""The configuration that a run keeps in its folder: whole, resolved, and without secrets.

    <output_dir>/config.yaml    every key with its value, as `roll train` takes it
    <output_dir>/run.json       the directory that its relative paths are seen from, and the version

`roll resume`, `roll export` and `roll.load_run` go by these two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll import __version__
from roll.configs.schema.run_config import RunConfig
from roll.utils.secrets import is_secret_key, secret_values, without_passwords

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
_HEAD = (
    "# What this run was started with, defaults included. Relative paths are seen from the directory in run.json.\n"
    "# Secrets aren't kept: ${oc.env:NAME} reads them from the environment again.\n"
)


def store_config(config: RunConfig) -> None:
    """Write the configuration into the run's folder, each file whole or not at all."""
    import yaml

    folder = config.output_path
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(storable(asdict(config)), sort_keys=False, allow_unicode=True, width=120)
    _replace(folder / CONFIG_FILE, _HEAD + text)
    about = {"directory": str(Path.cwd()), "version": __version__, "exp_name": config.exp_name}
    _replace(folder / RUN_FILE, json.dumps(about, indent=1) + "\n")


def storable(value: Any, key: str = "") -> Any:
    """Return a value as it is written: plain, without secrets, and so that no text is read as an interpolation."""
    if isinstance(value, Mapping):
        return {name: storable(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(inner, key) for inner in value]
    if isinstance(value, str):
        variable = re.sub(r"[^A-Z0-9_]", "_", key.upper())
        if value and is_secret_key(key):
            return f"${{oc.env:{variable}}}"
        text = value.replace("${", r"\${")
        for secret, name in secret_values().items():  # what an interpolation has put into an innocent key
            text = text.replace(secret, f"${{oc.env:{name}}}")
        return without_passwords(text, f"${{oc.env:{variable}_PASSWORD}}")
    return value


def stored_config_file(run: Path) -> Path:
    """Return the kept configuration of a run; raise `ValueError` where its folder has none."""
    file = run / CONFIG_FILE
    if file.is_file():
        return file
    if not run.is_dir():
        raise ValueError(f"there is no folder {str(run)!r}, seen from {Path.cwd()}; give the output_dir of a run")
    if (run.parent / CONFIG_FILE).is_file():
        raise ValueError(f"{run} is a part of a run; give the run's folder: {run.parent}")
    raise ValueError(
        f"{run} has no {CONFIG_FILE}: it isn't the output_dir of a run, or the run ended before its first step; "
        "start it again with roll train"
    )


def run_directory(run: Path) -> Path:
    """Return the directory that the run was started from; the current one where that is unknown or gone."""
    try:
        directory = Path(json.loads((run / RUN_FILE).read_text(encoding="utf-8"))["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return Path.cwd()
    return directory if directory.is_dir() else Path.cwd()


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
