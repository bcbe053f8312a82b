"""Keeps a user's function loaded and plays one episode after the other with it.

    worker.py CHANNEL_FD FUNCTION

It runs under the agent's own interpreter, so it imports the standard library alone. CHANNEL_FD is a socket to the run,
which writes a line of JSON per episode (`task`, `base_url`, `api_key`, `environment`) and reads one back: `value`, what
the function returned, or `error`, what it raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

_LONGEST_ERROR = 20_000


def _load(path: str) -> Callable[..., Any]:
    """Import `file.py:function` or `package.module:function`."""
    source, _, name = path.rpartition(":")
    if source.endswith(".py"):
        file = os.path.abspath(os.path.expanduser(source))
        sys.path.insert(0, os.path.dirname(file))
        module_name = "roll_agent_" + os.path.basename(file)[:-3]
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} can't be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(source)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{path} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


def _traceback(skip: int) -> str:
    kind, value, frames = sys.exc_info()
    for _ in range(skip):
        frames = frames.tb_next if frames is not None else None
    text = "".join(traceback.format_exception(kind, value, frames)).strip()
    half = _LONGEST_ERROR // 2
    return text if len(text) <= _LONGEST_ERROR else text[:half] + "\n[...]\n" + text[-half:]


def _play(function: Callable[..., Any], request: dict[str, Any]) -> Any:
    os.environ.update(request["environment"])
    value = function(request["task"], request["base_url"], request["api_key"])
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _answer(function: Callable[..., Any], request: dict[str, Any]) -> str:
    """Return the line that answers an episode; what the function exits with is an error, too."""
    try:
        value = _play(function, request)
    except BaseException as error:  # noqa: BLE001 - the boundary: reported to the run
        return json.dumps({"error": f"{type(error).__name__}: {error}\n{_traceback(2)}"})
    try:
        return json.dumps({"value": value})
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"error": f"it returned a {type(value).__name__} that JSON doesn't take: {error}"})


def main() -> None:
    """Serve until the run closes its end."""
    fd, path = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(fd, False)
    sys.argv = [path.rpartition(":")[0]]
    owner = os.getpid()
    with os.fdopen(fd, "r+b", buffering=0) as raw:
        lines = os.fdopen(os.dup(fd), "rb")

        def tell(line: str) -> None:
            if os.getpid() != owner:
                os._exit(0)  # a forked copy that came back from the function
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # the function has closed it
                    stream.flush()
            data = line.encode("utf-8", "backslashreplace") + b"\n"
            while data:
                data = data[raw.write(data) :]

        try:
            function = _load(path)
        except BaseException:  # noqa: BLE001 - the boundary: reported to the run
            tell(json.dumps({"failed": _traceback(1)}))
            return
        tell(json.dumps({"ready": True}))
        for line in lines:
            tell(_answer(function, json.loads(line)))


if __name__ == "__main__":
    main()
