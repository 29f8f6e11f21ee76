"""What stores other than S3 and web servers answer, by servers that say as much as is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.storage import RemoteSource, Storage

Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def serving(answer: Callable[[str, str | None], Answer]) -> Iterator[str]:
    """Serve what a function says of a path and the range that is asked for; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path, self.headers.get("Range") or self.headers.get("x-ms-range"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_bucket_of_another_region_says_so() -> None:
    """S3 redirects, and does not say where to."""
    body = b"<Error><Code>PermanentRedirect</Code></Error>"
    with serving(lambda path, part: (301, {"x-amz-bucket-region": "eu-west-1"}, body)) as url:
        options = {"endpoint_url": url, "key": "any", "secret": "any", "region": "us-east-1"}
        with pytest.raises(StorageError, match=r"s3://bucket/a\.bin: the bucket is in another region; options="):
            RemoteSource("s3://bucket/a.bin", Storage(options=options))


_LIST = b"""<?xml version="1.0" encoding="utf-8"?>
<EnumerationResults ContainerName="box"><Blobs><Blob><Name>a.bin</Name><Properties>
<Last-Modified>Fri, 27 Nov 2026 09:00:00 GMT</Last-Modified><Etag>0x8DE</Etag><Content-Length>9</Content-Length>
<Content-Type>application/octet-stream</Content-Type></Properties></Blob></Blobs><NextMarker /></EnumerationResults>"""


def test_versions_that_azure_lists_are_those_that_it_answers_with() -> None:
    """Its list leaves out the quotation marks of an etag."""

    def answer(path: str, part: str | None) -> Answer:
        if "comp=list" in path:
            return 200, {"Content-Type": "application/xml"}, _LIST
        headers = {"ETag": '"0x8DE"', "Last-Modified": "Fri, 27 Nov 2026 09:00:00 GMT"}
        begin, _, end = (part or "bytes=0-8").removeprefix("bytes=").partition("-")
        headers["Content-Range"] = f"bytes {begin}-{end}/9"
        return (206 if part else 200), headers, b"123456789"[int(begin) : int(end) + 1]

    with serving(answer) as url:
        storage = Storage(options={"account_name": "us", "endpoint": f"{url}/us", "anon": "true"})
        [(address, stat)] = storage.list_objects("az://box/*.bin")
        assert RemoteSource(address, storage).stat == stat
        assert RemoteSource(address, storage, stat).read_at(2, 3) == b"345"
