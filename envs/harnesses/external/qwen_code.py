"""Qwen Code: speaks OpenAI chat, streaming; its compaction does not stream."""

from __future__ import annotations

import json

from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.program import Program, error, json_lines, mcp_servers, no_result
from envs.harnesses.external.releases import require
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task

_API_ERROR = "[API Error:"


class QwenCode:
    """Qwen Code (npm @qwen-code/qwen-code)."""

    name = "qwen_code"
    takes_mcp = True

    program = Program(name, "node_modules/@qwen-code/qwen-code/cli.js", node=True)

    def __init__(self) -> None:
        require(self.name)

    def command(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits, servers: tuple[ToolServer, ...] = ()
    ) -> Command:
        settings = {
            "security": {"auth": {"selectedType": "openai"}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"disableAutoUpdate": True},
            "model": {"generationConfig": {"contextWindowSize": endpoint.context}},
            "mcpServers": mcp_servers(servers, trust=True),
        }
        sandbox.put_home(".qwen/settings.json", json.dumps(settings))
        env = {
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
            "OPENAI_MODEL": endpoint.model,
        }
        arguments = ("--yolo", "--output-format", "stream-json", f"--prompt={task.instruction}")
        return self.program.start(sandbox, arguments, env, limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        result = next((line for line in json_lines(finished.stdout) if line.get("type") == "result"), None)
        if finished.code is None or result is None:
            return no_result(finished)
        text = str(result.get("result", ""))
        # It calls an answer that broke off a success; the text is all that tells.
        if result.get("is_error") or text.startswith(_API_ERROR):
            return error(text or result.get("error"))
        return True, "final answer"
