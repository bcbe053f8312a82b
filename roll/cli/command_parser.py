"""What the parsers of all commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from roll.configs.errors import nearest

CODES = "Exit code: 0 done, 2 your mistake (arguments, configuration, data), 1 a failure, 130 interrupted."
KEYS = "How to look up a key of a configuration: docs/configuration.md."


class CommandParser(argparse.ArgumentParser):
    """Names the nearest command for one that isn't there."""

    dashed = ""
    """An option whose value may begin with dashes, as the flag of another program does."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """Join that option and its value, which argparse would take for an option."""
        if self.dashed and args is not None and self.dashed in args[:-1]:
            at = list(args).index(self.dashed)
            args = [*args[:at], f"{self.dashed}={args[at + 1]}", *args[at + 2 :]]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        unknown = re.search(r"invalid choice: '([^']+)' \(choose from (.*)\)", message)
        if unknown is not None and (near := nearest(unknown[1], re.findall(r"[\w-]+", unknown[2]))):
            message = message.replace(unknown[0], f"there is no {unknown[1]!r}; {near}")
        super().error(message)


def add_debug(parser: argparse.ArgumentParser, default: object = False) -> None:
    """Add `--debug`."""
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error, as ROLL_DEBUG=1 does"
    )


def command(groups: Any, name: str, help_: str, run: str | None = None) -> CommandParser:
    """Add a command; `run` is its function as `module:function`, None where it has commands of its own."""
    described = f"{help_[0].upper()}{help_[1:]}."
    parser: CommandParser = groups.add_parser(name, help=help_, description=described, epilog=CODES)
    if run is not None:
        parser.set_defaults(run=run)
        add_debug(parser, argparse.SUPPRESS)  # a default would replace what stands before the command
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `key=value` arguments."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="e.g. rollout_batch_size=16")


def key_values(arguments: Sequence[str], wanted: str) -> dict[str, Any]:
    """Return the arguments as a dict; raise `ValueError`, which names the argument and says what is `wanted`."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"got {argument!r}, expected key=value, {wanted}")
        values[key] = from_yaml(value, argument)
    return values


def from_yaml(text: str, source: str) -> Any:
    """Return what a YAML text says; raise `ValueError`, which names its source, if it is none."""
    import yaml  # not for --help

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is no YAML: {error}") from None
