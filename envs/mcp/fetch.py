"""An MCP server that fetches pages of hosts on a list.

Every address on the way is checked, redirects included, and so is what its host resolves to; the connection goes to
the very number that was checked. Size and time are bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import urljoin

import httpx
from mcp.server import MCPServer

from envs.mcp.allowed import Address, Allowed, NotAllowedError
from envs.mcp.errors import RefusedError

MAX_BYTES = 2 << 20
TIMEOUT_S = 20.0
_MOST_REDIRECTS = 5
_MOST_CHARACTERS = 50_000
_AGENT = "reins-fetch/1"
_TEXTUAL = ("text/", "json", "xml", "javascript", "yaml", "x-www-form-urlencoded")
_HIDDEN = ("script", "style", "noscript", "template", "svg")
_BREAKS = ("p", "br", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "section", "title")

HELP = "fetch pages of hosts on a list"
EXAMPLES = """examples:
  python -m envs.mcp fetch --allow docs.example.org --allow https://example.org/api/
      tool fetch; other hosts, other paths of example.org, and redirects to them are refused
  python -m envs.mcp fetch --allow 127.0.0.1:8000 --max-bytes 100000 --timeout 5
      a private address is fetched only where it is listed itself
"""


@dataclass(frozen=True, slots=True)
class Page:
    """What came: the address after redirects, the status, the type and the text."""

    url: str
    status: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Fetcher:
    """``max_bytes`` of a body, ``timeout_s`` seconds for the whole way, redirects included."""

    allowed: Allowed
    max_bytes: int = MAX_BYTES
    timeout_s: float = TIMEOUT_S

    async def fetch(self, url: str) -> Page:
        """Raises RefusedError, in words for the agent, when there is no page to show."""
        try:
            async with asyncio.timeout(self.timeout_s), self._client() as client:
                for _ in range(_MOST_REDIRECTS + 1):
                    found = await self._one(client, url)
                    if isinstance(found, Page):
                        return found
                    url = found
        except TimeoutError:
            raise RefusedError(f"{url[:200]} did not answer within {self.timeout_s:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise RefusedError(f"{url[:200]} could not be fetched: {type(error).__name__}: {error}") from None
        raise RefusedError(f"more than {_MOST_REDIRECTS} redirects; the last led to {url[:200]}")

    def _client(self) -> httpx.AsyncClient:
        # A proxy of the environment's would connect to numbers that nobody checked.
        return httpx.AsyncClient(trust_env=False, timeout=self.timeout_s, follow_redirects=False)

    async def _one(self, client: httpx.AsyncClient, url: str) -> Page | str:
        """The page, or the address that it redirects to."""
        address = self.allowed.check(url)
        number = await self._number(address)
        target = httpx.URL(url)
        request = client.build_request(
            "GET",
            target.copy_with(host=number),
            headers={"Host": target.netloc.decode("ascii"), "User-Agent": _AGENT, "Accept-Encoding": "identity"},
            extensions={"sni_hostname": address.host},
        )
        answer = await client.send(request, stream=True)
        try:
            if answer.is_redirect:
                return urljoin(url, answer.headers["location"])
            return Page(url, answer.status_code, answer.headers.get("content-type", ""), await self._body(url, answer))
        finally:
            await answer.aclose()

    async def _number(self, address: Address) -> str:
        """The first number of an address's host that may be connected to."""
        loop = asyncio.get_running_loop()
        refused = NotAllowedError(f"{address.host} has no address")
        for *_, place in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            try:
                self.allowed.check_ip(address, str(place[0]))
            except NotAllowedError as error:
                refused = error
                continue
            return str(place[0])
        raise refused

    async def _body(self, url: str, answer: httpx.Response) -> str:
        kind = answer.headers.get("content-type", "text/plain").lower()
        if not any(word in kind for word in _TEXTUAL):
            raise RefusedError(f"{url[:200]} is of type {kind[:100]!r}, which is no text")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            # It was asked not to; a few bytes of it could stand for gigabytes.
            raise RefusedError(f"{url[:200]} came compressed, which is not taken")
        body = b""
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > self.max_bytes:
                raise RefusedError(f"{url[:200]} holds more than {self.max_bytes} bytes")
        text = body.decode(_charset(answer), "replace")
        return plain_text(text) if "html" in kind else text


def _charset(answer: httpx.Response) -> str:
    """The charset that a server names, where Python reads it."""
    named = answer.charset_encoding or "utf-8"
    try:
        "".encode(named)
    except (LookupError, UnicodeError):
        return "utf-8"
    return named


class _Text(HTMLParser):
    """Collects what a reader of a page would see."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - the parser's
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag in _BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        elif tag in _BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def plain_text(page: str) -> str:
    """The words of an HTML page, a line for each block."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow", action="append", required=True, metavar="HOST|URL", help="may be given again")
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, help="of one page")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="for one page")


def make(arguments: argparse.Namespace) -> MCPServer:
    """Raises RefusedError for an entry of the list that is no host or address."""
    fetcher = Fetcher(Allowed(arguments.allow), arguments.max_bytes, arguments.timeout)
    server = MCPServer("fetch", instructions=f"Pages of: {', '.join(arguments.allow)}")

    @server.tool(structured_output=False)
    async def fetch(url: str, start: int = 0, max_characters: int = 20_000) -> str:
        """Fetch a page as text. `start` goes on in a long one; `max_characters` says how much is shown."""
        page = await fetcher.fetch(url)
        start, count = max(0, start), max(1, min(max_characters, _MOST_CHARACTERS))
        shown = page.text[start : start + count]
        left = len(page.text) - start - len(shown)
        more = f"\n[{left} characters more: start={start + len(shown)}]" if left > 0 else ""
        return f"{page.url} ({page.status}, {page.kind})\n\n{shown}{more}"

    return server
