"""A server that speaks the protocol of the Hugging Face hub, as far as data sets are read: one data set, o/n.

Commits are named by 40 hex digits and branches point at them. Files are kept by another server, to which an address of
the hub leads, as the hub does with large ones.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import unquote

from http_support import Server, _Handler

__all__ = ["Hub"]

API, FILES = "/api/datasets/o/n", "/datasets/o/n/resolve/"


class Hub(Server):
    """``commit`` files; ``endpoint`` is the address of the hub, ``sent`` the bytes that files were read for."""

    def __init__(self, store: Server, token: str | None = None) -> None:
        super().__init__()
        self.RequestHandlerClass = _HubHandler
        self.store, self.token = store, token
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.calls: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Have a branch hold these files; the name of the commit."""
        name = hashlib.sha1(repr((branch, sorted(files.items()))).encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        for data in files.values():
            self.store.put(f"blobs/{_oid(data)}", data)
        return name

    @property
    def sent(self) -> int:
        """How many bytes of files were asked for."""
        spans = [wanted.removeprefix("bytes=").split("-") for _, wanted in self.store.requests if wanted]
        return sum(int(last) - int(first) + 1 for first, last in spans)


def _oid(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _HubHandler(_Handler):
    server: Hub

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        hub = self.server
        hub.calls.append(path)
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.say(401, {"error": "Invalid credentials"}, {"X-Error-Code": "RepoNotFound"})
        if path == API or path.startswith(f"{API}/revision/"):
            revision = path.removeprefix(API).removeprefix("/revision/") or "main"
            sha = hub.branches.get(revision, revision)
            if sha not in hub.commits:
                return self.say(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
            return self.say(200, {"id": "o/n", "sha": sha, "private": False, "tags": [], "siblings": []})
        if path.startswith(f"{API}/tree/"):
            revision, _, folder = path.removeprefix(f"{API}/tree/").partition("/")
            return self.tree(revision, folder, "recursive=true" in self.path.lower())
        if path.startswith(FILES):
            revision, _, name = path.removeprefix(FILES).partition("/")
            files = hub.commits[hub.branches.get(revision, revision)]
            if name not in files:
                return self.say(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
            store = f"http://127.0.0.1:{hub.store.server_address[1]}"
            return self.answer(302, {"Location": f"{store}/blobs/{_oid(files[name])}"})
        return self.say(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    def tree(self, revision: str, folder: str, recursive: bool) -> None:
        files = self.server.commits[self.server.branches.get(revision, revision)]
        prefix = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for path, data in sorted(files.items()):
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                name = prefix + "/".join(parts[:depth])
                found[name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
            if recursive or len(parts) == 1:
                oid = {"oid": _oid(data), "size": len(data), "pointerSize": 134}
                found[path] = {"type": "file", "oid": _oid(data)[:40], "size": len(data), "path": path, "lfs": oid}
        if not found:
            return self.say(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
        return self.say(200, list(found.values()))

    def say(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
