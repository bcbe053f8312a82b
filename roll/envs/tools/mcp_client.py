"""Tools of a server that speaks the Model Context Protocol, over standard input and output or streamable HTTP.

The `mcp` package does the talking, 1.x and 2.x (their names differ in case and in the HTTP client). A connection
belongs to one task of one event loop, which keeps it open; calls are made from other tasks of that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from roll.configs.schema.tool_config import McpServer
from roll.envs.tools.base import Answer, Tool, ToolError, ToolFailure, ToolReply
from roll.types.chat import ToolSpec

_MAX_STARTS = 3
"""Times that a server which is gone is started anew or connected to again, until one call succeeds."""
_CLOSED = -32000
"""Code of the protocol's error for a connection that is closed."""
_INSTALL = "pip install 'roll-rl[tools]'"


class McpConnection:
    """A connection to one server. All methods belong to one event loop."""

    def __init__(self, name: str, server: McpServer) -> None:
        self.name = name
        self._server = server
        self._session: Any = None
        self._keeper: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._starts = 0
        self._starting = asyncio.Lock()

    async def start(self) -> list[ToolSpec]:
        """Connect; the tools that the server offers. Raises `ValueError` with what it wrote to its standard error."""
        try:
            session = await self._connected()
            return await asyncio.wait_for(self._listed(session), self._server.start_timeout_s)
        except ToolFailure as error:
            raise ValueError(f"tools.{self.name}.mcp: {error}") from error
        except TimeoutError:
            wait = self._server.start_timeout_s
            raise ValueError(f"tools.{self.name}.mcp: the server didn't list its tools within {wait:g} s") from None
        except Exception as error:  # whatever a server answers
            why = f"the server couldn't list its tools: {_innermost(error)}"
            raise ValueError(f"tools.{self.name}.mcp: {why}") from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Call a tool. Raises `ToolError` for what the server refuses, `ToolFailure` when it is gone."""
        session = await self._connected()
        try:
            result = await session.call_tool(tool, dict(arguments))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            code = getattr(getattr(error, "error", error), "code", None)
            if isinstance(code, int) and code != _CLOSED:
                raise ToolError(str(error)) from error
            self._lose()
            raise ToolFailure(f"the MCP server {self.name} is gone: {type(error).__name__}: {error}") from error
        self._starts = 0
        return ToolReply(_text_of(result), is_error=bool(_either(result, "is_error", "isError")))

    async def close(self) -> None:
        """Disconnect, and end a server that was started."""
        self._lose()
        if self._keeper is not None:
            with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
                await asyncio.wait_for(self._keeper, 10.0)

    async def _connected(self) -> Any:
        async with self._starting:
            if self._session is not None and self._keeper is not None and not self._keeper.done():
                return self._session
            if self._starts >= _MAX_STARTS:
                raise ToolFailure(f"the MCP server {self.name} is gone, and {self._starts} new starts failed")
            self._starts += 1
            self._stop = asyncio.Event()
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(ready, self._stop), name=f"mcp {self.name}")
            try:
                self._session = await asyncio.wait_for(asyncio.shield(ready), self._server.start_timeout_s)
            except TimeoutError:
                self._keeper.cancel()
                wait = self._server.start_timeout_s
                raise ToolFailure(f"the server didn't start within start_timeout_s = {wait:g} s") from None
            return self._session

    async def _keep(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """Hold the connection open until `stop`; it must be opened and closed by one task."""
        from mcp import ClientSession

        with tempfile.TemporaryFile() as errors:
            try:
                async with self._streams(errors) as streams, ClientSession(*streams[:2]) as session:
                    await session.initialize()
                    ready.set_result(session)
                    await stop.wait()
            except Exception as error:  # noqa: BLE001 - whatever a server does; whoever waits for it is told
                if not ready.done():
                    what = f"can't be reached: {_innermost(error)}{_tail(errors)}"
                    ready.set_exception(ToolFailure(f"the server {what}"))
                self._session = None
            finally:
                if not ready.done():
                    ready.cancel()

    @contextlib.asynccontextmanager
    async def _streams(self, errors: Any) -> AsyncIterator[Sequence[Any]]:
        server = self._server
        if server.url is None:
            from mcp import StdioServerParameters
            from mcp.client.stdio import get_default_environment, stdio_client

            program, *arguments = command_words(server.command)
            passed = {name: os.environ[name] for name in server.pass_env if name in os.environ}
            environment = {**get_default_environment(), **passed, **server.env}
            parameters = StdioServerParameters(command=program, args=arguments, env=environment, cwd=server.cwd)
            async with stdio_client(parameters, errlog=errors) as streams:
                yield streams
            return
        from mcp.client import streamable_http

        token = os.environ.get(server.token_env, "") if server.token_env is not None else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if hasattr(streamable_http, "streamablehttp_client"):  # 1.x
            async with streamable_http.streamablehttp_client(server.url, headers=headers) as streams:
                yield streams
            return
        async with (
            streamable_http.create_mcp_http_client(headers=headers) as client,
            streamable_http.streamable_http_client(server.url, http_client=client) as streams,
        ):
            yield streams

    async def _listed(self, session: Any) -> list[ToolSpec]:
        offered, cursor = [], None
        while True:
            page = await session.list_tools(**({} if cursor is None else _from(cursor, session.list_tools)))
            for tool in page.tools:
                schema = _either(tool, "input_schema", "inputSchema") or {}
                offered.append(ToolSpec(tool.name, tool.description or "", {"type": "object", **dict(schema)}))
            cursor = _either(page, "next_cursor", "nextCursor")
            if not cursor:
                break
        wanted = self._server.tools
        if unknown := [name for name in wanted if name not in {tool.name for tool in offered}]:
            has = ", ".join(tool.name for tool in offered)
            raise ToolFailure(f"the server has no tool {unknown[0]!r}; it has {has}")
        return [tool for tool in offered if not wanted or tool.name in wanted]

    def _lose(self) -> None:
        self._session = None
        self._stop.set()


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, connection: McpConnection, spec: ToolSpec) -> None:
        self._connection, self._name = connection, spec.name
        self.description, self.parameters = spec.description, spec.parameters

    async def call(self, arguments: Mapping[str, Any], state: Any) -> Answer:  # noqa: ARG002
        return await self._connection.call(self._name, arguments)


def require_mcp(name: str) -> None:
    """Raise `ValueError` without the `mcp` package."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ValueError(f"tools.{name}.mcp: MCP servers need the package mcp; {_INSTALL}") from error


