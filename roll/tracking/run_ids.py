"""The id that a service knows a run by, kept beside the logs so that a resumed run goes on under it."""

from __future__ import annotations

import secrets

from roll.tracking.base import Destination


def kept_run_id(destination: Destination, service: str) -> str:
    """Return the id of the run that is resumed, or a new one."""
    file = destination.folder / f"{service}_run_id"
    if destination.resume_step is None or not file.is_file():
        file.write_text(secrets.token_hex(8) + "\n")
    return file.read_text().strip()


def keep_run_id(destination: Destination, service: str, run_id: str) -> None:
    """Keep the id that the service has given."""
    (destination.folder / f"{service}_run_id").write_text(run_id + "\n")


def earlier_run_id(destination: Destination, service: str) -> str | None:
    """Return the id that the run had before it was resumed."""
    file = destination.folder / f"{service}_run_id"
    return file.read_text().strip() if destination.resume_step is not None and file.is_file() else None
