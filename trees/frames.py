"""Frames: what the codec's bytes consist of.

Invariant: no damaged input is unpacked. Every frame carries its lengths and a digest of all of it, and whatever the
bytes, reading raises CodecError and nothing else.

A frame is a head, a digest and a payload, all little-endian::

    magic 4 | version 1 | kind 1 | flags 1 | place 2 | of 2 | payload bytes 4 | bytes unpacked 4 | digest 16 | payload

The frames of a group follow each other, numbered from 0. Their payloads are one zstandard stream: each is compressed
with those before it as history, so that what several have in common is stored once. A digest covers the digest
before it: frames of a group cannot be swapped or left out. A frame that stands alone is a group of one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import zstandard

MAGIC = b"RNTR"
VERSION = 2
TREE, RECORDS = 1, 2
FLOAT16 = 1
"""Flag of a frame whose log-probabilities are rounded."""
MOST_BYTES = 1 << 28
"""Of a payload, packed and unpacked: over ten million tokens."""
MOST_FRAMES = (1 << 16) - 1
"""In a group."""

_HEAD = struct.Struct("<4sBBBHHII")
_DIGEST_BYTES = 16
_START_BYTES = _HEAD.size + _DIGEST_BYTES
_NAMES = {TREE: "trees", RECORDS: "call records"}
_SLICE = 1 << 11
"""Payload bytes unpacked at a time. zstandard makes at most 32,768 of one: a bomb is noticed at 64 MB."""
_WINDOW_LOG = 25
"""Of the bytes of history that a frame refers to; zstandard takes less for less."""


class CodecError(ValueError):
    """Input that is not what was written; says what was read before it, what was got and expected."""


class Head(NamedTuple):
    """What a frame says of itself."""

    kind: int
    """``TREE`` or ``RECORDS``."""
    flags: int
    place: int
    """In its group, from 0."""
    of: int
    """Frames in the group; 1 for a frame that stands alone."""
    packed: int
    """Bytes of the payload."""
    unpacked: int
    """Bytes that it unpacks to."""

    @property
    def float16(self) -> bool:
        """Whether log-probabilities are rounded to half precision."""
        return bool(self.flags & FLOAT16)


class Frame(NamedTuple):
    """A frame whose digest is right."""

    head: Head
    payload: bytes
    where: str
    """For messages: what was read before it."""


def pack(kind: int, bodies: Sequence[bytes], level: int, flags: int = 0) -> Iterator[bytes]:
    """The frames of a group. ValueError for none or over ``MOST_FRAMES``, and for a body over ``MOST_BYTES``."""
    if not 0 < len(bodies) <= MOST_FRAMES:
        raise ValueError(f"got a group of {len(bodies)}, expected 1 to {MOST_FRAMES}")
    size = sum(map(len, bodies))
    # What is far back counts as well: trees of a group can be larger than the history that a level looks at.
    settings = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=size, window_log=_WINDOW_LOG, enable_ldm=True
    )
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj(size=size)
    digest = b""
    for place, body in enumerate(bodies):
        last = place == len(bodies) - 1
        end = zstandard.COMPRESSOBJ_FLUSH_FINISH if last else zstandard.COMPRESSOBJ_FLUSH_BLOCK
        payload = stream.compress(body) + stream.flush(end)
        if max(len(body), len(payload)) > MOST_BYTES:
            raise ValueError(f"got {len(body)} bytes for one frame, expected at most {MOST_BYTES}: write less into one")
        head = _HEAD.pack(MAGIC, VERSION, kind, flags, place, len(bodies), len(payload), len(body))
        digest = _digest(head, digest, payload)
        yield head + digest + payload


def scan(file: BinaryIO, kind: int) -> Iterator[Frame]:
    """The frames of a binary file, one at a time, still packed. Raises CodecError at the first that is not right."""
    count = offset = place = of = 0
    digest = b""
    while True:
        where = f"after {count} whole {_NAMES[kind]}, at byte {offset}"
        start = file.read(_START_BYTES)
        if not start and place == of:
            return
        if not start:
            raise CodecError(f"{where}: got {place} of a group, expected {of}: cut short")
        head, said = _head(start, kind, where)
        if place == of:
            place, of, digest = 0, head.of, b""
        if (head.place, head.of) != (place, of) or place >= of:
            raise CodecError(f"{where}: got number {head.place} of {head.of} of a group, expected {place} of {of}")
        payload = file.read(head.packed)
        if len(payload) != head.packed:
            raise CodecError(f"{where}: got {len(payload)} bytes of payload, expected {head.packed}: cut short")
        digest = _digest(start[: _HEAD.size], digest, payload)
        if digest != said:
            raise CodecError(f"{where}: the digest of {head.packed} bytes of payload is not the one written: damaged")
        yield Frame(head, payload, where)
        count, offset, place = count + 1, offset + _START_BYTES + head.packed, place + 1


def unpack(frames: Iterator[Frame]) -> Iterator[tuple[Frame, bytes]]:
    """The frames of ``scan`` with the bodies that ``pack`` was given. Raises CodecError."""
    for frame in frames:
        if frame.head.place == 0:
            stream = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG).decompressobj()
        yield frame, _inflate(stream, frame)


def _inflate(stream: zstandard.ZstdDecompressionObj, frame: Frame) -> bytes:
    payload, expected = frame.payload, frame.head.unpacked
    parts, size = [], 0
    for at in range(0, len(payload), _SLICE):
        try:
            parts.append(stream.decompress(payload[at : at + _SLICE]))
        except zstandard.ZstdError as error:
            raise CodecError(f"{frame.where}: the payload cannot be unpacked: {error}") from error
        size += len(parts[-1])
        if size > expected:
            break
    if size != expected:
        more = "or more " if size > expected else ""
        raise CodecError(f"{frame.where}: the payload unpacks to {size} {more}bytes, expected {expected}")
    return b"".join(parts)


def _digest(head: bytes, before: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(head + before + payload, digest_size=_DIGEST_BYTES).digest()


def _head(start: bytes, expected: int, where: str) -> tuple[Head, bytes]:
    """The head and the digest."""
    if len(start) < _START_BYTES:
        raise CodecError(f"{where}: got {len(start)} bytes of a frame's head, expected {_START_BYTES}: cut short")
    magic, version, *values = _HEAD.unpack(start[: _HEAD.size])
    head = Head(*values)
    if magic != MAGIC:
        raise CodecError(f"{where}: got {magic!r}, expected {MAGIC!r}: not a frame of trees")
    if version != VERSION:
        raise CodecError(
            f"{where}: got format version {version}, expected {VERSION}: read it with the release that wrote it"
        )
    if head.kind != expected:
        raise CodecError(
            f"{where}: got a frame of kind {head.kind}, expected {expected} ({TREE} a tree, {RECORDS} call records)"
        )
    if max(head.packed, head.unpacked) > MOST_BYTES or head.flags & ~FLOAT16:
        raise CodecError(
            f"{where}: got flags {head.flags} and {head.packed} bytes for {head.unpacked}, expected flags of "
            f"{FLOAT16} and at most {MOST_BYTES} bytes: damaged"
        )
    return head, start[_HEAD.size :]
