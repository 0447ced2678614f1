"""OpenClaw: speaks OpenAI Responses here, the one of its modes that only ever appends to the history."""

from __future__ import annotations

import json

from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.program import Program, error, json_document, mcp_servers, no_result
from envs.harnesses.external.releases import require
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task

_MOST_ANSWER = 8192
_STATE = ".openclaw-state"


class OpenClaw:
    """OpenClaw, one task per process (npm openclaw)."""

    name = "openclaw"
    takes_mcp = True
    program = Program(
        name,
        "node_modules/openclaw/openclaw.mjs",
        node=True,
        least={"memory_mb": 6144, "cpu_s": 300.0, "processes": 512},
    )

    def __init__(self, api: str = "openai-responses") -> None:
        """``api``: ``openai-responses``, ``openai-completions`` or ``anthropic-messages``."""
        require(self.name)
        self.api = api

    def command(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits, servers: tuple[ToolServer, ...] = ()
    ) -> Command:
        model = {
            "id": endpoint.model,
            "name": endpoint.model,
            "reasoning": True,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": endpoint.context,
            "maxTokens": min(_MOST_ANSWER, endpoint.context // 4),
        }
        provider = {"baseUrl": "${REINS_BASE_URL}", "apiKey": "${REINS_KEY}", "api": self.api, "models": [model]}
        config = {
            "models": {"mode": "replace", "providers": {"reins": provider}},
            "agents": {"defaults": {"model": {"primary": f"reins/{endpoint.model}"}}},
            "mcp": {"servers": mcp_servers(servers)},
        }
        path = sandbox.put_home("openclaw.json", json.dumps(config))
        state = sandbox.put_home(f"{_STATE}/.keep", "").rpartition("/")[0]
        suffix = "" if self.api == "anthropic-messages" else "/v1"
        env = {"REINS_BASE_URL": f"{endpoint.base_url}{suffix}", "REINS_KEY": endpoint.key}
        options = ("--config", path, "--model", f"reins/{endpoint.model}", "--cwd", sandbox.inside_workspace)
        arguments = ("agent", "exec", *options, "--state-dir", state, "--json", "--", task.instruction)
        return self.program.start(sandbox, arguments, env, limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        result = json_document(finished.stdout)
        if finished.code is None or "ok" not in result:
            return no_result(finished)
        return (True, "final answer") if result["ok"] else error(json.dumps(result.get("error") or result))
