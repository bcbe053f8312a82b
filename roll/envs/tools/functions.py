"""A function of the user's own as a tool: its type hints and docstring say what the policy is told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from roll.envs.tools.base import Answer, Tool, ToolError


class FunctionTool(Tool):
    """Calls `function(**arguments, **options)`.

    The policy is neither shown nor may it give options and keyword-only arguments, those after the `*`. Without
    `parameters` the schema of the others is what transformers' `get_json_schema` reads off the function: it needs a
    type hint and a line below `Args:` for each. Raises `ValueError` where it can't, and for a keyword-only argument
    that has neither a default nor an option.
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
        takes = _parameters(function)
        in_schema = (parameters or {}).get("properties", {})  # of a schema that says what the policy gives
        reserved = [one for one in takes if one.kind is one.KEYWORD_ONLY and one.name not in in_schema]
        for one in reserved:
            if one.default is one.empty and one.name not in self._options:
                raise ValueError(f"{key}: {function.__name__} needs {one.name}, which the policy doesn't give: options")
        for one in takes:
            if one.kind is one.POSITIONAL_ONLY:
                raise ValueError(f"{key}: {function.__name__} takes {one.name} by position alone; remove the /")
        self._hidden = {*self._options, *(one.name for one in reserved)}
        if parameters is not None:
            self.parameters = parameters
            return
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException
        from transformers.utils.chat_template_utils import get_json_schema as schema_of

        try:
            shown = schema_of(_without(function, self._hidden))["function"]
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            why = str(error).rstrip(".!")
            raise ValueError(
                f"{key}: {function.__name__} doesn't say what its arguments are: {why}. Give every parameter a type "
                "hint and a line below Args: in the docstring, or write the schema: parameters: {type: object, ...}"
            ) from error
        self.description, schema = shown["description"], shown["parameters"]
        properties = {name: _plain(one) for name, one in schema["properties"].items()}
        self.parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}

    def call(self, arguments: Mapping[str, Any], state: Any) -> Answer | Awaitable[Answer]:  # noqa: ARG002
        if hidden := sorted(self._hidden & set(arguments)):
            raise ToolError(f"wrong arguments: there is no argument {hidden[0]!r}")
        answer: Answer | Awaitable[Answer] = self._function(**arguments, **self._options)
        return answer


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function that isn't Python's own
        return []


def _without(function: Callable[..., Any], hidden: Collection[str]) -> Callable[..., Any]:
    """Return a function that looks like this one without some of its parameters."""

    @functools.wraps(function)
    def shown() -> None: ...

    hints = getattr(function, "__annotations__", {})
    left = [one for one in _parameters(function) if one.name not in hidden]
    shown.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
    shown.__annotations__ = {name: hint for name, hint in hints.items() if name not in hidden}
    return shown


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an argument in the words of JSON schema, which has no `nullable`."""
    plain = {key: value for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") and isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"], "null"]
    return plain
