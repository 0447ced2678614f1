"""What the servers of ours say when they do not do what they are asked."""

from __future__ import annotations

from mcp.server.mcpserver.exceptions import ToolError


class RefusedError(ToolError, ValueError):
    """A sentence for whoever asked: the agent that called a tool, or the person who started the server.

    The ``mcp`` package shows an agent the words of a ToolError, and of nothing else.
    """
