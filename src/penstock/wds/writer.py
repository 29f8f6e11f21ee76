"""`TarWriter` and `ShardWriter` with WebDataset's arguments; see `penstock.shards.writer`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from penstock.shards import writer as shards
from penstock.wds.gopen import gopen

__all__ = ["ShardWriter", "TarWriter", "numpy_dumps", "torch_dumps"]


class TarWriter(shards.TarWriter):
    """Write samples to one tar archive.

    Args:
        fileobj: a path, an open file, or a ``pipe:`` command that `penstock.wds.trust` allows. An exception ends the
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
        self._pipe: BinaryIO | None = None
        if isinstance(fileobj, str) and fileobj.startswith("pipe:"):
            fileobj = self._pipe = gopen(fileobj, "wb")
        super().__init__(
            fileobj,
            user=user,
            group=group,
            mode=mode,
            compress=compress,
            encoder=encoder,
            keep_meta=keep_meta,
            mtime=mtime,
        )

    def close(self) -> None:
        """Finish the archive."""
        try:
            super().close()
        except BaseException:
            self.abandon()
            raise
        if self._pipe is not None:
            self._pipe.close()

    def abandon(self) -> None:
        """Close without finishing the archive."""
        super().abandon()
        if self._pipe is not None:
            shards.abandon(self._pipe)


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
            opener = _open
        super().__init__(
            pattern, maxcount=maxcount, maxsize=maxsize, post=post, start_shard=start_shard, opener=opener, **kw
        )

    @property
    def size(self) -> int:
        """Bytes in the current shard."""
        return self._size

    @property
    def tarstream(self) -> shards.TarWriter | None:
        """The writer of the current shard."""
        return self._writer

    def next_stream(self) -> None:
        """Finish the current shard and start the next."""
        super().next_stream()
        self.count = 0
        """Samples in the current shard."""

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample, to a new shard if the current one is full."""
        super().write(sample)
        self.count += 1


def _open(name: str) -> BinaryIO:
    return gopen(name, "wb")


def numpy_dumps(data: Any) -> bytes:
    """Return an array as the bytes of an npy file."""
    out = io.BytesIO()
    np.save(out, data, allow_pickle=False)
    return out.getvalue()


def torch_dumps(data: Any) -> bytes:
    """Return the bytes of a pth file."""
    import torch

    out = io.BytesIO()
    torch.save(data, out)
    return out.getvalue()
