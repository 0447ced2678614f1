"""A chat completions API that judges from a script, for tests of the judge."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[int, dict[str, Any]], Any]


def graded(total: float = 1, style: float = 0.5) -> str:
    rows = [{"id": "total", "reason": "seen", "score": total}, {"id": "style", "reason": "", "score": style}]
    return json.dumps({"criteria": rows})


@dataclass
class Endpoint:
    """What was asked, and where."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@contextmanager
def endpoint(answer: Answer) -> Iterator[Endpoint]:
    """``answer`` gives from the number of a request and its body a text, a status, or the bytes of a whole reply."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(made.asked)
                made.asked.append(body)
                made.keys.append(self.headers["Authorization"])
            said = answer(number, body)
            status = said if isinstance(said, int) else 200
            message = {"role": "assistant", "content": None if isinstance(said, bytes) else said}
            reply = {
                "id": "c1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
            }
            content = json.dumps(reply if status == 200 else {"error": {"message": "no", "type": "x"}}).encode()
            if isinstance(said, bytes):
                content = said
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Endpoint(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
