"""Reading what somebody else wrote: texts and their fields, with faults that name file, line and field.

Invariant: nothing is read through a link, nothing past a bound, and no name that is read leads out of a folder.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from envs.sandbox.files import Bounds
from envs.tasks.faults import TaskError

MOST_BYTES = 64 << 20
"""Of a file that is read as a whole."""
_MOST_YAML = 1 << 20
_LONGEST_NAME = 255
_LONGEST_PATH = Bounds().path_bytes
_LONGEST_ID = 200
_LARGEST = 1e12
"""Of numbers: their sums stay finite."""
_SHOWN = 80


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """A UTF-8 text file. Raises TaskError for a link, for what is no file, past ``most`` bytes, for other bytes."""
    check_file(path, most)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TaskError([f"{path}: cannot be read: {error.strerror}"]) from None
    return decoded(content, path)


def check_file(path: Path, most: int) -> None:
    """Raises TaskError for a link, for what is no file, and past ``most`` bytes."""
    try:
        info = path.lstat()
    except OSError as error:
        raise TaskError([f"{path}: cannot be read: {error.strerror}"]) from None
    if not stat.S_ISREG(info.st_mode):
        raise TaskError([f"{path}: expected a file, got {'a link' if path.is_symlink() else 'something else'}"])
    if info.st_size > most:
        raise TaskError([f"{path}: got {info.st_size} bytes, expected at most {most}"])


def decoded(content: bytes, path: Path, line: int = 1) -> str:
    """The text that ``content`` is, which begins at ``line`` of ``path``. Raises TaskError where it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        raise TaskError([f"{path}:{line}: not UTF-8 at byte {error.start}; save the file as UTF-8"]) from None


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON that ``pairs`` are. Raises ValueError for a field that stands there twice."""
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"the field {name!r} stands there twice")
        names.add(name)
    return dict(pairs)


def parse_json(text: str, path: Path, line: int = 1) -> dict[str, Any]:
    """The JSON object that ``text`` is; ``line`` is where it begins in ``path``. Raises TaskError."""
    try:
        entry = json.loads(text, object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        where = f"{path}:{line + error.lineno - 1}:{error.colno}"
        raise TaskError([f"{where}: not valid JSON: {error.msg}"]) from error
    except (RecursionError, ValueError) as error:
        raise TaskError([f"{path}:{line}: not JSON that can be read: {error}"]) from error
    if not isinstance(entry, dict):
        raise TaskError([f"{path}:{line}: expected a JSON object, got {type(entry).__name__}"])
    return entry


class _Yaml(yaml.SafeLoader):
    """Without aliases, by which a few lines can stand for more values than fit into memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias, which is not read; write the value out", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names: set[str] = set()
        for key, _ in node.value:
            if key.value in names if isinstance(key.value, str) else False:
                problem = f"the field {key.value[:_SHOWN]!r} stands there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, path: Path, line: int = 1) -> dict[str, Any]:
    """The fields that ``text`` holds as YAML; ``line`` is where it begins in ``path``. Raises TaskError."""
    if len(text) > _MOST_YAML:
        raise TaskError([f"{path}:{line}: got {len(text)} characters of YAML, expected at most {_MOST_YAML}"])
    try:
        # It is a SafeLoader: it makes plain values and nothing else.
        values = yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{line + (mark.line if mark else 0)}"
        raise TaskError([f"{where}: not valid YAML: {getattr(error, 'problem', error)}"]) from None
    # Its constructors fail in ways of their own on a tag that does not fit its value, as in `!!bool maybe`.
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise TaskError([f"{path}:{line}: not YAML that can be read: {type(error).__name__}: {error}"]) from None
    if not isinstance(values, dict):
        raise TaskError([f"{path}:{line}: expected fields, got {type(values).__name__}"])
    return values


def line_of(text: str, field: str) -> int:
    """The line on which a field of a JSON object begins; 1 when it is not there."""
    before, found, _ = text.partition(f'"{field}"')
    return before.count("\n") + 1 if found else 1


KINDS: dict[type, str] = {str: "a text", dict: "an object", list: "a list", float: "a number"}


