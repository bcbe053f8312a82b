"""`roll`, or `python -m roll.cli`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from roll.cli import demos, envs, rollout

GROUPS = (demos, envs, rollout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. What the user can mend is said in a line."""
    parser = argparse.ArgumentParser(prog="roll", description="Reinforcement learning for language models.")
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_to(groups)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except ValueError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {error}")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
