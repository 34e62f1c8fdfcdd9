"""A retrieval server on the loopback address that answers from a list of replies, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Told:
    """`replies`: a status, seconds to hang, bytes to send as they are, or what is sent as JSON; the last one stays."""

    replies: list[Any]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def found(*contents: str) -> dict[str, Any]:
    """One query's passages in the usual form."""
    return {"result": [[{"document": {"id": str(n), "contents": c}, "score": 1.0} for n, c in enumerate(contents)]]}


@contextmanager
def serving(*replies: Any) -> Iterator[Told]:
    told = Told(list(replies))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.paths.append(self.path)
            told.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = told.replies.pop(0) if len(told.replies) > 1 else told.replies[0]
            if isinstance(reply, float):
                time.sleep(reply)
            status = reply if isinstance(reply, int) else 200
            body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that did not wait
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
