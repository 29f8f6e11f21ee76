"""Files of datasets on the Hugging Face Hub: hf://datasets/OWNER/NAME[@REVISION]/PATH.

A branch or tag is resolved once to its commit, whose content never changes. Names and sizes come from
`huggingface_hub`, bytes from range requests over HTTP. Options are those of `huggingface_hub.HfFileSystem`:
``token``, ``endpoint``; by default the token stored by the Hub's own tools, and HF_ENDPOINT.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from penstock.storage.fsspec_store import FsspecStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.transfer import Answer, Stat

__all__ = ["HubStore"]

_COMMIT = re.compile(r"^hf://[^@]+@[0-9a-f]{40}(/|$)")


class HubStore(FsspecStore):
    """Reads URLs of a commit by range requests, and URLs of a branch as `FsspecStore` does; see `pin`."""

    def __init__(self, options: Mapping[str, Any], idle: float) -> None:
        super().__init__("hf", options)
        headers = build_hf_headers(token=self._fs.token, library_name="penstock")
        self._http = ObjectStore({"headers": {self._fs.endpoint: headers}}, idle)
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Stat]] = {}

    def pin(self, url: str) -> str:
        """Return the URL with the current commit of its branch or tag; the default branch is main.

        Raises:
            StorageNotFoundError: no such dataset or revision, or it is private.
            StorageAuthError: the token lacks permission.
        """
        if _COMMIT.match(url):
            return url
        with self._translated(url):
            found = self._fs.resolve_path(self._path(url))
            if not hasattr(found, "repo_id"):
                # A bucket has no revisions.
                return url
            # An open dataset keeps its commit; the next one that is opened resolves the branch again.
            api = HfApi(endpoint=self._fs.endpoint, token=self._fs.token)
            info = api.repo_info(found.repo_id, revision=found.revision, repo_type=found.repo_type)
            kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
            return f"hf://{kind}{found.repo_id}@{info.sha}/{found.path_in_repo}".rstrip("/")

    def stat(self, url: str) -> Stat:
        return self._look(url)[1] if _COMMIT.match(url) else super().stat(url)

    def read(self, url: str, begin: int, end: int | None, *, ranged: bool) -> Answer:
        if not _COMMIT.match(url):
            return super().read(url, begin, end, ranged=ranged)
        address, stat = self._look(url)
        answer = self._http.read(address, begin, end, ranged=ranged)
        # The servers that store the files have other etags. A wrong size is still detected.
        return answer._replace(stat=replace(answer.stat, etag=stat.etag, modified=stat.modified))

    def find(self, url: str) -> list[tuple[str, Stat]]:
        return super().find(self.pin(url))

    def _look(self, url: str) -> tuple[str, Stat]:
        """Return the HTTP URL of a file of a commit, and its identity on the hub. Each folder is listed once."""
        found = self._known.get(url)
        if found is None:
            # The file system's listings are not thread-safe.
            with self._lock, self._translated(url):
                found = self._fs.url(self._path(url)), self._stat_of(self._fs.info(self._path(url)), url)
            self._known[url] = found
        return found
