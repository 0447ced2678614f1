"""What the adapters share: showing an installed program to a sandbox, and reading what it prints."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.harnesses.base import ToolServer
from envs.harnesses.external.releases import architecture, releases
from envs.sandbox.base import Command, Finished, Limits, Mount, Sandbox

_INSIDE = "/opt/harness"
NODE = "node_modules/node-linux-{arch}/bin/node"
_WORDS = 500


_LEAST = {"memory_mb": 2048, "cpu_s": 120.0, "processes": 256, "file_mb": 256, "open_files": 4096}


@dataclass(frozen=True, slots=True)
class Program:
    """An installed program. ``path`` is relative to its folder; with ``node`` it is a script for Node.

    ``least``: limits (``Limits``) that it needs to start at all, where they are more than most need; smaller ones are
    raised to them.
    """

    harness: str
    path: str
    node: bool = False
    least: Mapping[str, float] = field(default_factory=dict)

    def host_argv(self) -> list[str]:
        """How this machine itself starts the program."""
        argv = [os.fspath(releases()[self.harness].folder / own_path(self.path))]
        return [os.fspath(releases()["node"].folder / own_path(NODE)), *argv] if self.node else argv

    def start(
        self, sandbox: Sandbox, arguments: tuple[str, ...], environment: dict[str, str], limits: Limits
    ) -> Command:
        """The command that runs the program with ``arguments``; ``environment`` is added to the sandbox's own."""
        mounts = tuple(shown(name) for name in ([self.harness, "node"] if self.node else [self.harness]))
        argv = [f"{sandbox.inside(mounts[0])}/{own_path(self.path)}"]
        if self.node:
            argv.insert(0, f"{sandbox.inside(mounts[1])}/{own_path(NODE)}")
        least = {**_LEAST, **self.least}
        limits = replace(limits, **{name: max(value, getattr(limits, name)) for name, value in least.items()})
        return Command((*argv, *arguments), {**sandbox.environment(), **environment}, mounts, limits)


def shown(name: str) -> Mount:
    """The folder of a release, read-only at a place of its own."""
    return Mount(releases()[name].folder, f"{_INSIDE}/{name}")


def own_path(path: str) -> str:
    """A path with this machine's architecture filled in."""
    return path.replace("{arch}", architecture()) if "{arch}" in path else path


@functools.cache
def python_minor(python: str) -> str:
    """``3.11`` of an interpreter as a sandbox names it: what its name says, or it itself where this machine has it;
    else it is the one that runs this.
    """
    if said := re.fullmatch(r"python(\d+\.\d+)", Path(python).name):
        return said[1]
    if not Path(python).exists():
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-I", "-S", "-c", show], capture_output=True, text=True, check=True).stdout.strip()


MCP_START_S = 60
"""How long a harness waits for an MCP server, which may have to read a corpus first."""


def mcp_servers(servers: tuple[ToolServer, ...], **more: object) -> dict[str, dict[str, object]]:
    """The form ``{name: {command, args, env}}`` that most programs have, with ``more`` in each."""
    return {
        server.name: {"command": server.argv[0], "args": list(server.argv[1:]), "env": dict(server.env), **more}
        for server in servers
    }


def json_lines(output: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects that stand on lines of their own, the last first."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def json_document(output: bytes) -> dict[str, Any]:
    """The JSON object that ends the output, written over one or several lines; empty where there is none."""
    text = output.decode(errors="replace").strip()
    start = 0 if text.startswith("{") else text.rfind("\n{") + 1
    try:
        value = json.loads(text[start:])
    except ValueError:
        return next(json_lines(output), {})
    return value if isinstance(value, dict) else {}


def no_result(finished: Finished) -> tuple[bool, str]:
    """The end of a program that left no result to read."""
    return False, "time limit" if finished.code is None else f"no result (exit code {finished.code})"


def error(message: object) -> tuple[bool, str]:
    return False, f"error: {message}"[:_WORDS]
