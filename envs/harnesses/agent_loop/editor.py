"""The ``file_editor`` tool: view, create, str_replace and insert on text files, with errors that help."""

# pathlib alone would double the start-up time of this program.
# ruff: noqa: PTH103, PTH112, PTH113, PTH118, PTH120, PTH123, PTH208
from __future__ import annotations

import os


class ToolError(Exception):
    """A text for the model about what was wrong with its call."""


def edit(arguments: dict) -> str:
    """Carry out one call. Raises ToolError; the file is then as it was."""
    command = text_of(arguments, "command")
    path = text_of(arguments, "path")
    if command == "view":
        return view(path)
    if command == "create":
        return create(path, text_of(arguments, "file_text"))
    if command == "str_replace":
        return replace(path, text_of(arguments, "old_str"), text_of(arguments, "new_str", ""))
    if command == "insert":
        return insert(path, arguments.get("insert_line"), text_of(arguments, "new_str"))
    raise ToolError(f"unknown command {command!r}; expected view, create, str_replace or insert")


def text_of(arguments: dict, name: str, default: str | None = None) -> str:
    value = arguments.get(name, default)
    if value is None:
        raise ToolError(f"missing argument {name!r}")
    if not isinstance(value, str):
        raise ToolError(f"argument {name!r} must be a string, got {type(value).__name__}")
    return value


def _read(path: str) -> str:
    try:
        if not os.path.isfile(path):
            if os.path.isdir(path):
                raise ToolError(f"{path} is a folder")
            raise ToolError(f"no such file: {path}")
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not a text file (not UTF-8)") from None
    except (OSError, ValueError) as error:
        raise ToolError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _write(path: str, text: str) -> None:
    try:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except UnicodeEncodeError:
        raise ToolError("the text holds characters that cannot be written as UTF-8") from None
    except (OSError, ValueError) as error:
        raise ToolError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def view(path: str) -> str:
    if os.path.isdir(path):
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            raise ToolError(f"cannot read {path}: {error.strerror}") from None
        return "".join(f"{name}/\n" if os.path.isdir(os.path.join(path, name)) else f"{name}\n" for name in names)
    return _read(path)


def create(path: str, text: str) -> str:
    if os.path.isdir(path):
        raise ToolError(f"{path} is a folder")
    _write(path, text)
    return f"wrote {path}\n"


def replace(path: str, old: str, new: str) -> str:
    text = _read(path)
    if not old:
        raise ToolError("old_str is empty; use insert to add text")
    count = text.count(old)
    if count == 0:
        raise ToolError(f"old_str does not occur in {path}")
    if count > 1:
        raise ToolError(f"old_str occurs {count} times in {path}; give more of the text around it")
    _write(path, text.replace(old, new))
    return f"edited {path}\n"


def insert(path: str, line: object, new: str) -> str:
    if isinstance(line, bool) or not isinstance(line, int):
        raise ToolError(f"argument 'insert_line' must be an integer, got {line!r}")
    lines = _read(path).splitlines(keepends=True)
    if not 0 <= line <= len(lines):
        raise ToolError(f"insert_line {line} is outside of {path}; expected 0 to {len(lines)}")
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    if new and not new.endswith("\n"):
        new += "\n"
    _write(path, "".join([*lines[:line], new, *lines[line:]]))
    return f"edited {path}\n"
