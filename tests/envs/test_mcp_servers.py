"""The servers of ours: alone over stdio, through a task and its socket, and what they refuse."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from test_mcp_outside import bridged, room, text

from envs.mcp import fetch, search
from envs.mcp.__main__ import main
from envs.mcp.allowed import Allowed, NotAllowedError
from envs.mcp.fetch import Fetcher, plain_text
from envs.mcp.files import Folder
from envs.mcp.search import Api, Corpus, passages
from envs.mcp.spec import read_servers

DOCUMENTS = {
    "animals/cats.md": "# Cats\n\nA cat is a feline and likes to purr.\n",
    "animals/dogs.md": "# Dogs\n\nA dog is a friend and loves to play.\n",
    "fish.txt": "A fish swims in the water.\n",
}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "task" / "corpus"
    for name, content in DOCUMENTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "task" / "secret.txt").write_text("a feline secret")
    (folder / "way_out").symlink_to(tmp_path / "task")
    (folder / "link.txt").symlink_to(tmp_path / "task" / "secret.txt")
    return folder


def alone(*arguments):
    root = os.fspath(Path(__file__).parents[2])
    return StdioServerParameters(command=sys.executable, args=["-m", "envs.mcp", *arguments], env={"PYTHONPATH": root})


async def test_search_alone(corpus):
    async with Client(alone("search", "--corpus", os.fspath(corpus))) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "read_document"]
        found = text(await client.call_tool("search", {"query": "which feline does purr"}))
        assert found.startswith("[1] animals/cats.md, line 1\n# Cats")
        assert "secret" not in found
        assert "no document" in text(await client.call_tool("search", {"query": "xylophone"}))
        assert "swims" in text(await client.call_tool("read_document", {"path": "fish.txt"}))
        empty = await client.call_tool("search", {"query": " "})
        assert (empty.is_error, "query is empty" in text(empty)) == (True, True)


async def test_files_alone(corpus):
    async with Client(alone("files", "--folder", os.fspath(corpus))) as client:
        assert text(await client.call_tool("list_files", {})).split("\n") == [*sorted(DOCUMENTS), "picture.png"]
        assert text(await client.call_tool("list_files", {"pattern": "*.txt"})) == "fish.txt"
        for path in ("../secret.txt", "link.txt", "way_out/secret.txt", "/etc/passwd", "nope", "animals", "a\0b"):
            refused = await client.call_tool("read_file", {"path": path})
            assert (refused.is_error, "name one as it is listed" in text(refused)) == (True, True), path
        assert "not text" in text(await client.call_tool("read_file", {"path": "picture.png"}))


async def test_fetch_alone(site):
    async with Client(alone("fetch", f"--allow={site.at}")) as client:
        page = text(await client.call_tool("fetch", {"url": f"http://{site.at}/page"}))
        assert page == f"http://{site.at}/page (200, text/html)\n\nHello\nworld & all"
        refused = await client.call_tool("fetch", {"url": "http://example.org/"})
        assert (refused.is_error, "may not be fetched" in text(refused)) == (True, True)
        part = text(await client.call_tool("fetch", {"url": f"http://{site.at}/page", "start": 2, "max_characters": 3}))
        assert part.endswith("\n\nllo\n[12 characters more: start=5]")


async def test_a_search_of_a_task_through_its_socket(corpus, tmp_path):
    wanted = read_servers([{"name": "docs", "kind": "search", "corpus": "corpus"}], corpus.parent)
    async with room(tmp_path / "rooms", *wanted) as (_, servers), Client(bridged(servers)) as client:
        assert "cats.md" in text(await client.call_tool("search", {"query": "feline", "limit": 1}))
    (row,) = servers.log.rows
    assert (row["server"], row["tool"], row["is_error"]) == ("docs", "search", False)
    assert json.loads(row["arguments"]) == {"query": "feline", "limit": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search", "--corpus", "/no/such"], "no such folder"),
        (["search", "--api", "https://x.example", "--key-env", "REINS_TEST_UNSET"], "not set"),
        (["fetch", "--allow", "example.org/path"], "expected a host"),
        (["files", "--folder", "/no/such"], "no such folder"),
        (["search"], "one of the arguments --corpus --api is required"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["envs.mcp", *arguments])
    try:
        code = main()
    except SystemExit as left:
        code = left.code
    assert (code, words in capsys.readouterr().err) == (2, True)


def test_passages_cover_a_text_once_and_say_where_they_begin():
    content = "".join(f"line {n} with words in it\n" + "\n" * (n % 7 == 0) for n in range(400)) + "x" * 5000
    found = list(passages("a", content))
    assert "".join(p.text for p in found) == content
    lines = content.splitlines()
    assert all(lines[p.line - 1] == p.text.splitlines()[0] for p in found)
    assert max(len(p.text) for p in found[:-1]) <= 1000
    assert list(passages("a", "\n \n")) == []


def test_a_corpus_without_text_is_an_error(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="no text files"):
        Corpus(Folder(tmp_path))


def test_lines_say_where_to_go_on(tmp_path):
    (tmp_path / "a").write_text("".join(f"{n}\n" for n in range(1, 11)))
    folder = Folder(tmp_path)
    assert folder.lines("a", 3, 2) == "3\n4\n[line 5 of 10 is next: first_line=5]"
    assert folder.lines("a", 9, 50) == "9\n10\n"
    assert folder.lines("a", 11, 1) == "[a has 10 lines]"
    with pytest.raises(ValueError, match="count from 1"):
        folder.lines("a", 0, 1)
    (tmp_path / "long").write_text("y" * 200_000)
    assert len(folder.lines("long", 1, 1)) < 60_000


class _Site(http.server.BaseHTTPRequestHandler):
    """Pages with faults, and a search API."""

    def log_message(self, *_): ...

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.say(200, "application/json", json.dumps({"results": [{"name": body["q"], "link": "l"}]}).encode())

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.seen.append((self.path, dict(self.headers)))
        if path == "/page":
            html = b"<title>Hello</title><style>p {}</style><p>world &amp; <b>all</b><script>x()</script>"
            self.say(200, "text/html", html)
        elif path == "/api":
            rows = [{"title": f"t{n}", "url": f"u{n}", "description": "words"} for n in range(9)] + ["odd"]
            self.say(200, "application/json", json.dumps({"web": {"results": rows}}).encode())
        elif path == "/to":
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
        elif path == "/endless":
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 65536)
            except OSError:
                pass
        elif path == "/slow":
            self.server.over.wait(60)
        elif path == "/packed":
            self.say(200, "text/plain", b"\x1f\x8b", ("Content-Encoding", "gzip"))
        elif path == "/picture":
            self.say(200, "image/png", b"\x89PNG")
        elif path == "/latin":
            self.say(200, "text/plain; charset=latin-1", "é".encode("latin-1"))
        else:
            self.say(404, "text/plain; charset=klingon", b"nothing here")

    def say(self, status, kind, body, *headers):
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    server.seen, server.over = [], threading.Event()
    server.at = f"127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


async def test_pages_are_bounded_in_size_time_and_kind(site):
    fetcher = Fetcher(Allowed([site.at]), max_bytes=100_000, timeout_s=30)
    base = f"http://{site.at}"
    assert (await fetcher.fetch(f"{base}/latin")).text == "é"
    missing = await fetcher.fetch(f"{base}/missing")
    assert (missing.status, missing.text) == (404, "nothing here")
    for path, words in (("endless", "more than 100000 bytes"), ("packed", "compressed"), ("picture", "no text")):
        with pytest.raises(ValueError, match=words):
            await fetcher.fetch(f"{base}/{path}")
    with pytest.raises(ValueError, match="did not answer within 0 s"):
        await Fetcher(Allowed([site.at]), timeout_s=0.2).fetch(f"{base}/slow")


async def test_every_redirect_is_checked(site):
    fetcher = Fetcher(Allowed([site.at]), timeout_s=30)
    base = f"http://{site.at}"
    assert (await fetcher.fetch(f"{base}/to?/to?/page")).url == f"{base}/page"
    port = site.server_port
    for target in (
        f"http://127.0.0.2:{port}/page",
        f"http://localhost:{port}/page",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        f"http://{site.at}@127.0.0.1:1/",
        "//127.0.0.1:1/page",
    ):
        with pytest.raises(NotAllowedError):
            await fetcher.fetch(f"{base}/to?{target}")
    with pytest.raises(ValueError, match="more than 5 redirects"):
        await fetcher.fetch(base + "/to?" * 7 + "/page")
    assert [path for path, _ in site.seen if path == "/page"] == ["/page"]


async def test_a_name_that_leads_to_a_private_address_needs_that_address_on_the_list(site):
    url = f"http://localhost:{site.server_port}/page"
    with pytest.raises(NotAllowedError, match="no public address"):
        await Fetcher(Allowed([f"localhost:{site.server_port}"])).fetch(url)
    assert site.seen == []
    page = await Fetcher(Allowed([f"localhost:{site.server_port}", site.at])).fetch(url)
    assert page.status == 200
    assert site.seen[0][1]["Host"] == f"localhost:{site.server_port}"


ENTRIES = ["docs.example.org", "https://example.org/api/", "10.0.0.5:8080", "http://old.example.org:81"]


@pytest.mark.parametrize(
    "url",
    [
        "http://docs.example.org",
        "https://DOCS.example.org./a?b=../c#d",
        "https://docs.example.org:443/",
        "https://example.org/api/",
        "https://example.org/api/v1",
        "http://10.0.0.5:8080/x",
        "http://old.example.org:81/anything",
    ],
)
def test_what_is_on_the_list_may_be_fetched(url):
    Allowed(ENTRIES).check(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://sub.docs.example.org/",
        "https://docs.example.org.evil.example/",
        "https://docs.example.org:8443/",
        "http://example.org/api/",
        "https://example.org/apix",
        "https://example.org/api",
        "https://example.org/api/../secret",
        "https://example.org/api/%2e%2e/secret",
        "https://example.org/api/%252e%252e/secret",
        "https://example.org/api/..%5csecret",
        "https://example.org\\@docs.example.org/",
        "https://docs.example.org@evil.example/",
        "https://user:word@docs.example.org/",
        "ftp://docs.example.org/",
        "docs.example.org",
        "https:///x",
        "http://10.0.0.5/",
        "http://docs.example.org:99999/",
        "http://[::1/",
        "http://docs.example.org/a b",
        "http://docs.example.org/\n",
    ],
)
def test_what_is_not_on_the_list_may_not(url):
    with pytest.raises(NotAllowedError):
        Allowed(ENTRIES).check(url)


@pytest.mark.parametrize(
    "ip",
    ["127.0.0.1", "10.0.0.5", "192.168.1.1", "169.254.169.254", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "0.0.0.0"],
)
def test_private_addresses_behind_a_listed_name_are_refused(ip):
    allowed = Allowed(ENTRIES)
    with pytest.raises(NotAllowedError, match=r"docs\.example\.org leads to"):
        allowed.check_ip(allowed.check("https://docs.example.org/"), ip)
    allowed.check_ip(allowed.check("https://docs.example.org/"), "93.184.215.14")


@pytest.mark.parametrize("entry", ["", "example.org/api", "http://", "a b", "user@host", "host:port"])
def test_an_entry_that_is_none_is_an_error(entry):
    with pytest.raises(ValueError, match="expected a host"):
        Allowed([entry])


async def test_a_search_api_is_asked_with_its_key(site):
    api = Api(f"http://{site.at}/api?q={{query}}&n={{limit}}", "sesame", "X-Key", results="web.results")
    assert (await api.search("a b&c", 2)) == "t0\nu0\nwords\n\nt1\nu1\nwords"
    path, headers = site.seen[0]
    assert (path, headers["X-Key"]) == ("/api?q=a%20b%26c&n=2", "sesame")
    assert await Api(f"http://{site.at}/", post="q").search("word", 5) == "word\nl"
    for wrong, words in ((Api(f"http://{site.at}/api"), "no list at 'results'"), (Api(f"http://{site.at}/x"), "404")):
        with pytest.raises(ValueError, match=words):
            await wrong.search("a", 1)
    with pytest.raises(ValueError, match="could not be asked") as caught:
        await Api("http://127.0.0.1:1/sesame", "sesame").search("a", 1)
    assert "sesame" not in str(caught.value)


def test_a_page_is_shown_as_its_words():
    assert plain_text("<svg><p>a</svg>b<br>c  d</p></p><h1>e") == "b\nc d\ne"
    assert plain_text("1 < 2 &lt; 3") == "1 < 2 < 3"


@pytest.mark.parametrize("module", [search, fetch])
def test_examples_are_commands_of_ours(module):
    assert "python -m envs.mcp" in module.EXAMPLES
