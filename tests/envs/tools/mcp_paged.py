"""An MCP server (2.x of the package) whose list of tools has several pages, over standard input and output.

python mcp_paged.py 3        # three pages with a tool each: tool_0, tool_1, tool_2
python mcp_paged.py broken   # the second page is an error
"""

from __future__ import annotations

import sys

import anyio
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

PAGES = 2 if sys.argv[1] == "broken" else int(sys.argv[1])


async def list_tools(_, asked):
    page = int(asked.cursor) if asked is not None and asked.cursor else 0
    if page and sys.argv[1] == "broken":
        raise RuntimeError("the second page is lost")
    tool = types.Tool(name=f"tool_{page}", description="A tool", input_schema={"type": "object"})
    return types.ListToolsResult(tools=[tool], next_cursor=str(page + 1) if page + 1 < PAGES else None)


async def call_tool(_, asked):
    return types.CallToolResult(content=[types.TextContent(type="text", text=asked.name)])


async def main():
    server = Server("paged", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


anyio.run(main)
