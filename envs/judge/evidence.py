"""What a judge is shown of an outcome: the files that the agent made or changed, and what it said.

Everything in it is the agent's, or can be made to look like the agent's: it is bounded, read without following a link
and without a parser that the agent could aim at.
"""

from __future__ import annotations

import html
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

_MOST_FILES = 2000
_MOST_READ = 4 << 20
_LEAST = 400
_LARGEST_OFFICE = 32 << 20
"""Bytes: the list of what such a file holds, which the agent may have made as long as the file, is read whole."""
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How office programs pack. Other ways ask for memory that the file itself names."""
_CHUNK = 1 << 20
_OFFICE = {
    ".docx": re.compile(r"word/document\.xml"),
    ".xlsx": re.compile(r"xl/(?:sharedStrings|worksheets/[^/]+)\.xml"),
    ".pptx": re.compile(r"ppt/slides/[^/]+\.xml"),
}
_ENDS = re.compile(r"</(?:w:p|w:tr|row|si|a:p|c)>")
_TAG = re.compile(r"<[^<>]*>")


def evidence(workspace: Path, inputs: Path, final_message: str, transcript: str, most: int) -> str:
    """All that a judge may see, in at most about ``most`` characters.

    ``workspace`` is the frozen outcome, ``inputs`` the files that the task began with.
    """
    files, made = _files(workspace, inputs)
    parts = [f"Final message:\n{cut(final_message, most // 4)}"]
    if transcript:
        parts.append(f"Transcript, one JSON object for each message:\n{cut(transcript, most // 3)}")
    parts.append("Files in the workspace:\n" + cut("\n".join(files) or "(none)", most // 8))
    left = most - sum(map(len, parts))
    share = max(_LEAST, left // max(1, len(made)))
    for name, path in made:
        if left < _LEAST:
            parts.append(f"(File {name!r} and those after it are not shown: there is no room.)")
            break
        shown = f"File {name!r}:\n{cut(_text(path), max(share, left // 2))}"
        parts.append(shown)
        left -= len(shown)
    return "\n\n".join(parts)


def cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _files(workspace: Path, inputs: Path) -> tuple[list[str], list[tuple[str, Path]]]:
    """A line for each file, and those that are new or changed."""
    lines: list[str] = []
    made: list[tuple[str, Path]] = []
    for name, path in _walk(workspace):
        if len(lines) == _MOST_FILES:
            lines.append("(more files are not listed)")
            break
        how = _compared(path, inputs / name)
        lines.append(f"{name!r}, {path.lstat().st_size} bytes, {how}")
        if how != "as at the start":
            made.append((name, path))
    return lines, made


def _compared(path: Path, before: Path) -> str:
    if not before.is_file():
        return "new"
    if path.lstat().st_size != before.stat().st_size:
        return "changed"
    with path.open("rb") as one, before.open("rb") as other:
        while content := one.read(_CHUNK):
            if content != other.read(_CHUNK):
                return "changed"
    return "as at the start"


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(folder) / name
            if stat.S_ISREG(path.lstat().st_mode):
                yield path.relative_to(root).as_posix(), path


def _text(path: Path) -> str:
    """What a file says, where it says something in text or is a document of an office program."""
    if wanted := _OFFICE.get(path.suffix.lower()):
        return _office_text(path, wanted)
    with path.open("rb") as opened:
        content = opened.read(_MOST_READ)
    if b"\0" in content:
        return f"(not a text: {path.lstat().st_size} bytes)"
    return content.decode("utf-8", "replace")


def _office_text(path: Path, wanted: re.Pattern[str]) -> str:
    if (large := path.lstat().st_size) > _LARGEST_OFFICE:
        return f"(a document of {large} bytes, which is too large to be read)"
    said, left = [], _MOST_READ
    try:
        with zipfile.ZipFile(path) as packed:
            for member in sorted(packed.infolist(), key=lambda member: member.filename):
                if wanted.fullmatch(member.filename) and member.compress_type in _PACKED and left > 0:
                    with packed.open(member) as opened:
                        content = opened.read(left).decode("utf-8", "replace")
                    left -= len(content)
                    said.append(f"[{member.filename}]\n" + html.unescape(_TAG.sub(" ", _ENDS.sub("\n", content))))
    # What zipfile raises for bytes that are none of an archive: it has no error of its own for most of them.
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError) as error:
        return f"(not a document that can be read: {type(error).__name__})"
    return re.sub(r"[ \t]+", " ", "\n".join(said))
