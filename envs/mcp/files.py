"""An MCP server that shows one folder of text files, read-only. No path and no link leads out of it."""

from __future__ import annotations

import argparse
import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path

from mcp.server import MCPServer

from envs.mcp.errors import RefusedError

_MOST_BYTES = 4 << 20
_MOST_NAMES = 500
_MOST_LINES = 2000
_MOST_CHARACTERS = 50_000

HELP = "show one folder of text files, read-only"
EXAMPLES = """examples:
  python -m envs.mcp files --folder notes      tools list_files and read_file over the folder notes
"""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder whose files can be named by paths relative to it. Errors are RefusedErrors that say what to name."""

    root: Path

    def file(self, path: str) -> Path:
        """The file of that path, as it really lies."""
        try:
            found = (self.root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise RefusedError(f"there is no file {path!r}; name one as it is listed") from None
        if not found.is_relative_to(self.root) or not found.is_file():
            raise RefusedError(f"{path!r} is no file of this folder; name one as it is listed")
        return found

    def names(self) -> list[str]:
        """Every file by its path, in order; links are left out."""
        paths = [Path(folder, name) for folder, _, files in os.walk(self.root) for name in files]
        return sorted(p.relative_to(self.root).as_posix() for p in paths if p.is_file() and not p.is_symlink())

    def text(self, path: str) -> str:
        with self.file(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise RefusedError(f"{path!r} holds more than {_MOST_BYTES} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise RefusedError(f"{path!r} is not text in UTF-8") from None

    def lines(self, path: str, first: int, count: int) -> str:
        """Lines ``first`` (from 1) and on, with a last line that says where to go on if any are left."""
        if first < 1 or count < 1:
            raise RefusedError(f"first_line and lines count from 1, got {first} and {count}")
        lines = self.text(path).splitlines(keepends=True)
        shown: list[str] = []
        size = 0
        for line in lines[first - 1 : first - 1 + min(count, _MOST_LINES)]:
            if size + len(line) > _MOST_CHARACTERS:
                shown += [] if shown else [line[:_MOST_CHARACTERS] + "[...]\n"]
                break
            shown.append(line)
            size += len(line)
        after = first + len(shown)
        if after <= len(lines):
            shown.append(f"[line {after} of {len(lines)} is next: first_line={after}]")
        return "".join(shown) or f"[{path} has {len(lines)} lines]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, help="the folder that is shown")


def make(arguments: argparse.Namespace) -> MCPServer:
    """Raises RefusedError when there is no such folder."""
    if not arguments.folder.is_dir():
        raise RefusedError(f"--folder {arguments.folder}: no such folder")
    folder = Folder(arguments.folder.resolve())
    server = MCPServer("files", instructions="Text files that can be listed and read, and not changed.")

    @server.tool(structured_output=False)
    def list_files(pattern: str = "*") -> str:
        """List the files by path. `pattern` as in a shell, e.g. `*.md` or `reports/*`; `*` also stands for `/`."""
        names = [name for name in folder.names() if fnmatch.fnmatchcase(name, pattern)]
        left_out = [f"[{len(names) - _MOST_NAMES} more; give a narrower pattern]"] if len(names) > _MOST_NAMES else []
        return "\n".join(names[:_MOST_NAMES] + left_out) or f"[no file matches {pattern}]"

    @server.tool(structured_output=False)
    def read_file(path: str, first_line: int = 1, lines: int = 500) -> str:
        """Read a text file, from `first_line` on, at most `lines` lines."""
        return folder.lines(path, first_line, lines)

    return server
