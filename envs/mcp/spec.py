"""The MCP servers that a task names: read with errors that name the field, and turned into commands.

    "mcp": [
      {"name": "docs", "kind": "search", "corpus": "corpus"},
      {"name": "web", "kind": "search", "api": {"url": "https://...?q={query}", "key_env": "SEARCH_KEY"}},
      {"name": "site", "kind": "fetch", "allow": ["docs.example.org", "https://example.org/api/"]},
      {"name": "notes", "kind": "files", "folder": "notes"},
      {"name": "own", "argv": ["python", "server.py"], "env": {"KEY": "${HOST_VARIABLE}"}},
      {"name": "near", "argv": ["python", "tools/server.py"], "where": "inside"}
    ]

Paths are relative to the task folder. Invariant: nothing that is read here shows ``reward/``, neither to a server
of ours nor to the inside of a sandbox.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envs.mcp.allowed import Allowed, parse
from envs.mcp.errors import RefusedError

NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
PYTHONS = ("python", "python3")
"""As the first word of an ``argv``: the interpreter that runs this, or that of the sandbox."""
_MOST_SERVERS = 16
_OURS = os.fspath(Path(__file__).parents[2])
Where = Literal["outside", "inside"]


class ServerFault(ValueError):  # noqa: N818 - one sentence of a TaskError
    """What is wrong with a task's servers: ``str`` of it is "field ...: got, expected"."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server as the task wants it.

    ``argv``: outside, what this machine runs in ``cwd``; inside, what a sandbox runs, where ``shown`` maps those
    arguments that are files of the task to the entry of the task folder that holds them. ``env``: a value
    ``${NAME}`` is taken from this machine's environment when the server starts.
    """

    name: str
    argv: tuple[str, ...]
    where: Where = "outside"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path("/")
    shown: Mapping[str, Path] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """``env`` with this machine's values filled in. Raises ServerFault for a variable that is not set."""
        found = {}
        for name, value in self.env.items():
            named = _HOST_VARIABLE.fullmatch(value)
            if named and named[1] not in os.environ:
                raise ServerFault(f"MCP server {self.name!r} needs the environment variable {named[1]}; set it")
            found[name] = os.environ[named[1]] if named else value
        return found


def read_servers(value: object, folder: Path) -> tuple[McpServer, ...]:
    """The servers of the field ``mcp`` of a task in ``folder``. Raises ServerFault."""
    if not isinstance(value, list):
        raise ServerFault(f"field 'mcp': expected a list of objects, got {_kind(value)}")
    if len(value) > _MOST_SERVERS:
        raise ServerFault(f"field 'mcp': got {len(value)} servers, expected at most {_MOST_SERVERS}")
    found: dict[str, McpServer] = {}
    for number, entry in enumerate(value):
        reader = _Entry(f"mcp[{number}]", entry, folder)
        server = reader.server()
        if server.name in found:
            raise reader.fault("name", f"{server.name!r} is also the name of another server of this task")
        found[server.name] = server
    return tuple(found.values())


