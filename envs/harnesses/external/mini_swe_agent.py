"""mini-swe-agent: one tool, ``bash``; speaks OpenAI chat without streaming."""

from __future__ import annotations

from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.program import error, json_lines, no_result, python_minor, shown
from envs.harnesses.external.releases import require
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task

_TRAJECTORY = "mini-trajectory.json"
# Its own exit code is always 0; how it ended stands in the trajectory. `-c` keeps the workspace off the path.
_START = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
path = sys.argv.pop(1)
from minisweagent.run.mini import app
try:
    app()
finally:
    try:
        info = json.load(open(path))["info"]
    except (OSError, ValueError, LookupError):
        info = {}
    print(json.dumps({"exit_status": info.get("exit_status")}), flush=True)
"""
_LIMITS = {"LimitsExceeded": "max turns"}
_OWN_ENDS = {"Submitted": "final answer", "RepeatedFormatError": "repeated format error"}


class MiniSweAgent:
    """mini-swe-agent: a bash tool and nothing else (PyPI mini-swe-agent)."""

    name = "mini_swe_agent"
    takes_mcp = False

    def __init__(self) -> None:
        require(self.name)

    def command(
        self,
        sandbox: Sandbox,
        task: Task,
        endpoint: Endpoint,
        limits: Limits,
        servers: tuple[ToolServer, ...] = (),  # noqa: ARG002 - it takes none
    ) -> Command:
        mount = shown(self.name)
        trajectory = f"{sandbox.inside_home}/{_TRAJECTORY}"
        env = {
            **sandbox.environment(),
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            # Else it asks the network for prices, three times.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        packages = f"{sandbox.inside(mount)}/python{python_minor(sandbox.python)}"
        argv = (sandbox.python, "-I", "-S", "-c", _START, packages, trajectory)
        options = ("-m", f"openai/{endpoint.model}", "--yolo", "--exit-immediately", "-l", "0", "-o", trajectory)
        return Command((*argv, *options, f"--task={task.instruction}"), env, (mount,), limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        status = next(json_lines(finished.stdout), {}).get("exit_status")
        if finished.code is None or not status:
            return no_result(finished)
        if status in _LIMITS:
            return False, _LIMITS[status]
        return (True, _OWN_ENDS[status]) if status in _OWN_ENDS else error(status)
