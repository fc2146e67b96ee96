"""A server of tools for tests: `python tool_server.py` on stdin and stdout, `python tool_server.py PORT` over HTTP."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")
counted = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """How often this process was asked."""
    global counted
    counted += 1
    return counted


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no such page")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1])) if sys.argv[1:] else server.run()