def _kind(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


class _Entry:
    """One entry of the list, with the place that errors name."""

    def __init__(self, place: str, entry: object, folder: Path) -> None:
        self.place = place
        self.folder = folder.resolve()
        if not isinstance(entry, dict):
            raise ServerFault(f"field {place!r}: expected an object, got {_kind(entry)}")
        self.entry: dict[str, Any] = entry

    def fault(self, name: str, words: str) -> ServerFault:
        return ServerFault(f"field '{self.place}.{name}': {words}")

    def server(self) -> McpServer:
        name = self.text("name")
        if not NAME.fullmatch(name):
            raise self.fault("name", f"got {name!r}, expected a small letter and at most 31 of a-z, 0-9, '_', '-'")
        if "argv" in self.entry and "kind" not in self.entry:
            return self.program(name)
        kind = self.text("kind", f"one of {sorted(_KINDS)}, or 'argv' instead of 'kind'")
        if kind not in _KINDS:
            raise self.fault("kind", f"got {kind!r}, expected one of {sorted(_KINDS)}, or 'argv' instead of 'kind'")
        if self.entry.get("where", "outside") != "outside":
            raise self.fault("where", f"a server of kind {kind!r} runs outside; leave it out, or give an 'argv'")
        options, env, known = _KINDS[kind](self)
        self.only("name", "where", "kind", *known)
        argv = (sys.executable, "-P", "-m", "envs.mcp", kind, *options)
        return McpServer(name, argv, env={"PYTHONPATH": _OURS, **env})

    def program(self, name: str) -> McpServer:
        """A server of the task's own."""
        self.only("name", "where", "argv", "env")
        argv = self.texts("argv")
        script = argv[1] if argv[0] in PYTHONS and len(argv) > 1 else ""
        if script.endswith(".py") and not script.startswith("/") and not (self.folder / script).is_file():
            raise self.fault("argv", f"there is no file {self.folder / script}")
        env = self.entry.get("env", {})
        if not isinstance(env, dict) or not all(isinstance(text, str) for text in env.values()):
            raise self.fault("env", f"expected an object of texts, got {_kind(env)}")
        if odd := [variable for variable in env if not _VARIABLE.fullmatch(variable)]:
            raise self.fault("env", f"got the name {odd[0]!r}, expected letters, digits and underscores")
        where = self.entry.get("where", "outside")
        if where == "inside":
            return self.inside(name, argv, env)
        if where != "outside":
            raise self.fault("where", f"got {where!r}, expected 'outside' or 'inside'")
        program = sys.executable if argv[0] in PYTHONS else argv[0]
        if not (shutil.which(program) or os.access(self.folder / program, os.X_OK)):
            raise self.fault("argv", f"there is no program {program!r} on this machine or in {self.folder}")
        program = program if shutil.which(program) else os.fspath(self.folder / program)
        return McpServer(name, (program, *argv[1:]), "outside", env, self.folder)

    def inside(self, name: str, argv: list[str], env: dict[str, str]) -> McpServer:
        for variable, value in env.items():
            if _HOST_VARIABLE.fullmatch(value):
                raise self.fault("env", f"{variable} is {value!r}, but nothing of this machine's is shown inside")
        shown = {}
        for argument in argv:
            if not argument.startswith(("-", "/")) and (self.folder / argument).exists():
                self.path("argv", argument)
                # A file comes with what lies beside it: the whole entry of the task folder that holds it.
                first = Path(os.path.normpath(argument)).parts[0]
                self.path("argv", first)
                shown[argument] = self.folder / first
        return McpServer(name, tuple(argv), "inside", env, shown=shown)

    def only(self, *known: str) -> None:
        for name in self.entry:
            if name not in known:
                raise self.fault(name, f"unknown here, expected some of {sorted(known)}")

    def text(self, name: str, expected: str = "a text") -> str:
        value = self.given(name, expected)
        if not isinstance(value, str) or not value.strip():
            raise self.fault(name, f"expected {expected}, got {_kind(value)}")
        return value

    def texts(self, name: str) -> list[str]:
        expected = "a list of texts that is not empty"
        value = self.given(name, expected)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise self.fault(name, f"expected {expected}, got {_kind(value)}")
        return value

    def given(self, name: str, expected: str) -> Any:
        if name not in self.entry:
            raise self.fault(name, f"is missing; expected {expected}")
        return self.entry[name]

    def path(self, name: str, text: str) -> Path:
        """A path of the task folder that neither leaves it nor shows its grader."""
        path = (self.folder / text).resolve()
        reward = (self.folder / "reward").resolve()
        if not path.is_relative_to(self.folder) or path == self.folder:
            raise self.fault(name, f"{text!r} is not below the task folder {self.folder}")
        if path.is_relative_to(reward) or reward.is_relative_to(path):
            raise self.fault(name, f"{text!r} shows the task's reward/, which no agent may see")
        return path

    def existing_folder(self, name: str) -> str:
        path = self.path(name, self.text(name))
        if not path.is_dir():
            raise self.fault(name, f"there is no folder {path}")
        return os.fspath(path)


Options = tuple[list[str], dict[str, str], tuple[str, ...]]
"""Arguments of ``python -m envs.mcp KIND``, environment, and the fields that were read."""


def _search(entry: _Entry) -> Options:
    if "api" not in entry.entry:
        return ["--corpus", entry.existing_folder("corpus")], {}, ("corpus",)
    api = _Entry(f"{entry.place}.api", entry.entry["api"], entry.folder)
    url = api.text("url")
    try:
        parse(url)
    except RefusedError as error:
        raise api.fault("url", str(error)) from None
    if "{query}" not in url and "post" not in api.entry:
        raise api.fault("url", f"got {url!r}, expected {{query}} in it, or 'post' with the field that takes the query")
    options = ["--api", url]
    env = {}
    names = ("key_env", "key_header", "post", "results")
    for name in names:
        if name in api.entry:
            options += [f"--{name.replace('_', '-')}", api.text(name)]
    if "key_env" in api.entry:
        if not _VARIABLE.fullmatch(api.text("key_env")):
            raise api.fault("key_env", f"got {api.text('key_env')!r}, expected the name of an environment variable")
        env[api.text("key_env")] = "${" + api.text("key_env") + "}"
    api.only("url", *names)
    return options, env, ("api",)


def _fetch(entry: _Entry) -> Options:
    try:
        Allowed(entry.texts("allow"))
    except RefusedError as error:
        raise entry.fault("allow", str(error)) from None
    return list(_repeated("--allow", entry.texts("allow"))), {}, ("allow",)


def _files(entry: _Entry) -> Options:
    return ["--folder", entry.existing_folder("folder")], {}, ("folder",)


def _repeated(option: str, values: list[str]) -> Iterator[str]:
    for value in values:
        yield f"{option}={value}"


_KINDS = {"search": _search, "fetch": _fetch, "files": _files}
