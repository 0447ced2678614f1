"""Which addresses may be fetched: a list of hosts and prefixes, and no private address that is not itself listed.

An entry is a host (``docs.example.org``), a host and port (``127.0.0.1:8080``), or the beginning of an address
(``https://example.org/api/``). A host is itself: its subdomains are other hosts. A prefix ends at a ``/`` of the
path.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from envs.mcp.errors import RefusedError

_PORTS = {"http": 80, "https": 443}


class NotAllowedError(RefusedError):
    """An address that may not be fetched; the message names it and the rule."""


@dataclass(frozen=True, slots=True)
class Address:
    """A web address in parts; ``host`` in small letters, ``port`` never left open, ``path`` begins with ``/``."""

    scheme: str
    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class _Entry:
    host: str
    port: int | None
    """None: the usual port of either scheme."""
    scheme: str = ""
    path: str = "/"

    def covers(self, address: Address) -> bool:
        port = self.port or _PORTS[address.scheme]
        if (self.host, port) != (address.host, address.port) or self.scheme not in ("", address.scheme):
            return False
        return address.path == self.path or address.path.startswith(self.path.rstrip("/") + "/")


def parse(url: str) -> Address:
    """Raises NotAllowedError for what is no plain http or https address."""
    if not url.isprintable() or any(character in url for character in " \\"):
        raise NotAllowedError(f"{url[:200]!r} is no web address")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise NotAllowedError(f"{url[:200]!r} is no web address: {error}") from None
    if parts.scheme not in _PORTS or not host:
        raise NotAllowedError(f"{url[:200]!r}: expected an address that begins with http:// or https:// and a host")
    if "@" in parts.netloc:
        raise NotAllowedError(f"{url[:200]!r}: a name or password in an address is not allowed")
    try:
        host = host.rstrip(".").encode("idna").decode().lower()
    except UnicodeError:
        raise NotAllowedError(f"{url[:200]!r}: {host!r} is no name of a host") from None
    # A server may undo the escapes before it follows the dots.
    if {".", ".."} & set(unquote(unquote(parts.path)).replace("\\", "/").split("/")):
        raise NotAllowedError(f"{url[:200]!r}: a path with '.' or '..' in it is not allowed")
    return Address(parts.scheme, host, port or _PORTS[parts.scheme], parts.path or "/")


class Allowed:
    """The list."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises RefusedError for an entry that is neither a host nor the beginning of an address."""
        self._entries = [_entry(text) for text in entries]
        self._text = ", ".join(
            f"{e.scheme and e.scheme + '://'}{e.host}{e.path if e.scheme else ''}" for e in self._entries
        )
        if not self._entries:
            raise RefusedError("expected at least one host or address that may be fetched")

    def check(self, url: str) -> Address:
        """Raises NotAllowedError unless an entry covers the address."""
        address = parse(url)
        if not any(entry.covers(address) for entry in self._entries):
            raise NotAllowedError(f"{url[:200]!r} may not be fetched; allowed: {self._text[:500]}")
        return address

    def check_ip(self, address: Address, ip: str) -> None:
        """Raises NotAllowedError where a host leads to a private address that is not listed with its port."""
        number = ipaddress.ip_address(ip.partition("%")[0])
        if isinstance(number, ipaddress.IPv6Address):
            number = number.ipv4_mapped or number.sixtofour or number
        if number.is_global and not number.is_multicast:
            return
        if any(e.host == str(number) and (e.port or _PORTS[address.scheme]) == address.port for e in self._entries):
            return
        raise NotAllowedError(f"{address.host} leads to {ip}, which is no public address and is not listed itself")


def _entry(text: str) -> _Entry:
    try:
        if "://" in text:
            address = parse(text)
            return _Entry(address.host, address.port, address.scheme, address.path)
        address = parse(f"http://{text}/")
        if "*" in address.host:
            raise NotAllowedError("a host is itself: name each subdomain")
        if address.path != "/" or "/" in text:
            raise NotAllowedError("a path needs http:// or https:// before it")
        return _Entry(address.host, None if _has_no_port(text) else address.port)
    except NotAllowedError as error:
        raise RefusedError(f"{text!r}: expected a host, host:port, or the beginning of an address ({error})") from None


def _has_no_port(text: str) -> bool:
    return urlsplit(f"//{text}").port is None
