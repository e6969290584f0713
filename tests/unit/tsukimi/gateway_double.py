"""A gateway that gives back what a test prescribes, over real HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class GatewayDouble(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.chunks: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: GatewayDouble

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "toy"}]}).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.status != 200:
            self._send("application/json", b'{"error": {"message": "try later"}}')
            return
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in self.server.chunks]
        self._send("text/event-stream", "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n"]).encode())

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def gateway_double() -> Iterator[GatewayDouble]:
    server = GatewayDouble()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def text_chunks(*texts: str) -> list[dict[str, Any]]:
    """A role-only chunk, the texts, the end, and the usage."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, *({"content": t} for t in texts)]
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": d}], "usage": None} for d in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None})
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
    return [*chunks, {"choices": [], "usage": usage}]
