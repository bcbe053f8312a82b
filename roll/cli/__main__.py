"""`roll`, or `python -m roll.cli`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from roll.cli import demos, envs, rollout

GROUPS = (demos, envs, rollout)
KEY_VALUES = ("overrides", "arguments")
"""What commands call their key=value arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. What the user can mend is said in a line."""
    parser = argparse.ArgumentParser(prog="roll", description="Reinforcement learning for language models.")
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_to(groups)
    options, rest = parser.parse_known_args(arguments)
    # argparse takes key=value only next to the other arguments without a name, not after an option.
    taking = next((name for name in KEY_VALUES if hasattr(options, name)), None)
    if any(word.startswith("-") for word in rest) or (rest and taking is None):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if taking is not None:
        setattr(options, taking, [*getattr(options, taking), *rest])
    try:
        status: int = options.run(options)
    except ValueError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {error}")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
