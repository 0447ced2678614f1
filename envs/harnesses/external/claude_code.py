"""Claude Code: speaks Anthropic Messages, streaming."""

from __future__ import annotations

import json

from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.program import Program, error, json_lines, mcp_servers, no_result
from envs.harnesses.external.releases import require
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task


class ClaudeCode:
    """Claude Code (npm @anthropic-ai/claude-code)."""

    name = "claude_code"
    takes_mcp = True

    program = Program(name, "node_modules/@anthropic-ai/claude-code-linux-{arch}/claude", least={"memory_mb": 4096})

    def __init__(self) -> None:
        require(self.name)

    def command(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits, servers: tuple[ToolServer, ...] = ()
    ) -> Command:
        env = {
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.key,
            "ANTHROPIC_MODEL": endpoint.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_AUTOUPDATER": "1",
            # Without a sandbox of ours it would refuse to run as root with all permissions.
            "IS_SANDBOX": "1",
        }
        tools: tuple[str, ...] = ()
        if servers:
            path = sandbox.put_home(".claude-mcp.json", json.dumps({"mcpServers": mcp_servers(servers)}))
            tools = ("--strict-mcp-config", f"--mcp-config={path}")
        options = ("--permission-mode", "bypassPermissions", "--output-format", "json", *tools)
        return self.program.start(sandbox, (*options, "-p", "--", task.instruction), env, limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        result = next((line for line in json_lines(finished.stdout) if line.get("type") == "result"), None)
        if finished.code is None or result is None:
            return no_result(finished)
        if result.get("subtype") == "error_max_turns":
            return False, "max turns"
        if not result.get("is_error"):
            return True, "final answer"
        message = str(result.get("result"))
        # The policy's own doing, time and again: its answer was cut at the token limit.
        return (True, "answer cut") if "output token maximum" in message else error(message)
