"""Objects in S3 and in what speaks its language, by the client that s3fs has set up.

Credentials, regions and endpoints are found as everywhere with S3 (AWS_* variables, ~/.aws), or given as the options of
`s3fs.S3FileSystem`: ``anon=``, ``key=``, ``secret=``, ``endpoint_url=``, ``profile=``, ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
from s3fs import S3FileSystem

from penstock.errors import StorageAuthError, StorageChangedError, StorageError, StorageNotFoundError
from penstock.storage.backend import Cancel, Receiver, Stat, Transient, call_in_thread, run_async

__all__ = ["S3Backend"]

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_PIECE = 1 << 18
_CREDENTIALS = (
    "check the credentials (AWS_* variables, ~/.aws); for public data give storage=Storage(options={'anon': True})"
)


class S3Backend:
    """Asks by HeadObject and GetObject. The clients' own retries are off: ours resume at the byte."""

    def __init__(self, options: Mapping[str, Any], idle: float) -> None:
        config = {
            "connect_timeout": idle,
            "read_timeout": idle,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 64,
            **options.get("config_kwargs", {}),
        }
        self._fs = S3FileSystem(skip_instance_cache=True, **{**options, "config_kwargs": config})
        self._fs.retries = 1

    def stat(self, url: str, *, idle: float, deadline: float, cancel: Cancel) -> Stat:
        return run_async(self._stat(url), deadline=deadline, cancel=cancel)

    def fetch(
        self, url: str, begin: int, end: int | None, into: Receiver, *, idle: float, deadline: float, cancel: Cancel
    ) -> None:
        run_async(self._fetch(url, begin, end, into), deadline=deadline, cancel=cancel)

    def glob(self, url: str, *, deadline: float) -> list[str]:
        def find() -> list[str]:
            self._fs.invalidate_cache()
            found = self._fs.glob(url, detail=True)
            return sorted(f"s3://{name}" for name, info in found.items() if info.get("type") != "directory")

        try:
            return call_in_thread(find, deadline=deadline, cancel=Cancel())
        except Exception as error:
            _fail(url, error)

    async def _stat(self, url: str) -> Stat:
        try:
            head = await self._fs._call_s3("head_object", **self._names(url))
        except (OSError, BotoCoreError, ClientError) as error:
            _fail(url, error)
        except TypeError as error:
            raise StorageError(f"cannot read {url}: {error}; are these options of s3fs.S3FileSystem?") from error
        return Stat(int(head["ContentLength"]), head.get("ETag", ""), _time(head))

    async def _fetch(self, url: str, begin: int, end: int | None, into: Receiver) -> None:
        wanted = {} if begin == 0 and end is None else {"Range": f"bytes={begin}-{'' if end is None else end - 1}"}
        try:
            answer = await self._fs._call_s3("get_object", **self._names(url), **wanted)
            body = answer["Body"]
            try:
                part = _RANGE.match(answer.get("ContentRange", ""))
                size, offset = (int(part[3]), int(part[1])) if part else (int(answer["ContentLength"]), 0)
                into.begun(Stat(size, answer.get("ETag", ""), _time(answer)), offset)
                while data := await body.read(_PIECE):
                    if not into.piece(data):
                        break
            finally:
                body.close()
        except StorageError:
            raise
        except (OSError, BotoCoreError, ClientError) as error:
            _fail(url, error)
        except TypeError as error:
            raise StorageError(f"cannot read {url}: {error}; are these options of s3fs.S3FileSystem?") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("aiohttp", "aiobotocore"):
                raise
            raise Transient(str(error) or type(error).__name__) from None

    def _names(self, url: str) -> dict[str, str]:
        bucket, key, version = self._fs.split_path(url)
        if not bucket or not key:
            raise StorageError(f"{url}: an object is named s3://bucket/key")
        return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


def _time(answer: Mapping[str, Any]) -> str:
    when = answer.get("LastModified")
    return "" if when is None else str(when)


def _fail(url: str, error: BaseException) -> NoReturn:
    """Raise what an error of the client means."""
    if isinstance(error, StorageError | Transient):
        raise error
    original = error.__cause__ if isinstance(error.__cause__, ClientError) else error
    response = getattr(original, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = response.get("Error", {}).get("Code", "")
    reason = f"{code or type(error).__name__}: {error}"
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        raise StorageAuthError(f"{url}: no credentials for S3 were found; {_CREDENTIALS}") from None
    if isinstance(error, TimeoutError):
        raise Transient("no byte came in time") from None
    if isinstance(error, FileNotFoundError) or status == 404:
        what = "bucket" if code == "NoSuchBucket" else "object"
        raise StorageNotFoundError(f"{url} does not exist: no such {what}") from None
    if isinstance(error, PermissionError) or status in (401, 403):
        raise StorageAuthError(f"{url}: access refused ({reason}); {_CREDENTIALS}") from None
    if status == 416:
        raise StorageChangedError(f"{url} is shorter than it was: the server has no such range") from None
    wrong = isinstance(error, NoRegionError | ParamValidationError | ProfileNotFound)
    if wrong or (400 <= status < 500 and status not in (408, 429)):
        raise StorageError(f"cannot read {url}: {reason}") from None
    raise Transient(reason) from None
