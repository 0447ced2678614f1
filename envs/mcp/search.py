"""An MCP server that searches: BM25 over the text files of a folder, or somebody's search API."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import bm25s
import httpx
from mcp.server import MCPServer

from envs.mcp.errors import RefusedError
from envs.mcp.files import Folder

# It sets itself to tell of every step.
logging.getLogger("bm25s").setLevel(logging.WARNING)
_PASSAGE_CHARACTERS = 1000
_SNIPPET_CHARACTERS = 1500
_MOST_QUERY = 1000
_MOST_RESULTS = 20
_API_S = 20.0
_API_BYTES = 4 << 20
_TITLES = ("title", "name")
_LINKS = ("url", "link", "href")
_WORDS = ("description", "snippet", "content", "text")

HELP = "search a folder of text files (BM25), or ask a search API"
EXAMPLES = """examples:
  python -m envs.mcp search --corpus docs
      tools search and read_document over the text files of the folder docs
  SEARCH_KEY=... python -m envs.mcp search --api 'https://api.example.com/search?q={query}&count={limit}' \\
      --key-env SEARCH_KEY --key-header X-Subscription-Token --results web.results
      tool search, answered by a hosted API; the key stays in this process
  SEARCH_KEY=... python -m envs.mcp search --api https://api.example.com/search --post query --key-env SEARCH_KEY
      the same with a JSON body {"query": ...} and the key as a bearer
"""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file, from ``line`` (from 1) on."""

    path: str
    line: int
    text: str


