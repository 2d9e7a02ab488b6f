"""An MCP server with one tool: what an item of a shop costs. `python examples/mcp/server.py`; it needs the package `mcp`, 2 or newer."""

from __future__ import annotations

import hashlib

from mcp.server import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    """Price of an item."""
    return str(price_of(item))


def price_of(item: str) -> int:
    """Prices have one digit, and never change."""
    return 1 + hashlib.blake2b(item.encode()).digest()[0] % 9


if __name__ == "__main__":
    server.run()
