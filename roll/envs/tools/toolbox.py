"""The tools of a run: made once, called by many episodes at once.

    episode --calls--> EpisodeTools --> event loop of the toolbox: async tools, MCP connections
            <-replies-                  `-> threads: tools that block

Calls run outside of the loop that plays episodes, so a tool that blocks holds nobody up but its own callers. A thread
that hangs beyond its time can't be killed: it keeps one of its tool's places (`concurrency`) until it ends. A tool that
must be killed belongs into an MCP server.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from roll.configs.catalog.entries import nearest
from roll.configs.catalog.signatures import signature_of
from roll.configs.catalog.tool_table import TOOLS
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.tool_config import ToolConfig
from roll.envs.tools.arguments import ArgumentChecker
from roll.envs.tools.base import Tool, ToolError, ToolFailure, ToolReply
from roll.envs.tools.functions import FunctionTool
from roll.isolation.sandbox.base import Sandbox
from roll.isolation.sandbox.open_sandbox import SandboxOnDemand
from roll.types.chat import ToolCall, ToolSpec
from roll.types.trajectory import EpisodeError, Task
from roll.utils.importing import load_object
from roll.utils.loop_thread import LoopThread

if TYPE_CHECKING:
    from typing import Self

    from roll.envs.tools.mcp_client import McpConnection

logger = logging.getLogger(__name__)

_CLOSING_S = 15.0


@dataclass(frozen=True, slots=True)
class Called:
    """What became of a call."""

    call: ToolCall
    text: str
    """For the policy."""
    max_tokens: int | None
    """Of the text that the policy is shown."""
    reward: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers for logging: `errors`, and one of `unknown`, `bad_arguments`, `timeouts`, `failed` for those that weren't
    answered; the tool's own below its name."""


@dataclass(slots=True)
class _Entry:
    name: str
    spec: ToolSpec
    tool: Tool
    config: ToolConfig
    checker: ArgumentChecker
    slots: asyncio.Semaphore
    warned: bool = False


