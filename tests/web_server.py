"""A real web server on loopback for tests of clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answering = Callable[[str, dict[str, Any]], tuple[int, Any]]


class FakeServer:
    """A web server on loopback that answers by a function of path and body, and remembers what it was asked."""

    def __init__(self, answering: Answering) -> None:
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        remembered = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, body: dict[str, Any]) -> None:
                remembered.append((self.path, body, dict(self.headers)))
                status, content = answering(self.path, body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    if status == 302:
                        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # it did not wait
                    pass

            def log_message(self, *args: Any) -> None:
                pass

        class Waiting(ThreadingHTTPServer):
            request_queue_size = 128  # connections that nobody has taken yet

        self._server = Waiting(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


Serve = Callable[[Answering], FakeServer]
