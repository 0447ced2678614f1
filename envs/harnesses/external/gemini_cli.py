"""Gemini CLI: speaks Gemini's generateContent, streaming."""

from __future__ import annotations

import json

from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.program import Program, error, json_document, mcp_servers, no_result
from envs.harnesses.external.releases import require
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task


class GeminiCli:
    """Gemini CLI (npm @google/gemini-cli)."""

    name = "gemini_cli"
    takes_mcp = True

    program = Program(name, "node_modules/@google/gemini-cli/bundle/gemini.js", node=True)

    def __init__(self) -> None:
        require(self.name)

    def command(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits, servers: tuple[ToolServer, ...] = ()
    ) -> Command:
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False},
            "mcpServers": mcp_servers(servers, trust=True),
        }
        sandbox.put_home(".gemini/settings.json", json.dumps(settings))
        env = {"GEMINI_API_KEY": endpoint.key, "GOOGLE_GEMINI_BASE_URL": endpoint.base_url}
        options = ("--yolo", "--skip-trust", "-m", endpoint.model, "--output-format", "json")
        return self.program.start(sandbox, (*options, f"--prompt={task.instruction}"), env, limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        result = json_document(finished.stdout) or json_document(finished.stderr)
        if finished.code is None or not result:
            return no_result(finished)
        if result.get("error"):
            return error(json.dumps(result["error"]))
        return finished.code == 0, "final answer"
