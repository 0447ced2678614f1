"""The adapter of a program that is given as a template in the settings: a harness without a line of Python.

Invariant: a template that cannot be filled in is an error before anything starts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from pathlib import PurePosixPath

from configs.harness import HarnessConfig
from envs.harnesses.base import Endpoint, ToolServer
from envs.sandbox.base import Command, Finished, Limits, Mount, Sandbox, SandboxError
from envs.sandbox.relay import PLACEHOLDER
from envs.tasks.task import Task

_NAMES = ("instruction", "base_url", "key", "model", "context", "max_turns", "workspace", "home", "python")
_MOUNT = re.compile(r"[A-Za-z0-9_-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class CommandHarness:
    """Any program, from `harness.argv`, `env`, `files` and `mounts`."""

    name = "command"
    takes_mcp = False

    def __init__(self, config: HarnessConfig) -> None:
        """Raises ValueError: a placeholder that does not exist, or a path or name that cannot be used."""
        self._config = config
        known = {*_NAMES, *(f"mounts.{name}" for name in config.mounts)}
        for number, argument in enumerate(config.argv):
            _check(f"harness.argv[{number}]", argument, known)
        for name, value in config.env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"harness.env: got the name {name!r}, expected letters, digits and underscores")
            _check(f"harness.env.{name}", value, known)
        for name, text in config.files.items():
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"harness.files: got {name!r}, expected a path below the home without '..'")
            _check(f"harness.files[{name!r}]", text, known)
        for name, host in config.mounts.items():
            if not _MOUNT.fullmatch(name):
                raise ValueError(f"harness.mounts: got the name {name!r}, expected letters, digits, '_' and '-'")
            if not host.expanduser().exists():
                raise ValueError(f"harness.mounts.{name}: {host}: no such file or folder on this machine")

    def command(
        self,
        sandbox: Sandbox,
        task: Task,
        endpoint: Endpoint,
        limits: Limits,
        servers: tuple[ToolServer, ...] = (),  # noqa: ARG002 - it takes none
    ) -> Command:
        """Raises SandboxError where a file names the base URL and the backend does not know its port yet."""
        config = self._config
        # Another user's processes read them: links are followed here, not inside.
        mounts = {
            name: Mount(host.expanduser().resolve(), f"/opt/harness/{name}") for name, host in config.mounts.items()
        }
        values = {
            "instruction": task.instruction,
            "base_url": endpoint.base_url,
            "key": endpoint.key,
            "model": endpoint.model,
            "context": str(endpoint.context),
            "max_turns": str(config.max_turns),
            "workspace": sandbox.inside_workspace,
            "home": sandbox.inside_home,
            "python": sandbox.python,
            **{f"mounts.{name}": sandbox.inside(mount) for name, mount in mounts.items()},
        }
        argv = tuple(_filled(argument, values) for argument in config.argv)
        env = {**sandbox.environment(), **{name: _filled(value, values) for name, value in config.env.items()}}
        # In files nothing is filled in later, as the relay does in arguments and environment.
        values["base_url"] = endpoint.base_url.replace(PLACEHOLDER, str(sandbox.relay_port))
        for name, template in config.files.items():
            if not sandbox.relay_port and "base_url" in _placeholders(template):
                raise SandboxError(
                    f"harness.files[{name!r}] names {{base_url}}, whose port this backend knows only when the program "
                    "starts; put it into harness.env or harness.argv, or use a backend with a network of its own"
                )
            sandbox.put_home(name, _filled(template, values))
        return Command(argv, env, tuple(mounts.values()), limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        if finished.code is None:
            return False, "time limit"
        if finished.code in self._config.done_codes:
            return True, f"exit code {finished.code}"
        if finished.code in self._config.max_turns_codes:
            return False, "max turns"
        return False, f"error: exit code {finished.code}"


def _check(where: str, template: str, known: set[str]) -> None:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; a brace that is meant is doubled: {{{{ or }}}}") from None
    for _, name, spec, conversion in parts:
        if name is not None and (name not in known or spec or conversion):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(
                f"{where}: got {{{shown}}}, expected one of {', '.join(sorted(known))}; "
                "a brace that is meant is doubled: {{ or }}"
            )


def _placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def _filled(template: str, values: Mapping[str, str]) -> str:
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if name is None else values[name]) for text, name, _, _ in parts)
