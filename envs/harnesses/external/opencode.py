"""OpenCode: speaks OpenAI chat, streaming."""

from __future__ import annotations

import json

from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.program import MCP_START_S, Program, error, json_lines, no_result
from envs.harnesses.external.releases import require
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task

_MOST_ANSWER = 8192


class OpenCode:
    """OpenCode (npm opencode-ai)."""

    name = "opencode"
    takes_mcp = True

    program = Program(name, "node_modules/opencode-linux-{arch}/bin/opencode", least={"memory_mb": 4096})

    def __init__(self) -> None:
        require(self.name)

    def command(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits, servers: tuple[ToolServer, ...] = ()
    ) -> Command:
        model = {
            "name": endpoint.model,
            "tool_call": True,
            "limit": {"context": endpoint.context, "output": min(_MOST_ANSWER, endpoint.context // 4)},
        }
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:REINS_BASE_URL}", "apiKey": "{env:REINS_KEY}"},
            "models": {endpoint.model: model},
        }
        config = {
            "provider": {"reins": provider},
            "enabled_providers": ["reins"],
            "model": f"reins/{endpoint.model}",
            "small_model": f"reins/{endpoint.model}",
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "mcp": {
                server.name: {
                    "type": "local",
                    "command": list(server.argv),
                    "environment": dict(server.env),
                    "enabled": True,
                    "timeout": MCP_START_S * 1000,
                }
                for server in servers
            },
        }
        sandbox.put_home(".config/opencode/opencode.json", json.dumps(config))
        env = {
            "REINS_BASE_URL": f"{endpoint.base_url}/v1",
            "REINS_KEY": endpoint.key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        arguments = ("run", "--format", "json", "--auto", "--", task.instruction)
        return self.program.start(sandbox, arguments, env, limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        for event in json_lines(finished.stdout):
            if event.get("type") == "error":
                return error(json.dumps(event.get("error")))
            if event.get("type") == "step_finish":
                reason = event.get("part", {}).get("reason", "")
                return finished.code == 0, "final answer" if reason == "stop" else f"ended: {reason}"
        return no_result(finished)
