"""MCP servers of the package's own examples: a few tools, over standard input and output or HTTP.

python mcp_servers.py            # standard input and output
python mcp_servers.py 8123       # http://127.0.0.1:8123/mcp
"""

from __future__ import annotations

import os
import sys

try:
    from mcp.server import MCPServer as Server  # 2.x
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # 1.x

server = Server("Demo")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers"""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")


@server.tool()
def variable(name: str) -> str:
    """Show a variable of the environment."""
    return os.environ.get(name, "unset")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
