"""Whether a model that isn't a folder here is on the hub: one short try, or what the hub's cache knows."""

from __future__ import annotations

import os
from functools import cache
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

PATIENCE_S = 1.5
"""Seconds that the hub has to answer. Its own client tries five times with pauses, for each file again."""


@cache
def hub_problem(name: str) -> str:
    """Return why the model `name` can't be loaded from the hub; empty if it can, or nobody can tell."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return ""
    except HFValidationError as error:
        return f"{name!r} is neither a folder here nor a name that the hub can have: {error}"
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "0") not in ("", "0"):
        return f"{name!r} isn't in the hub's cache, and HF_HUB_OFFLINE forbids to look further"
    request = Request(f"{constants.ENDPOINT}/api/models/{quote(name)}", method="HEAD")
    try:
        with urlopen(request, timeout=PATIENCE_S):
            return ""
    except HTTPError as error:
        if error.code == 404:
            return f"there is neither a folder {name!r} here nor such a model on {constants.ENDPOINT}"
        return ""  # private or gated: whoever has a token may have it
    except (TimeoutError, URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return (
            f"{name!r} is neither a folder here nor in the hub's cache, and {constants.ENDPOINT} can't be reached "
            f"({reason})"
        )