class Fields:
    """The fields of one task, each read once with a check of its kind. Every method raises TaskError."""

    def __init__(self, values: Mapping[str, Any], where: Callable[[str], str]) -> None:
        """``where``: file and line of a field, as ``tasks.csv:3``."""
        self.values = values
        self._where = where

    def fault(self, name: str, words: str) -> TaskError:
        return TaskError([f"{self._where(name)}: field {name!r}{words}"])

    def of(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a field, of ``kind``. None as ``default``: it must be there."""
        value = self.values.get(name, default)
        if value is None:
            raise self.fault(name, f" is missing; expected {KINDS[kind]}")
        given = not isinstance(value, bool) and isinstance(value, int | float) if kind is float else None
        if not (isinstance(value, kind) if given is None else given):
            shown = f"{type(value).__name__} {_shown(value)!r}"
            raise self.fault(name, f": expected {KINDS[kind]}, got {shown}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text that is not empty and can be sent to a model; ``default`` may be empty."""
        value: str = self.of(name, str, default)
        if not value.strip() and value != default:
            raise self.fault(name, " is empty; expected a text")
        if "\0" in value:
            raise self.fault(name, " holds a zero byte")
        if not _encodes(value):
            raise self.fault(name, " holds half a surrogate pair")
        return value

    def texts(self, name: str, among: Sequence[str] = ()) -> tuple[str, ...]:
        """A list of texts as ``text`` has them, of those in ``among`` where it is given; none where it is missing."""
        values = self.of(name, list, [])
        for value in values:
            if not isinstance(value, str) or not value.strip() or (among and value not in among):
                expected = f"some of {', '.join(among)}" if among else "texts that are not empty"
                raise self.fault(name, f": got {_shown(value)!r}, expected {expected}")
            Fields({name: value}, self._where).text(name)
        return tuple(values)

    def content(self, name: str, value: object) -> str:
        """``value``, part of the field ``name``, as what a file will hold."""
        if not isinstance(value, str):
            raise self.fault(name, f": got {type(value).__name__} for a file, expected a text")
        if not _encodes(value):
            raise self.fault(name, " holds half a surrogate pair")
        return value

    def only(self, known: Collection[str]) -> None:
        """No field but those: what nothing reads is mostly a slip of the pen in the name of one that is read."""
        if unknown := sorted(set(self.values) - set(known)):
            raise self.fault(unknown[0], f": unknown here, expected some of {', '.join(sorted(known))}")

    def identifier(self, name: str) -> str:
        value = self.text(name).strip()
        if len(value) > _LONGEST_ID or not value.isprintable():
            raise self.fault(name, f": got {value[:_SHOWN]!r}, expected at most {_LONGEST_ID} printable characters")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number of at least 0; its sums with others stay finite."""
        value = self.of(name, float, default)
        if not 0 <= value <= _LARGEST:
            raise self.fault(
                name, f": got {_shown(value)}, expected a finite number of at least 0 and at most {_LARGEST:g}"
            )
        return float(value)

    def choice(self, name: str, among: tuple[str, ...], default: str | None = None) -> str:
        value = self.text(name, default)
        if value not in among:
            raise self.fault(name, f": got {value[:_SHOWN]!r}, expected one of {', '.join(among)}")
        return value

    def within(self, name: str, default: dict[str, Any] | None = None) -> Fields:
        """The fields of the object that is the field ``name``."""
        return Fields(self.of(name, dict, default), lambda _: f"{self._where(name)}: in {name}")

    def entry(self, name: str, number: int, value: object) -> Fields:
        """The fields of ``value``, which is entry ``number`` of the list in the field ``name``."""
        if not isinstance(value, dict):
            raise self.fault(name, f", entry {number}: expected an object, got {type(value).__name__}")
        return Fields(value, lambda _: f"{self._where(name)}: {name}[{number}]")

    def name_in_workspace(self, name: str, value: object) -> str:
        """``value``, part of the field ``name``, as the path of a file below the workspace."""
        if fault := path_fault(value):
            raise self.fault(name, f": got {_shown(value)!r}, {fault}")
        return str(PurePosixPath(str(value)))

    def file_below(self, name: str, folder: Path, value: object) -> Path:
        """``value``, part of the field ``name``, as a file that is there below ``folder``."""
        inside = self.name_in_workspace(name, value)
        path = folder / inside
        if not path.is_file():
            raise self.fault(name, f": there is no file {path}; put it there")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise self.fault(name, f": {path} is a link that leads out of {folder}")
        return path


def path_fault(value: object) -> str:
    """Why a text cannot be the path of a file below a folder; empty when it can."""
    if not isinstance(value, str) or not value.strip():
        return "expected the path of a file"
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or value.startswith("~") or "\\" in value:
        return "expected a path below the workspace, without a '/' in front, '..' or a backslash"
    if not path.parts or value.endswith("/"):
        return "expected the path of a file"
    return place_fault(value)


def place_fault(value: str) -> str:
    """Why a workspace can have no file at a relative path; empty when it can."""
    path = PurePosixPath(value)
    if "\0" in value or not _encodes(value):
        return "expected a path without zero bytes and halves of surrogate pairs"
    if any(len(part.encode()) > _LONGEST_NAME for part in path.parts):
        return f"expected names of at most {_LONGEST_NAME} bytes"
    if len(value.encode()) > _LONGEST_PATH:
        return f"expected a path of at most {_LONGEST_PATH} bytes"
    if path.parts[0] == "reward":
        return "expected another folder than reward/, which is the grader's"
    return ""


def _encodes(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: object) -> str:
    """The head of a value, for a fault."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of very many digits"
    return str(value)[:_SHOWN]


def plain_metadata(values: Mapping[Any, Any]) -> dict[str, str | int | float | bool]:
    """What of ``values`` is a plain value, which every reader of JSON takes."""
    return {
        name: value for name, value in values.items() if _is_plain(name) and isinstance(name, str) and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return _encodes(value)
    if isinstance(value, int):
        return value.bit_length() <= 64
    return isinstance(value, float) and math.isfinite(value)


def files_below(folder: Path) -> dict[str, Path]:
    """Every file below ``folder`` by its path there; a folder that is missing has none.

    Raises TaskError for a link, a pipe, a device: none of them can be handed to an agent as a file.
    """
    if not os.path.lexists(folder):
        return {}
    if folder.is_symlink() or not folder.is_dir():
        raise TaskError([f"{folder}: expected a folder, not a link"])
    found: dict[str, Path] = {}
    # Not by recursion: whoever made the folder chose the depth.
    pending = [folder]
    while pending:
        here = pending.pop()
        try:
            inside = [(path, path.lstat().st_mode) for path in sorted(here.iterdir())]
        except OSError as error:
            raise TaskError([f"{folder}: what lies below it cannot be read: {error.strerror}"]) from None
        for path, mode in inside:
            if stat.S_ISDIR(mode):
                pending.append(path)
            elif stat.S_ISREG(mode):
                found[path.relative_to(folder).as_posix()] = path
            else:
                kind = "a link" if stat.S_ISLNK(mode) else "a device"
                raise TaskError([f"{path}: expected a file or a folder, got {kind}"])
    return dict(sorted(found.items()))
