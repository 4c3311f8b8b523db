"""A model hub on a local port: the part of the hub's HTTP API that a download uses, with its faults on demand.

Speaks repository info, trees and file resolution (commit and ETag headers, ranges, redirects of large files). Knows
nothing of `tgi`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1 << 12  # bytes; files of that size and more lie behind a redirect, as LFS files do
ERRORS = {"GatedRepo": 403, "RepoNotFound": 401, "RevisionNotFound": 404, "EntryNotFound": 404}


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False  # files only for those with the token; their list is open, as on the hub
    revisions: tuple[str, ...] = ("main",)


@dataclass
class Hub:
    """What the server has, how it fails, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_good"
    cut_after: int | None = None  # bytes of a large file after which the connection ends, once per file
    gone_after_cut: bool = False  # a file whose connection was cut is no more to be had
    status: int | None = None  # answered to everything
    busy: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # status and headers of the next answers
    stuck_after: int | None = None  # bytes of a large file after which nothing more comes, on its first connection
    stuck: threading.Event = field(default_factory=threading.Event)  # so many bytes were sent
    no_ranges: bool = False  # large files come from their beginning, whatever was asked for
    sent: dict[str, bytes] = field(default_factory=dict)  # file name -> bytes sent instead of the announced ones
    xet: bool = False  # large files lie in Xet storage too
    hold: threading.Event | None = None  # nothing is answered before it is set
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    address: str = ""
    content_address: str = ""  # another host's, as on the hub
    cut: set[str] = field(default_factory=set)

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were sent, in order."""
        return [path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/cdn/" in path] + [
            path.split("/resolve/", 1)[1].partition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path and not self.is_large(path)
        ]

    def ranges(self, file: str) -> list[str | None]:
        """The Range header of each request for the bytes of a large file."""
        return [
            next((value for name, value in headers.items() if name.lower() == "range"), None)
            for method, path, headers in self.requests
            if method == "GET" and path.startswith("/cdn/") and path.endswith(f"/{file}")
        ]

    def is_large(self, path: str) -> bool:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        return found is not None and len(self.repositories[found[1]].files.get(found[2], b"")) >= LARGE


@contextmanager
def running_hub(**repositories: Repository) -> Iterator[Hub]:
    """A hub that is there while the block runs. Keywords: "owner__name" -> repository."""
    hub = Hub({name.replace("__", "/"): repository for name, repository in repositories.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    hub.content_address = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, dict(self.headers.items())))
        if self.hub.hold is not None:
            self.hub.hold.wait()
        if self.hub.status is not None:
            self._send(self.hub.status, b"busy", {})
        elif self.hub.busy and path != "/api/agent-harnesses":  # which the client asks for once a day
            status, headers = self.hub.busy.pop(0)
            self._send(status, b"busy", headers)
        elif path.startswith("/cdn/"):
            self._cdn(path)
        elif api := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path):
            self._api(*api.groups())
        elif api := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            self._api(api[1], "revision", "main")
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*file.groups())
        else:
            self._error("EntryNotFound")

    def _repository(self, name: str, revision: str, files: bool = False) -> Repository | None:
        """The repository, or None after the fitting error was sent."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._error("RepoNotFound")
        elif files and repository.gated and self.headers.get("authorization") != f"Bearer {self.hub.token}":
            self._error("GatedRepo")
        elif revision not in (*repository.revisions, SHA):
            self._error("RevisionNotFound")
        else:
            return repository
        return None

    def _api(self, name: str, kind: str, revision: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if kind == "revision":
            siblings = [{"rfilename": file} for file in repository.files]
            self._json({"id": name, "modelId": name, "sha": SHA, "private": False, "siblings": siblings, "tags": []})
        else:
            self._json([_entry(file, content) for file, content in repository.files.items()])

    def _file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, revision, files=True)
        if repository is None:
            return
        content = repository.files.get(file)
        if content is None:
            self._error("EntryNotFound")
            return
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{_blob(content)}"', "Accept-Ranges": "bytes"}
        if len(content) < LARGE:
            self._send(200, content, headers)
            return
        if self.hub.xet:
            headers |= {"X-Xet-Hash": hashlib.sha256(content).hexdigest()}
            headers |= {"X-Xet-Refresh-Route": f"{self.hub.address}/api/models/{name}/xet-read-token/{SHA}"}
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self._send(302, b"", headers | {"Location": f"{self.hub.content_address}/cdn/{name}/{file}"})

    def _cdn(self, path: str) -> None:
        owner, name, file = path.removeprefix("/cdn/").split("/", 2)
        content = self.hub.repositories[f"{owner}/{name}"].files[file]
        wanted = None if self.hub.no_ranges else re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        start = int(wanted[1]) if wanted else 0
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        content = self.hub.sent.get(file, content)
        cut = self.hub.cut_after
        if self.command == "GET" and self.hub.stuck_after is not None and not self.hub.stuck.is_set():
            self._send(206 if wanted else 200, content[start:], headers, self.hub.stuck_after)
            self.hub.stuck.set()
            self.connection.recv(1)  # until the other side goes away
            return
        if self.command == "GET" and cut is not None and path not in self.hub.cut:
            self.hub.cut.add(path)
            self._send(206 if wanted else 200, content[start:], headers, cut)
            return
        if self.hub.gone_after_cut:
            self._error("EntryNotFound")
            return
        self._send(206 if wanted else 200, content[start:], headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str) -> None:
        self._send(ERRORS[code], b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code}."})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(file: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(content), "oid": _blob(content)}
    if len(content) >= LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
