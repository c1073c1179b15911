"""A Hugging Face endpoint on the loopback interface, serving folders as repositories, with failures on order.

It speaks as much of the Hub's protocol as downloading models and streaming data sets needs, and records each request.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
REVISIONS = ("main", "step1000", COMMIT)


@dataclass
class Hub:
    """The repositories served, what is to go wrong, and what has been asked.

    Attributes:
        repositories: folders by kind and name: ``models/owner/name`` or ``datasets/owner/name``.
        gated: names whose files are refused.
        failures: by a regular expression on the path, what its requests are answered in turn before they succeed: a
            status, or "drop" for a connection cut midway.
        requests: ``METHOD path`` of every request answered.
    """

    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    failures: dict[str, list[int | str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables that point Hugging Face's libraries here, with a cache of their own."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub from a thread until the block ends."""
    handler = type("BoundHandler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    drop = False

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        failure = self._next_failure(path)
        if isinstance(failure, int):
            return self._send(failure, b"unavailable")
        self.drop = failure == "drop"
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/.*)?", path):
            return self._answer_api(match[1], match[2], match[3] or "")
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._answer_file("datasets" if match[1] else "models", match[2], match[3], match[4])
        return self._refuse(404, "EntryNotFound")

    def _next_failure(self, path: str) -> int | str | None:
        for pattern, failures in self.hub.failures.items():
            if failures and re.search(pattern, path):
                return failures.pop(0)
        return None

    def _answer_api(self, kind: str, name: str, rest: str) -> None:
        folder = self.hub.repositories.get(f"{kind}/{name}")
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        revision = re.match(r"/(?:revision|tree|paths-info)/([^/]+)", rest)
        if revision and revision[1] not in REVISIONS:
            return self._refuse(404, "RevisionNotFound")
        if rest.startswith("/tree"):
            below = rest.split("/", 3)[3] if rest.count("/") > 2 else ""
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
            return self._send_json(_tree(folder, below, recursive))
        if rest.startswith("/paths-info"):
            asked = parse_qs(self.body.decode())["paths"] if b"paths=" in self.body else json.loads(self.body)["paths"]
            return self._send_json([_entry(folder, folder / path) for path in asked if (folder / path).exists()])
        if rest and not rest.startswith("/revision"):
            return self._refuse(404, "EntryNotFound")
        siblings = [{"rfilename": entry["path"]} for entry in _tree(folder, "", True) if entry["type"] == "file"]
        gated = "manual" if name in self.hub.gated else False
        return self._send_json(
            {
                "id": name,
                "sha": COMMIT,
                "private": False,
                "gated": gated,
                "tags": [],
                "downloads": 0,
                "siblings": siblings,
            }
        )

    def _answer_file(self, kind: str, name: str, revision: str, path: str) -> None:
        folder = self.hub.repositories.get(f"{kind}/{name}")
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        if name in self.hub.gated:
            return self._refuse(401, "GatedRepo")
        if revision not in REVISIONS:
            return self._refuse(404, "RevisionNotFound")
        file = folder / path
        if not file.is_file():
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": COMMIT})
        body, total = file.read_bytes(), file.stat().st_size
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(file)}"', "Accept-Ranges": "bytes"}
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or total - 1)
            body, status = body[start : end + 1], 206
            headers["Content-Range"] = f"bytes {start}-{min(end, total - 1)}/{total}"
        return self._send(status, body, headers)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.drop:
            body, self.close_connection = body[: len(body) // 2], True
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree(folder: Path, below: str, recursive: bool) -> list[dict[str, Any]]:
    paths = sorted((folder / below).rglob("*") if recursive else (folder / below).glob("*"))
    return [_entry(folder, path) for path in paths]


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    return {"type": "file", "path": name, "oid": _oid(path), "size": path.stat().st_size}


def _oid(path: Path) -> str:
    return sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
