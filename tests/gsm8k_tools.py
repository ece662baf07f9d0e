"""GSM8K for tests: the real files where they are, and a canned OpenAI-compatible server that can misbehave."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mhc.gsm8k.data import ENV_DIR, Problem

ROOT = Path(__file__).resolve().parent.parent
Reply = tuple[int, dict[str, str], Any]  # status, headers, body; None as a body closes the connection


def data_folder() -> Path:
    """Where GSM8K lies, or a skip that says how to provide it."""
    folder = Path(os.environ.get(ENV_DIR) or ROOT / ".." / "shared" / "data" / "gsm8k")
    if not (folder / "test.jsonl").is_file():
        pytest.skip(f"GSM8K is not on this machine: set {ENV_DIR} to the folder that holds train.jsonl and test.jsonl")
    return folder


def problems(count: int) -> list[Problem]:
    """Made-up questions whose answers differ."""
    return [Problem(i, f"What is {i} plus {i}?", f"<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}") for i in range(count)]


def completion(text: str, tokens: int | None = 5) -> dict[str, Any]:
    """A reply of `/v1/completions`."""
    return {"choices": [{"text": text}], "usage": {"completion_tokens": tokens}}


class Canned:
    """What the server was asked, and what it says: `script(body, attempt)` gives the reply, attempt counted from 1."""

    def __init__(self, script: Callable[[dict[str, Any], int], Reply]) -> None:
        self.script = script
        self.metrics = ""
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.url = ""


@contextmanager
def serve(script: Callable[[dict[str, Any], int], Reply], delay_s: float = 0.0) -> Iterator[Canned]:
    """Run the canned server in a thread."""
    canned = Canned(script)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            status = 200 if self.path == "/metrics" and canned.metrics else 404
            self.send_response(status)
            self.send_header("Content-Length", str(len(canned.metrics)))
            self.end_headers()
            self.wfile.write(canned.metrics.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = body.get("prompt") or body["messages"][0]["content"]
            with canned.lock:
                canned.seen[key] += 1
                canned.bodies.append(body | {"path": self.path})
                canned.in_flight += 1
                canned.most_in_flight = max(canned.most_in_flight, canned.in_flight)
                attempt = canned.seen[key]
            time.sleep(delay_s)
            status, headers, reply = canned.script(body, attempt)
            with canned.lock:
                canned.in_flight -= 1
            if reply is None:
                self.close_connection = True
                self.connection.close()
                return
            payload = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    canned.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield canned
    finally:
        server.shutdown()
        server.server_close()
