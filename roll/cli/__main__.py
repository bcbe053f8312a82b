"""`roll`, or `python -m roll.cli`. What takes time is imported after the signals are in hand (`roll.utils.signals`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from roll.utils.signals import ending_at_once, install

KEY_VALUES = ("overrides", "arguments")
"""What commands call their key=value arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (`roll.cli.exits`). None: the process's arguments, and its signals."""
    if arguments is None:
        install()
    from importlib import import_module

    from roll.cli.exits import DEBUG_VARIABLE, guarded
    from roll.cli.parsers import roll_parser
    from roll.utils.importing import keep_imports, long_imports

    if arguments is None:
        keep_imports()

    parser = roll_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes key=value only next to the other arguments without a name, not after an option.
    taking = next((name for name in KEY_VALUES if hasattr(options, name)), None)
    if any(word.startswith("-") for word in rest) or (rest and taking is None):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if taking is not None:
        setattr(options, taking, [*getattr(options, taking), *rest])
    if options.debug:
        os.environ[DEBUG_VARIABLE] = "1"

    def command() -> int:
        module, name = options.run.split(":")
        with ending_at_once(), long_imports():
            function = getattr(import_module(module), name)
        status: int = function(options)
        return status

    return guarded(command)


if __name__ == "__main__":
    sys.exit(main())