def passages(path: str, text: str) -> Iterator[Passage]:
    """Pieces of whole lines, of about a thousand characters, cut at empty lines where there are any."""
    held: list[str] = []
    size, begins = 0, 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if held and (size + len(line) > _PASSAGE_CHARACTERS or (not line.strip() and size > _PASSAGE_CHARACTERS // 2)):
            yield Passage(path, begins, "".join(held))
            held, size, begins = [], 0, number
        held.append(line)
        size += len(line)
    if "".join(held).strip():
        yield Passage(path, begins, "".join(held))


class Corpus:
    """The passages of a folder's text files and their index. Files that are no text are left out."""

    def __init__(self, folder: Folder) -> None:
        """Raises RefusedError when there is no text."""
        self.passages: list[Passage] = []
        for name in folder.names():
            try:
                text = folder.text(name)
            except RefusedError:
                continue
            self.passages += passages(name, text)
        if not self.passages:
            raise RefusedError(f"--corpus {folder.root}: holds no text files (UTF-8)")
        words = bm25s.tokenize([f"{p.path} {p.text}" for p in self.passages], stopwords=[], show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def search(self, query: str, limit: int) -> list[Passage]:
        """The best passages, best first; those that share no word with the query are left out."""
        words = bm25s.tokenize([query], stopwords=[], return_ids=False, show_progress=False)
        if not words[0]:
            return []
        found = self._index.retrieve(words, k=min(limit, len(self.passages)), show_progress=False)
        pairs = zip(found.documents[0], found.scores[0], strict=True)
        return [self.passages[int(place)] for place, score in pairs if score > 0]


@dataclass(frozen=True, slots=True)
class Api:
    """A hosted search API. ``{query}`` and ``{limit}`` in ``url`` are filled in.

    ``post`` names the field of a JSON body that takes the query; ``results`` is the way to the list in the answer.
    """

    url: str
    key: str = ""
    key_header: str = ""
    post: str = ""
    results: str = "results"

    async def search(self, query: str, limit: int) -> str:
        """Raises RefusedError, without the key, when no results come."""
        url = self.url.replace("{query}", quote(query, safe="")).replace("{limit}", str(limit))
        headers = {"Accept": "application/json"}
        if self.key:
            headers |= {self.key_header: self.key} if self.key_header else {"Authorization": f"Bearer {self.key}"}
        body = {self.post: query} if self.post else None
        try:
            async with httpx.AsyncClient(timeout=_API_S) as client:
                request = client.build_request("POST" if self.post else "GET", url, headers=headers, json=body)
                answer = await client.send(request, stream=True)
                content = b""
                async for chunk in answer.aiter_bytes(1 << 16):
                    content += chunk
                    if len(content) > _API_BYTES:
                        raise RefusedError(f"the search API answered with more than {_API_BYTES} bytes")
                await answer.aclose()
        except httpx.HTTPError as error:
            raise RefusedError(f"the search API could not be asked: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise RefusedError(f"the search API answered with status {answer.status_code}")
        return self._shown(content, limit)

    def _shown(self, content: bytes, limit: int) -> str:
        try:
            rows: Any = json.loads(content)
            for name in self.results.split("."):
                rows = rows[name]
            rows = [row for row in rows if isinstance(row, dict)]
        except (ValueError, LookupError, TypeError):
            raise RefusedError(f"the search API's answer has no list at {self.results!r}") from None
        return "\n\n".join(
            "\n".join(filter(None, map(row_text(row), (_TITLES, _LINKS, _WORDS)))) for row in rows[:limit]
        )


def row_text(row: dict[str, Any]) -> Any:
    """A function that gives the first of some fields of ``row`` that holds a text, cut to a snippet."""

    def first(names: tuple[str, ...]) -> str:
        return next((row[name] for name in names if isinstance(row.get(name), str)), "")[:_SNIPPET_CHARACTERS]

    return first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", type=Path, help="a folder of text files")
    source.add_argument("--api", metavar="URL", help="a search API; {query} and {limit} are filled in")
    parser.add_argument("--key-env", metavar="NAME", help="the environment variable that holds the API's key")
    parser.add_argument("--key-header", metavar="NAME", default="", help="the header for the key; none: a bearer")
    parser.add_argument("--post", metavar="FIELD", default="", help="send a JSON body with the query in this field")
    parser.add_argument("--results", metavar="PATH", default="results", help="where the list is, e.g. web.results")


def make(arguments: argparse.Namespace) -> MCPServer:
    """Raises RefusedError for a corpus without text, or a key that is not set."""
    server = MCPServer("search")
    if arguments.api:
        _add_api(server, _api(arguments))
    else:
        if not arguments.corpus.is_dir():
            raise RefusedError(f"--corpus {arguments.corpus}: no such folder")
        folder = Folder(arguments.corpus.resolve())
        _add_corpus(server, folder, Corpus(folder))
    return server


def _api(arguments: argparse.Namespace) -> Api:
    key = os.environ.get(arguments.key_env, "") if arguments.key_env else ""
    if arguments.key_env and not key:
        raise RefusedError(f"--key-env {arguments.key_env}: that environment variable is not set")
    return Api(arguments.api, key, arguments.key_header, arguments.post, arguments.results)


def _bounded(query: str, limit: int) -> tuple[str, int]:
    if not query.strip():
        raise RefusedError("query is empty; give some words to look for")
    return query[:_MOST_QUERY], max(1, min(limit, _MOST_RESULTS))


def _add_corpus(server: MCPServer, folder: Folder, corpus: Corpus) -> None:
    @server.tool(structured_output=False)
    def search(query: str, limit: int = 5) -> str:
        """Search the documents by words. Gives the best passages, each with its document and first line."""
        query, limit = _bounded(query, limit)
        found = corpus.search(query, limit)
        shown = (
            f"[{n}] {p.path}, line {p.line}\n{p.text[:_SNIPPET_CHARACTERS].strip()}" for n, p in enumerate(found, 1)
        )
        return "\n\n".join(shown) or "[no document has any of these words]"

    @server.tool(structured_output=False)
    def read_document(path: str, first_line: int = 1, lines: int = 200) -> str:
        """Read a document that `search` named, from `first_line` on, at most `lines` lines."""
        return folder.lines(path, first_line, lines)


def _add_api(server: MCPServer, api: Api) -> None:
    @server.tool(structured_output=False)
    async def search(query: str, limit: int = 5) -> str:
        """Search the web. Gives the best results, each with its title, address and some words of it."""
        return await api.search(*_bounded(query, limit)) or "[nothing was found]"