def command_words(command: Sequence[str]) -> list[str]:
    """Return program and arguments; one text is split as a shell does."""
    return shlex.split(command[0]) if len(command) == 1 else list(command)


def _from(cursor: str, list_tools: Any) -> dict[str, Any]:
    """Return the arguments that ask for the page of a list after the first one, in either version of the package."""
    if "cursor" in inspect.signature(list_tools).parameters:  # 1.x
        return {"cursor": cursor}
    from mcp.types import PaginatedRequestParams

    return {"params": PaginatedRequestParams(cursor=cursor)}


def _text_of(result: Any) -> str:
    """Return what a result says; what isn't text is named."""
    pieces = []
    for block in result.content or ():
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        pieces.append(text if isinstance(text, str) else f"[{getattr(block, 'type', 'content')} that can't be shown]")
    structured = _either(result, "structured_content", "structuredContent")
    if not pieces and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(pieces)


def _either(of: Any, *names: str) -> Any:
    """Return the attribute, by its name in either version of the package."""
    return next((getattr(of, name) for name in names if hasattr(of, name)), None)


def _innermost(error: BaseException) -> str:
    """Return what happened inside of groups of exceptions."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return f"{type(error).__name__}: {error}"


def _tail(file: Any) -> str:
    """Return the end of what a server wrote to its standard error."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1000))
    stderr = file.read().decode("utf-8", "replace").strip()
    return f"; it wrote: {stderr}" if stderr else ""
