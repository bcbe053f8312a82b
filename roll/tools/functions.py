"""A function of the user's own as a tool: its type hints and docstring say what the policy is told."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from roll.tools.base import Answer, Tool


class FunctionTool(Tool):
    """Calls `function(**arguments, **options)`; options that it takes aren't shown to the policy.

    Without `parameters` the schema is what transformers' `get_json_schema` reads off the function: it needs a type hint
    and a line below `Args:` for every parameter. Raises `ValueError` where it can't.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        key: str,
        parameters: Mapping[str, Any] | None,
    ) -> None:
        self._function, self._options = function, dict(options)
        self.description = inspect.getdoc(function) or ""
        if parameters is not None:
            self.parameters = parameters
            return
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException
        from transformers.utils.chat_template_utils import get_json_schema as schema_of

        try:
            shown = schema_of(function)["function"]
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            why = str(error).rstrip(".!")
            raise ValueError(
                f"{key}: {function.__name__} doesn't say what its arguments are: {why}. Give every parameter a type "
                "hint and a line below Args: in the docstring, or write the schema: parameters: {type: object, ...}"
            ) from error
        self.description, schema = shown["description"], shown["parameters"]
        properties = {name: _plain(one) for name, one in schema["properties"].items() if name not in self._options}
        required = [name for name in schema.get("required", []) if name in properties]
        self.parameters = {"type": "object", "properties": properties, "required": required}

    def call(self, arguments: Mapping[str, Any], state: Any) -> Answer | Awaitable[Answer]:  # noqa: ARG002
        answer: Answer | Awaitable[Answer] = self._function(**arguments, **self._options)
        return answer


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an argument in the words of JSON schema, which has no `nullable`."""
    plain = {key: value for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") and isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"], "null"]
    return plain
