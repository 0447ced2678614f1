"""What a wire protocol is: a module with these names, from request bodies to canonical ones and back.

Pure functions: no state, no input or output. Errors are ``WireError``; ``error`` puts them in the protocol's shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from envs.protocols.canonical import Reply, Request
from envs.protocols.errors import WireError

Action = Literal["complete", "count", "models", "model"]


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the protocol. ``params`` are added to those of the path and the query."""

    action: Action
    path: str
    method: Literal["GET", "POST"] = "POST"
    params: Mapping[str, str] = field(default_factory=dict)


class WireProtocol(Protocol):
    """The names that a protocol module has. Names are constants: ``PING`` is one keep-alive of a stream."""

    NAME: str
    ROUTES: tuple[Route, ...]
    PING: bytes
    STATUS: Mapping[int, int]
    """Where the protocol has another HTTP status for what ``WireError.status`` says."""

    def parse(self, body: Any, params: Mapping[str, str]) -> Request:
        """Read a body, as ``wire.read`` gives it. Raises ``WireError`` (400) that names the field."""
        ...

    def dump(self, reply: Reply, request: Request) -> Any:
        """The whole answer."""
        ...

    def stream(self, reply: Reply, request: Request) -> Iterator[bytes]:
        """The answer as the bytes of its events, the end of the stream included."""
        ...

    def count(self, tokens: int) -> Any:
        """The answer to the question how many tokens a prompt has."""
        ...

    def models(self, names: tuple[str, ...]) -> Any:
        """The list of models."""
        ...

    def model(self, name: str) -> Any:
        """One model."""
        ...

    def error(self, trouble: WireError) -> Any:
        """An error as the body of a response."""
        ...

    def error_event(self, trouble: WireError) -> bytes:
        """An error in the middle of a stream, the end of the stream included."""
        ...
