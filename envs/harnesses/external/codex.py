"""Codex: speaks OpenAI Responses, streaming, with the whole history in every call."""

from __future__ import annotations

import json
import platform

from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.program import MCP_START_S, Program, error, json_lines, no_result
from envs.harnesses.external.releases import require
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task

_CONFIG = """\
model = "{model}"
model_provider = "reins"
model_context_window = {context}
model_auto_compact_token_limit = {compact}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false
"""
# The port is not known when files are written, so what names it stands in the arguments.
_PROVIDER = 'model_providers.reins={{name="reins",base_url="{url}/v1",env_key="REINS_KEY",wire_api="responses"}}'
_QUIET = ("plugins", "apps", "remote_plugin")
_TARGET = f"{platform.machine().lower()}-unknown-linux-musl"


def _mcp_table(server: ToolServer) -> str:
    def toml(value: object) -> str:
        # Texts and lists of them are written in TOML as in JSON, save for pairs of escapes.
        return json.dumps(value, ensure_ascii=False)

    env = ", ".join(f"{toml(name)} = {toml(value)}" for name, value in server.env.items())
    return (
        f"\n[mcp_servers.{server.name}]\n"
        f"command = {toml(server.argv[0])}\nargs = {toml(server.argv[1:])}\nenv = {{ {env} }}\n"
        # Else it asks the policy before it knows the tools, where a server is slow to start.
        f"required = true\nstartup_timeout_sec = {MCP_START_S}\n"
    )


class Codex:
    """Codex (npm @openai/codex)."""

    name = "codex"
    takes_mcp = True

    program = Program(name, f"node_modules/@openai/codex-linux-{{arch}}/vendor/{_TARGET}/bin/codex")

    def __init__(self) -> None:
        require(self.name)

    def command(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits, servers: tuple[ToolServer, ...] = ()
    ) -> Command:
        compact = endpoint.context * 4 // 5
        config = _CONFIG.format(model=endpoint.model, context=endpoint.context, compact=compact)
        sandbox.put_home(".codex/config.toml", config + "".join(map(_mcp_table, servers)))
        arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
        for feature in _QUIET:
            arguments += ["--disable", feature]
        arguments += ["-c", _PROVIDER.format(url=endpoint.base_url), "--", task.instruction]
        return self.program.start(sandbox, tuple(arguments), {"REINS_KEY": endpoint.key}, limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        for event in json_lines(finished.stdout):
            if event.get("type") == "turn.completed":
                return True, "final answer"
            if event.get("type") == "turn.failed":
                message = (event.get("error") or {}).get("message", "")
                # The policy's own doing: its answer was cut at the token limit.
                return (True, "answer cut") if "max_output_tokens" in message else error(message)
        return no_result(finished)