class Toolbox:
    """The tools of a run. Close it, or use it in a `with` block.

    Raises `ValueError` for a tool that can't be made, and for two of one name.
    """

    def __init__(self, tools: Sequence[ToolConfig], *, sandbox: str = "auto") -> None:
        self._sandbox: Sandbox = SandboxOnDemand(sandbox)
        self._loop = LoopThread("tools")
        self._connections: list[McpConnection] = []
        self._by_config: dict[str, list[str]] = {}
        self._entries: dict[str, _Entry] = {}
        try:
            for config in tools:
                self._add(config)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what the tools hold, and disconnect from servers."""
        for entry in self._entries.values():
            with _logged(f"the tool {entry.name} failed while it was released"):
                entry.tool.shutdown()
        for connection in self._connections:
            with _logged(f"the MCP server {connection.name} failed while it was closed"):
                self._loop.submit(connection.close()).result(_CLOSING_S)
        self._connections = []
        with contextlib.suppress(FutureTimeout):
            self._loop.cancel_all(_CLOSING_S)
        self._loop.stop(_CLOSING_S)
        self._sandbox.close()

    def specs(self, names: Sequence[str]) -> tuple[ToolSpec, ...]:
        """Return what the policy is told of the tools of these entries."""
        return tuple(self._entries[tool].spec for name in names for tool in self._tools_of(name))

    def open(self, names: Sequence[str], task: Task, kwargs: Mapping[str, Mapping[str, Any]]) -> EpisodeTools:
        """Return the tools of these entries for one episode; `kwargs` is what its row says of each, by name."""
        entries = [self._entries[tool] for name in names for tool in self._tools_of(name)]
        if unknown := [name for name in kwargs if name not in {entry.name for entry in entries}]:
            problem = f"tools_kwargs names the tool {unknown[0]!r}, which this row can't call"
            raise EpisodeError("env_error", f"{problem}; it can call {', '.join(entry.name for entry in entries)}")
        return EpisodeTools(self._loop, entries, task, kwargs)

    def _tools_of(self, name: str) -> list[str]:
        if name not in self._by_config:
            raise ValueError(
                f"there is no tool {name!r}; {nearest(name, self._by_config)}tools has {[*self._by_config]}"
            )
        return self._by_config[name]

    def _add(self, config: ToolConfig) -> None:
        self._by_config[config.name] = []
        for name, tool in self._made(config):
            if name in self._entries:
                other = self._entries[name].config.name
                raise ValueError(f"tools.{config.name}: there is a tool {name!r} already, of tools.{other}; rename one")
            if config.parameters is not None:
                tool.parameters = config.parameters
            if config.description is not None:
                tool.description = config.description
            if not tool.description:
                raise ValueError(f"tools.{config.name}: {name} has no description; write one: the policy is told it")
            spec, slots = tool.spec(name), asyncio.Semaphore(config.concurrency)
            checker = ArgumentChecker(name, spec.parameters)
            self._entries[name] = _Entry(name, spec, tool, config, checker, slots)
            self._by_config[config.name].append(name)

    def _made(self, config: ToolConfig) -> list[tuple[str, Tool]]:
        key = f"tools.{config.name}"
        if config.mcp is not None:
            return self._served(config)
        if config.path is None:
            entry = TOOLS[config.name]
            arguments: dict[str, Any] = {"sandbox": self._sandbox} if entry.sandboxed else {}
            return [(config.name, load_object(entry.path, key=key)(**arguments, **config.options))]
        target = load_object(config.path, key=f"{key}.path")
        if inspect.isclass(target):
            if wrong := [f"{name}: {reason}" for name, reason in signature_of(target, skip=0).problems(config.options)]:
                raise ValueError(f"{key}.options: {config.path} can't be made: {'; '.join(wrong)}")
            made = target(**config.options)
            if not isinstance(made, Tool):
                raise ValueError(f"{key}.path: {config.path} isn't derived from roll.envs.tools.base.Tool")
            return [(config.name, made)]
        if not callable(target):
            raise ValueError(f"{key}.path: {config.path} is neither a function nor a class")
        return [(config.name, FunctionTool(target, config.options, key=f"{key}.path", parameters=config.parameters))]

    def _served(self, config: ToolConfig) -> list[tuple[str, Tool]]:
        from roll.envs.tools.mcp_client import McpConnection, McpTool, require_mcp

        require_mcp(config.name)
        assert config.mcp is not None
        server = config.mcp

        async def started() -> tuple[McpConnection, list[ToolSpec]]:
            connection = McpConnection(config.name, server)
            self._connections.append(connection)
            return connection, await connection.start()

        connection, specs = self._loop.submit(started()).result(2 * server.start_timeout_s + _CLOSING_S)
        return [(spec.name, McpTool(connection, spec)) for spec in specs]


@contextlib.contextmanager
def open_toolbox(config: RLConfig) -> Iterator[Toolbox | None]:
    """Make the tools of a run, and close them; None: it has none."""
    if not config.tools:
        yield None
        return
    with Toolbox(config.tools, sandbox=config.sandbox) as toolbox:
        yield toolbox


class EpisodeTools:
    """Tools as one episode calls them; states are made at the first call of their tool. Close it."""

    def __init__(
        self, loop: LoopThread, entries: Sequence[_Entry], task: Task, kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._loop = loop
        self._entries = {entry.name: entry for entry in entries}
        self._task, self._kwargs = task, kwargs
        self._states: dict[str, Any] = {}
        self._in_turn = {entry.name: asyncio.Lock() for entry in entries}
        self.specs = tuple(entry.spec for entry in entries)
        self.num_calls = 0
        """That the episode has read off its responses; the next ones are numbered from here."""

    async def run(self, calls: Sequence[ToolCall]) -> list[Called]:
        """Make the calls side by side; what became of each, in their order.

        Raises `EpisodeError` when a tool itself failed. Never waits longer than the tools' `timeout_s`.
        """
        return await asyncio.wrap_future(self._loop.submit(self._run(calls)))

    async def aclose(self) -> None:
        """Release the states."""
        if self._states:
            await asyncio.wrap_future(self._loop.submit(self._close()))

    async def _run(self, calls: Sequence[ToolCall]) -> list[Called]:
        return list(await asyncio.gather(*(self._one(call) for call in calls)))

    async def _one(self, call: ToolCall) -> Called:
        entry = self._entries.get(call.name)
        if entry is None:
            has = ", ".join(self._entries) or "none"
            return _refused(call, f"there is no tool {call.name!r}; there are {has}", "unknown")
        limit = entry.config.max_reply_tokens
        try:
            arguments = entry.checker.checked(call.arguments)
        except ToolError as error:
            return _refused(call, str(error), "bad_arguments", limit)
        except ToolFailure as error:
            raise EpisodeError("env_error", f"the tool {entry.name} failed: {error}") from error
        try:
            answer = await asyncio.wait_for(self._called(entry, arguments), entry.config.timeout_s)
        except TimeoutError:
            problem = f"{entry.name} didn't answer within {entry.config.timeout_s:g} s"
            return _refused(call, problem, "timeouts", limit)
        except ToolError as error:
            return _refused(call, str(error), "refused", limit)
        except ToolFailure as error:
            raise EpisodeError("env_error", f"the tool {entry.name} failed: {error}") from error
        except Exception as error:  # the boundary to code of the user's own; the policy reads what a caller would
            if not entry.warned:
                entry.warned = True
                logger.warning("the tool %s raised; the policy is told so (logged once)", entry.name, exc_info=error)
            return _refused(call, f"{type(error).__name__}: {error}", "failed", limit)
        reply = ToolReply(answer) if isinstance(answer, str) else answer
        if not isinstance(reply, ToolReply):
            what = f"returned {type(answer).__name__}, expected a text or a ToolReply"
            raise EpisodeError("env_error", f"the tool {entry.name} {what}")
        _check_numbers(entry.name, reply)
        counts = {f"{entry.name}/{name}": float(value) for name, value in reply.metrics.items()}
        counts |= {"errors": 1.0} if reply.is_error else {}
        return Called(call, _printable(reply.text), limit, float(reply.reward), counts)

    async def _called(self, entry: _Entry, arguments: Mapping[str, Any]) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            if entry.tool.keeps_state:
                await stack.enter_async_context(self._in_turn[entry.name])
            if entry.name not in self._states:
                kwargs = self._kwargs.get(entry.name, {})
                self._states[entry.name] = await _outside(entry, lambda: entry.tool.create(self._task, kwargs))
            state = self._states[entry.name]
            if inspect.iscoroutinefunction(entry.tool.call):
                async with entry.slots:
                    return await entry.tool.call(arguments, state)
            answer = await _outside(entry, lambda: entry.tool.call(arguments, state))
            return await answer if inspect.isawaitable(answer) else answer

    async def _close(self) -> None:
        for name, state in self._states.items():
            entry = self._entries[name]
            with _logged(f"the tool {name} failed to close an episode's state"):
                await asyncio.wait_for(_outside(entry, partial(entry.tool.close, state)), _CLOSING_S)
        self._states = {}


async def _outside(entry: _Entry, function: Callable[[], Any]) -> Any:
    """Run something that may block in a thread, which takes one of the tool's places until it ends."""
    await entry.slots.acquire()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        entry.slots.release()
        if not done.done():
            done.set_result(value) if error is None else done.set_exception(error)

    def work() -> None:
        value, failed = None, None
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            failed = RuntimeError(str(error)) if isinstance(error, (StopIteration, SystemExit)) else error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, name=f"tool {entry.name}", daemon=True).start()
    return await done


def _check_numbers(name: str, reply: ToolReply) -> None:
    """Raise `EpisodeError` for a reward or a metric that isn't a finite number."""
    for what, value in (("reward", reply.reward), *((f"metric {key!r}", each) for key, each in reply.metrics.items())):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise EpisodeError("env_error", f"the tool {name} gave {value!r:.80} as its {what}, expected a number")


def _refused(call: ToolCall, why: str, kind: str, max_tokens: int | None = 256) -> Called:
    return Called(call, f"Error: {_printable(why)}", max_tokens, counts={"errors": 1.0, kind: 1.0})


def _printable(text: str) -> str:
    """Return text that can be written as UTF-8."""
    return str(text).encode("utf-8", "replace").decode("utf-8")


@contextlib.contextmanager
def _logged(what: str) -> Any:
    """Log an exception of code that isn't ours: an episode, or a run, ends whatever it does at its end."""
    try:
        yield
    except Exception:
        logger.warning(what, exc_info=True)
