"""Servers that speak the Model Context Protocol, over standard input and output and over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll.configs.schema.tool_config import McpServer, ToolConfig
from roll.envs.tools.mcp_client import _either, _text_of
from roll.envs.tools.toolbox import Toolbox
from roll.types.chat import ToolCall
from roll.types.trajectory import EpisodeError, Task

pytest.importorskip("mcp")

TASK = Task(id="t", source="s", payload={}, seed=0, tag="t", domain="d")
SERVER = str(Path(__file__).with_name("mcp_servers.py"))


def stdio(**more):
    return ToolConfig(name="demo", mcp=McpServer(command=(sys.executable, SERVER), **more))


async def called(toolbox, *calls):
    episode = toolbox.open(["demo"], TASK, {})
    return await episode.run([ToolCall("c", name, json.dumps(arguments)) for name, arguments in calls])


def test_a_server_over_standard_input_and_output_offers_its_tools_and_answers(monkeypatch):
    monkeypatch.setenv("PASSED", "yes")
    monkeypatch.setenv("KEPT", "secret")
    config = stdio(env={"GIVEN": "this"}, pass_env=("PASSED",))
    calls = [("add", {"a": 1, "b": 2}), ("fail", {}), ("add", {"a": "x"})]
    calls += [("variable", {"name": name}) for name in ("GIVEN", "PASSED", "KEPT")]
    with Toolbox([config]) as toolbox:
        add, *_ = toolbox.specs(["demo"])
        assert (add.name, add.description) == ("add", "Add two numbers")
        assert add.parameters["properties"]["a"]["type"] == "integer" and add.parameters["required"] == ["a", "b"]
        three, failed, wrong, *variables = asyncio.run(called(toolbox, *calls))
    assert three.text == "3" and not three.counts
    assert "Error executing tool fail" in failed.text and failed.counts == {"errors": 1.0}
    assert wrong.counts == {"errors": 1.0, "bad_arguments": 1.0}  # refused before the server is asked
    assert [one.text for one in variables] == ["this", "yes", "unset"]


def paged(pages):
    if not hasattr(importlib.import_module("mcp.server"), "MCPServer"):
        pytest.skip("the server of this test needs mcp 2.x")
    command = (sys.executable, str(Path(__file__).with_name("mcp_paged.py")), pages)
    return ToolConfig(name="demo", mcp=McpServer(command=command))


def test_all_pages_of_a_servers_list_are_read():
    with Toolbox([paged("3")]) as toolbox:
        assert [tool.name for tool in toolbox.specs(["demo"])] == ["tool_0", "tool_1", "tool_2"]
        (answer,) = asyncio.run(called(toolbox, ("tool_2", {})))
    assert answer.text == "tool_2"


def test_a_list_that_breaks_off_is_told_with_the_servers_words():
    with pytest.raises(ValueError, match=r"tools\.demo\.mcp: the server couldn't list its tools: "):
        Toolbox([paged("broken")])


def test_a_server_that_dies_fails_the_episode_and_is_started_again_for_the_next():
    with Toolbox([stdio(tools=("add", "die"))]) as toolbox:
        assert [spec.name for spec in toolbox.specs(["demo"])] == ["add", "die"]
        with pytest.raises(EpisodeError, match="the MCP server demo is gone") as raised:
            asyncio.run(called(toolbox, ("die", {})))
        assert raised.value.status == "env_error"
        (three,) = asyncio.run(called(toolbox, ("add", {"a": 1, "b": 2})))
        assert three.text == "3"


def test_a_server_over_http_is_called():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        config = ToolConfig(name="demo", mcp=McpServer(url=f"http://127.0.0.1:{port}/mcp", tools=("add",)))
        with Toolbox([config]) as toolbox:
            (three,) = asyncio.run(called(toolbox, ("add", {"a": 1, "b": 2})))
        assert three.text == "3"
    finally:
        server.kill()
        server.wait()


def test_a_server_is_sent_the_token_and_a_program_runs_in_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MCP_TOKEN", "secret")
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.headers.get("Authorization"))
            self.send_error(401)

        def log_message(self, *_):
            pass

    service = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=service.serve_forever)
    thread.start()
    try:
        server = McpServer(url=f"http://127.0.0.1:{service.server_port}/mcp", token_env="MCP_TOKEN", start_timeout_s=10)
        with pytest.raises(ValueError, match=r"tools\.demo\.mcp: "):
            Toolbox([ToolConfig(name="demo", mcp=server)])
        assert set(seen) == {"Bearer secret"}
    finally:
        service.shutdown()
        service.server_close()
        thread.join()
    where = McpServer(command=(sys.executable, "-c", "import os, sys; sys.exit(os.getcwd())"), cwd=str(tmp_path))
    with pytest.raises(ValueError, match=str(tmp_path)):
        Toolbox([ToolConfig(name="demo", mcp=where)])


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (McpServer(command=(sys.executable, "-c", "import sys; sys.exit('no such module')")), "no such module"),
        (McpServer(command=("/no/such/program",)), "can't be reached"),
        (McpServer(url="http://127.0.0.1:9/mcp"), "can't be reached"),
        (
            McpServer(command=(sys.executable, "-c", "import time; time.sleep(60)"), start_timeout_s=0.5),
            "start_timeout_s",
        ),
        (McpServer(command=(sys.executable, SERVER), tools=("ad",)), "no tool 'ad'; it has add"),
    ],
)
def test_a_server_that_does_not_start_is_named_with_what_it_said(server, said):
    begun = time.monotonic()
    with pytest.raises(ValueError, match=said) as raised:
        Toolbox([ToolConfig(name="demo", mcp=server)])
    assert str(raised.value).startswith("tools.demo.mcp: ") and time.monotonic() - begun < 20


def test_two_servers_with_a_tool_of_one_name_are_refused():
    with pytest.raises(ValueError, match="there is a tool 'add' already, of tools.demo"):
        Toolbox([stdio(), ToolConfig(name="other", mcp=stdio(tools=("add",)).mcp)])


def test_results_of_both_versions_of_the_package_are_read():
    text = SimpleNamespace(type="text", text="a")
    image = SimpleNamespace(type="image", data="...")
    inside = SimpleNamespace(type="resource", resource=SimpleNamespace(text="b"))
    assert _text_of(SimpleNamespace(content=[text, image, inside])) == "a\n[image that can't be shown]\nb"
    assert _text_of(SimpleNamespace(content=[], structuredContent={"x": 1})) == '{"x": 1}'
    for names in ({"isError": True}, {"is_error": True}):
        assert _either(SimpleNamespace(**names), "is_error", "isError") is True
