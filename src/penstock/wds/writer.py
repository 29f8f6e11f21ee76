"""`TarWriter` and `ShardWriter` with WebDataset's arguments; see `penstock.shards.writer`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from penstock.shards import writer as shards
from penstock.shards.encode import numpy_dumps as numpy_dumps
from penstock.shards.encode import torch_dumps as torch_dumps
from penstock.wds.gopen import gopen


class TarWriter(shards.TarWriter):
    """Write samples to one tar archive.

    Args:
        fileobj: a path, an open file, or a ``pipe:`` command that `penstock.wds.allow` allows. An exception ends the
            command before it sees the end of its input (see `Pipe`), so it does not upload a partial archive.
        user, group, mode, compress, encoder, keep_meta, mtime: see `penstock.TarWriter`.
        format: for compatibility; names and sizes of any length are always written.
    """

    def __init__(
        self,
        fileobj: Any,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: Any = None,
    ) -> None:
        is_command = isinstance(fileobj, str) and fileobj.startswith("pipe:")
        file = gopen(fileobj, "wb") if is_command else fileobj
        super().__init__(file, user, group, mode, compress, encoder, keep_meta, mtime, owns_file=is_command)


class ShardWriter(shards.ShardWriter):
    """Write samples to as many shards as needed.

    Args:
        pattern, maxcount, maxsize, post, start_shard, opener, kw: see `penstock.ShardWriter`.
        verbose: for compatibility; nothing is printed.
    """

    def __init__(
        self,
        pattern: str,
        maxcount: int = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], object] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], BinaryIO] | None = None,
        **kw: Any,
    ) -> None:
        kw.pop("format", None)
        if opener is None and pattern.startswith("pipe:"):
            opener = partial(gopen, mode="wb")
        super().__init__(
            pattern, maxcount=maxcount, maxsize=maxsize, post=post, start_shard=start_shard, opener=opener, **kw
        )
