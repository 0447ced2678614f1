"""The log of every session on disk, from which another replica of the proxy goes on with it.

Invariant: a call is in the log before its answer leaves, so a crash loses at most the calls under way. A log is
named by hashes: no key is ever written. An entry that was cut short is left out, and makes way for the next.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from actors.session_contract import SessionSpec
from actors.session_key import ROUTE_LENGTH, digest, route
from configs.proxy import SessionLimits
from envs.protocols.canonical import Message, ToolCall
from trees.record import CallRecord, VersionSpan
from trees.turns import PrefixKey, Turn

logger = logging.getLogger(__name__)

_FORMAT = 1
_ARRAYS = {"prompt_ids": "<i4", "sampled_ids": "<i4", "logprobs": "<f4"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One ended call: its record, and what matching needs of its conversation.

    ``fed``: keys of the turns that came in after those of the parent. ``kept``: the whole conversation, where a
    later request may name this call as the one that it goes on from.
    """

    record: CallRecord
    prefix: PrefixKey
    fed: tuple[str, ...]
    reply: Turn | None
    kept: tuple[Message, ...] | None = None
    agent: str = ""


class Logged(NamedTuple):
    """What a log holds. ``opened``: seconds since the epoch; ``entries``: in order of arrival.

    ``limit`` and ``failed``: what had ended the session, as ``Summary`` names it.
    """

    spec: SessionSpec
    opened: float
    entries: list[Entry]
    closed: bool
    limit: str
    failed: str


class Journal:
    """The logs of one folder. Several processes may have the same folder; one of them writes a log at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, spec: SessionSpec, key: str, opened: float) -> int:
        """Begin the log of a session; its size in bytes. ``opened``: seconds since the epoch."""
        plain = asdict(spec) | {"limits": spec.limits.model_dump() if spec.limits else None}
        return self._path(key).write_bytes(_pack({"format": _FORMAT, "spec": plain, "opened": opened}))

    def append(self, key: str, entry: Entry) -> int:
        """Write an ended call; the size of the log after it, in bytes. Raises ``OSError``, and then wrote nothing."""
        plain = {
            "record": _plain_record(entry.record),
            "agent": entry.agent,
            "prefix": list(entry.prefix),
            "fed": list(entry.fed),
            "reply": None if entry.reply is None else asdict(entry.reply),
            "kept": None if entry.kept is None else list(map(_plain_message, entry.kept)),
        }
        return self._add(key, plain)

    def mark(self, key: str, limit: str, failed: str, closed: bool) -> int:
        """Write what ended a session, or that nothing does any more; returns and raises as ``append``."""
        return self._add(key, {"limit": limit, "failed": failed, "closed": closed})

    def _add(self, key: str, plain: dict[str, Any]) -> int:
        data = _pack(plain)
        # Never created here: a log without its head cannot be read.
        file = os.open(self._path(key), os.O_WRONLY | os.O_APPEND)
        try:
            written = os.write(file, data)
            size = os.lseek(file, 0, os.SEEK_CUR)
            if written < len(data):
                os.ftruncate(file, size - written)
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be written")
        finally:
            os.close(file)
        return size

    def size(self, key: str) -> int:
        """Bytes of a log; 0 without one."""
        try:
            return self._path(key).stat().st_size
        except OSError:
            return 0

    def read(self, key: str) -> Logged | None:
        """The session of a key; None without a log that can be read. A last entry that was cut short is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head, parts, size = _parts(data)
        if head is None:
            logger.warning("%s: not the log of a session in format %d", path.name, _FORMAT)
            return None
        if size < len(data):
            logger.warning("%s: %d bytes at its end are no entry and are removed", path.name, len(data) - size)
            os.truncate(path, size)
        limits = head["spec"].pop("limits")
        spec = SessionSpec(**head["spec"], limits=None if limits is None else SessionLimits(**limits))
        mark: dict[str, Any] = next((part for part in reversed(parts) if "closed" in part), {})
        ended = mark.get("closed", False), mark.get("limit", ""), mark.get("failed", "")
        return Logged(spec, head["opened"], _entries(parts), *ended)

    def records(self, session: str) -> list[CallRecord]:
        """The records of a session whose key is not at hand, in order of arrival."""
        found: list[CallRecord] = []
        for path in self.folder.glob(f"{route(session)}-*.log"):
            head, parts, _ = _parts(path.read_bytes())
            if head is not None and head["spec"]["id"] == session:
                found += [entry.record for entry in _entries(parts)]
        return sorted(found, key=lambda record: record.ordinal)

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def forget(self, session: str) -> None:
        """Remove the logs of a session whose key is not at hand."""
        for path in self.folder.glob(f"{route(session)}-*.log"):
            head, _, _ = _parts(path.read_bytes())
            if head is not None and head["spec"]["id"] == session:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:ROUTE_LENGTH] if key[:ROUTE_LENGTH].isalnum() else 'none'}-{digest(key)}.log"


