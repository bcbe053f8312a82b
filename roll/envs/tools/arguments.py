"""The arguments of a call: from the text that the policy wrote to values that its schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roll.envs.tools.base import ToolError, ToolFailure

_SHOWN = 300


class ArgumentChecker:
    """Checks arguments against a JSON schema, which is checked itself.

    Raises `ValueError` for a schema that is none, or not one of an object.
    """

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        import jsonschema
        from jsonschema.validators import validator_for
        from referencing import Registry

        if schema.get("type", "object") != "object":
            raise ValueError(f"the parameters of the tool {tool!r} must have type: object, got {schema['type']!r}")
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(dict(schema))
        except jsonschema.SchemaError as error:
            where = ".".join(map(str, error.absolute_path))
            at = f" at {where}" if where else ""
            raise ValueError(f"the parameters of the tool {tool!r} are no JSON schema{at}: {error.message}") from None
        # An empty registry: a reference to another address isn't fetched.
        self._validator = kind(dict(schema), registry=Registry())
        self._required = tuple(schema.get("required", ()))

    def checked(self, text: str) -> dict[str, Any]:
        """Return the arguments that a call says.

        Raises:
            ToolError: they are wrong; the text tells the policy how.
            ToolFailure: the schema refers to something that isn't there.
        """
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments aren't valid JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ToolError("the arguments must be a JSON object")
        try:
            wrong = self._wrong(arguments)
        except RecursionError as error:
            raise ToolError("the arguments are nested too deep") from error
        if wrong:
            raise ToolError(f"wrong arguments{wrong}")
        return arguments

    def _wrong(self, arguments: Mapping[str, Any]) -> str:
        """Return where the schema doesn't allow the arguments and why, or an empty text."""
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        try:
            wrong = best_match(self._validator.iter_errors(arguments))
        except Unresolvable as error:
            raise ToolFailure(
                f"its schema refers to {error.ref!r}, which isn't in it; write what it refers to below its $defs"
            ) from error
        if wrong is None:
            return ""
        where = ".".join(map(str, wrong.absolute_path))
        return f"{f' at {where}' if where else ''}: {wrong.message[:_SHOWN]}"
