"""A chat completions API that answers from a script, for tests of what calls one."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


def say(text: str | None, *calls: tuple[str, Any], finish: str = "stop") -> dict[str, Any]:
    """An answer: a text and tool calls as (name, arguments); arguments that are no text are written as JSON."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if isinstance(given, str) else json.dumps(given),
                },
            }
            for number, (name, given) in enumerate(calls)
        ]
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def bash(command: str) -> dict[str, Any]:
    return say(None, ("execute_bash", {"command": command}))


class Script:
    """Hands out ``answers`` in turn (the last one for ever) and keeps what was asked.

    An answer is a completion, an HTTP status, raw bytes to send as the whole response, or None to hang up.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.connections = 0

    def next(self) -> Any:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @property
    def results(self) -> list[str]:
        """The tool results in the newest request."""
        return [message["content"] for message in self.bodies[-1]["messages"] if message["role"] == "tool"]


def _handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            script.connections += 1

        def do_POST(self) -> None:
            script.paths.append(self.path)
            script.headers.append({name.lower(): value for name, value in self.headers.items()})
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = script.next()
            if answer is None:
                self.close_connection = True
                return
            if isinstance(answer, bytes):
                self.wfile.write(answer)
                return
            status, body = (answer, b'{"error": {"message": "no"}}') if isinstance(answer, int) else (200, None)
            body = body or json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "client"

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class _Tcp(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class _Unix(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextmanager
def serving(script: Script, socket: Path | None = None) -> Iterator[str]:
    """Serve ``script`` on a Unix socket, or on a port of the loopback address; its base URL."""
    server: socketserver.BaseServer
    server = _Unix(str(socket), _handler(script)) if socket else _Tcp(("127.0.0.1", 0), _handler(script))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield "" if socket else f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