def _entry(plain: dict[str, Any]) -> Entry:
    reply, kept = plain["reply"], plain["kept"]
    return Entry(
        record=_record(plain["record"]),
        prefix=PrefixKey(*plain["prefix"]),
        fed=tuple(plain["fed"]),
        reply=None if reply is None else Turn(**reply | {"call_ids": tuple(reply["call_ids"])}),
        kept=None if kept is None else tuple(map(_message, kept)),
        agent=plain["agent"],
    )


def _plain_record(record: CallRecord) -> dict[str, Any]:
    """A record as plain values. Not compressed, unlike ``trees.codec``: a log lives as long as its session."""
    plain = {each.name: getattr(record, each.name) for each in fields(record)}
    plain |= {name: plain[name].astype(kind).tobytes() for name, kind in _ARRAYS.items()}
    return plain | {"versions": [[span.version, span.start, span.end] for span in record.versions]}


def _record(plain: dict[str, Any]) -> CallRecord:
    arrays = {name: np.frombuffer(plain[name], kind) for name, kind in _ARRAYS.items()}
    return CallRecord(**plain | arrays | {"versions": tuple(VersionSpan(*span) for span in plain["versions"])})


def _plain_message(message: Message) -> dict[str, Any]:
    """Arguments as JSON text: they may hold numbers and depths that msgpack has no place for."""
    plain = {each.name: getattr(message, each.name) for each in fields(message)}
    return plain | {"tool_calls": [[call.id, call.name, json.dumps(call.arguments)] for call in message.tool_calls]}


def _message(plain: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(call, name, json.loads(arguments)) for call, name, arguments in plain["tool_calls"])
    return Message(**plain | {"tool_calls": calls})


def _pack(value: dict[str, Any]) -> bytes:
    body = msgpack.packb(value)
    return len(body).to_bytes(8, "little") + hashlib.blake2b(body, digest_size=8).digest() + body


def _parts(data: bytes) -> tuple[dict[str, Any] | None, list[dict[str, Any]], int]:
    """The head of a log, None where it is none of ours; what follows it; and how many bytes are whole."""
    found = list(_unpack(data))
    whole = found[-1][1] if found else 0
    head = found[0][0] if found else {}
    return (head if head.get("format") == _FORMAT else None), [part for part, _ in found[1:]], whole


def _entries(parts: list[dict[str, Any]]) -> list[Entry]:
    entries = [_entry(part) for part in parts if "record" in part]
    return sorted(entries, key=lambda entry: entry.record.ordinal)


def _unpack(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """The whole entries from the start on, each with where it ends."""
    at = 0
    while at + 16 <= len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        body = data[at + 16 : at + 16 + length]
        if len(body) < length or hashlib.blake2b(body, digest_size=8).digest() != data[at + 8 : at + 16]:
            return
        at += 16 + length
        yield msgpack.unpackb(body), at
