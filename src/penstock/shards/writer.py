"""Write shards: `TarWriter` for one archive, `ShardWriter` for a sequence of shards.

    with ShardWriter("train-%06d.tar", maxcount=10_000) as writer:
        writer.write({"__key__": "0001", "jpg": image_bytes, "cls": 7, "json": {"source": "web"}})

A shard appears under its name when it is complete, or not at all: it is written to a temporary file, synced and
renamed. Its members equal those of WebDataset's writers, in the same order.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Self, cast

import zstandard

from penstock.errors import ConfigError, ShardError, ShardIOError
from penstock.shards.archive import BLOCK
from penstock.shards.encode import Encoder, make_encoder
from penstock.shards.tar import rounded
from penstock.storage.files import SHARD, io_error
from penstock.storage.local import write_atomically

__all__ = ["ShardWriter", "TarWriter"]

_RECORD = 20 * BLOCK  # archive sizes are multiples of this, as with tar


class TarWriter:
    """Writes samples to one tar archive.

    Args:
        fileobj: a path, or a file open for writing.
        user, group, mode, mtime: metadata of all members; ``mtime`` in seconds, by default the time of writing.
        compress: ``"gz"``, ``"bz2"``, ``"xz"``, True for gzip, False for none; by default by the path's extension.
        encoder: True encodes values by their extension; False accepts bytes only; a mapping adds functions by
            extension; a function receives the sample.
        keep_meta: also write values whose name begins with an underscore; they must be text.
        owns_file: close an open file at the end; after an exception, by its ``abandon`` method if it has one.

    Raises:
        ShardIOError: the file cannot be written.
        ConfigError: an unknown compression.
    """

    def __init__(
        self,
        fileobj: str | os.PathLike[str] | BinaryIO,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o444,
        compress: bool | str | None = None,
        encoder: bool | Mapping[str, Callable[[Any], bytes]] | Encoder = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        *,
        owns_file: bool = False,
    ) -> None:
        self._path = os.fspath(fileobj) if isinstance(fileobj, str | os.PathLike) else None
        self._user, self._group, self._mode, self._mtime = user.encode(), group.encode(), mode, mtime
        self._encode = make_encoder(encoder)
        self._keep_meta, self._owns_file = keep_meta, owns_file
        self.size = 0
        """Uncompressed bytes of the archive so far."""
        self.samples = 0
        """Samples so far."""
        self._failure = ""
        kind = _compression(compress, self._path)
        given = contextlib.nullcontext(cast(BinaryIO, fileobj))
        self._writing = given if self._path is None else write_atomically(self._path)
        with SHARD.naming(self._path or "the archive", "cannot write"):
            self._file = self._writing.__enter__()
        self._sink = _Sink(self._file)
        self._out: BinaryIO | None = _OPENERS[kind](self._sink) if kind else self._file

    def write(self, sample: Mapping[str, Any]) -> int:
        """Add a sample; return the bytes of its values.

        Raises:
            ShardError: no ``__key__``, or a value that is not bytes after encoding. Nothing of the sample is written.
            ShardIOError: the disk is full. After that, the archive cannot be continued.
        """
        if self._out is None:
            raise ShardError("this writer is closed")
        if "__key__" not in sample:
            raise ShardError("object must contain a __key__")
        encoded = self._encode(dict(sample))
        written = [name for name in sorted(encoded) if self._keep_meta or not name.startswith("_")]
        parts = [(name, self._value(name, encoded[name])) for name in written if name != "__key__"]
        mtime = int(time.time() if self._mtime is None else self._mtime)
        total = 0
        try:
            for name, data in parts:
                path = f"{sample['__key__']}.{name}".encode("utf-8", "surrogateescape")
                head = _header(path, len(data), self._mode, mtime, self._user, self._group)
                self._out.write(head)
                self._out.write(data)
                self._out.write(bytes(-len(data) % BLOCK))
                self.size += len(head) + rounded(len(data))
                total += len(data)
        except OSError as error:
            # Part of a sample may be written, so the archive can neither continue nor be finished.
            self._failure = str(io_error(self._path or "the archive", error, "cannot write"))
            self.abandon()
            raise ShardIOError(self._failure) from error
        self.samples += 1
        return total

    def _value(self, name: str, value: Any) -> bytes:
        if name.startswith("_"):
            if not isinstance(value, str):
                raise ShardError("the values of metadata must be of string type")
            return value.encode("utf-8")
        if not isinstance(value, bytes | bytearray | memoryview):
            raise ShardError(f"{name} doesn't map to a bytes after encoding ({type(value)})")
        return bytes(value)

    def close(self) -> None:
        """End the archive; a file given by its path appears now. Idempotent.

        Raises:
            ShardIOError: the disk is full, or an earlier write failed. No file is left.
        """
        out, self._out = self._out, None
        if self._failure:
            raise ShardIOError(self._failure)
        if out is None:
            return
        try:
            end = 2 * BLOCK
            out.write(bytes(end + -(self.size + end) % _RECORD))
            if out is not self._file:
                out.close()
            self._writing.__exit__(None, None, None)
        except BaseException as error:
            self._out = out
            self.abandon()
            if isinstance(error, OSError):
                raise SHARD.error(self._path or "the archive", error, "cannot write") from error
            raise
        if self._owns_file:
            self._owns_file = False
            self._file.close()

    def abandon(self) -> None:
        """Close without an archive: remove the temporary file; a file passed by the caller has no end mark."""
        out, self._out = self._out, None
        self._sink.detach()
        if out is not None and out is not self._file:
            out.close()
        with contextlib.suppress(OSError):  # its buffer may not fit the disk
            self._writing.__exit__(ShardError, ShardError("abandoned"), None)
        if self._owns_file:
            self._owns_file = False
            with contextlib.suppress(OSError):  # the original exception is more informative
                getattr(self._file, "abandon", self._file.close)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class ShardWriter:
    """Writes samples to shards, and starts a new shard when the current one is full.

    Args:
        pattern: the shard names, with a field for the number as in ``"train-%06d.tar"``.
        maxcount, maxsize: the number of samples, or bytes, after which a shard is full.
        post: called with the name of each finished shard.
        start_shard: the first number.
        opener: ``opener(name)`` returns the file to write to, instead of a local file. It is closed in any case; after
            an exception it is closed without the end mark, so that readers see a truncated archive, and by its
            ``abandon`` method if it has one.
        options: options of `TarWriter`.

    Raises:
        ConfigError: a pattern without a field for the number.
        ShardIOError: a file cannot be written.
    """

    def __init__(
        self,
        pattern: str,
        *,
        maxcount: int = 100_000,
        maxsize: float = 3e9,
        post: Callable[[str], object] | None = None,
        start_shard: int = 0,
        opener: Callable[[str], BinaryIO] | None = None,
        **options: Any,
    ) -> None:
        try:
            distinct = pattern % 1 != pattern % 2
        except (TypeError, ValueError):
            distinct = False
        if not distinct:
            raise ConfigError(f"{pattern!r} needs one field for the shard number, such as %06d")
        self.pattern, self.maxcount, self.maxsize = pattern, maxcount, maxsize
        self.total = 0
        """Samples so far."""
        self.shard = start_shard
        """The number of the next shard."""
        self.fname = ""
        """The name of the current shard."""
        self._post, self._opener, self._options = post, opener, options
        self.tarstream: TarWriter | None = None
        """The writer of the current shard."""
        self.next_stream()

    def next_stream(self) -> None:
        """Finish the current shard and start the next."""
        self.finish()
        self.fname = self.pattern % self.shard
        self.shard += 1
        if self._opener is None:
            self.tarstream = TarWriter(self.fname, **self._options)
        else:
            compress = _compression(self._options.get("compress"), self.fname) or False
            options = {**self._options, "compress": compress, "owns_file": True}
            self.tarstream = TarWriter(self._opener(self.fname), **options)
        self.count = 0
        """Samples in the current shard."""
        self.size = 0
        """Bytes of the values in the current shard."""

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample, to a new shard if the current one is full. Raises as `TarWriter.write`."""
        if self.tarstream is None or self.count >= self.maxcount or self.size >= self.maxsize:
            self.next_stream()
        assert self.tarstream is not None
        self.size += self.tarstream.write(sample)
        self.count += 1
        self.total += 1

    def finish(self) -> None:
        """Finish the current shard."""
        writer, self.tarstream = self.tarstream, None
        if writer is not None:
            writer.close()
            if self._post is not None:
                self._post(self.fname)

    def close(self) -> None:
        """Finish the last shard, by `finish`, which a subclass may override. Idempotent."""
        self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        elif self.tarstream is not None:
            self.tarstream.abandon()
            self.tarstream = None


class _Sink:
    """The file of a compressor, which would write its end even when it is garbage-collected."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file

    def write(self, data: bytes) -> int:
        return len(data) if self._file is None else self._file.write(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def detach(self) -> None:
        """Leave the file as it is: drop all further data."""
        self._file = None


_OPENERS: dict[str, Callable[[Any], Any]] = {
    "gz": lambda file: gzip.GzipFile(fileobj=file, mode="wb", mtime=0),
    "bz2": lambda file: bz2.BZ2File(file, "wb"),
    "xz": lambda file: lzma.LZMAFile(file, "wb"),  # noqa: SIM115
    "zst": lambda file: zstandard.ZstdCompressor().stream_writer(file, closefd=False),
}


def _compression(compress: bool | str | None, path: str | None) -> str:
    """Return the name of the compression, "" for none."""
    if compress is None:
        ending = (path or "").rpartition(".")[2]
        return {"tgz": "gz"}.get(ending, ending if ending in _OPENERS else "")
    if compress is True:
        return "gz"
    if compress is False:
        return ""
    if compress not in _OPENERS:
        raise ConfigError(f"unknown compression {compress!r}: use one of {', '.join(_OPENERS)}")
    return compress


def _header(name: bytes, size: int, mode: int, mtime: int, user: bytes, group: bytes) -> bytes:
    """Return all header blocks of a regular file.

    The format is ustar, with a GNU long-name header before it for names over 100 bytes, and sizes in base 256 from 8
    GiB on. Our parser, GNU tar and the standard library read it.
    """
    if len(name) <= 100:
        return _block(name, size, b"0", mode, mtime, user, group)
    text = name + b"\0"
    head = _block(b"././@LongLink", len(text), b"L", 0o644, 0, b"", b"")
    return head + text.ljust(rounded(len(text)), b"\0") + _block(name[:100], size, b"0", mode, mtime, user, group)


def _block(name: bytes, size: int, kind: bytes, mode: int, mtime: int, user: bytes, group: bytes) -> bytes:
    length = b"%011o\0" % size if size < 1 << 33 else b"\x80" + size.to_bytes(11, "big")
    block = b"%s%07o\x000000000\x000000000\0%s%011o\0        %s%sustar\x0000%s%s0000000\x000000000\0" % (
        name.ljust(100, b"\0"),
        mode,
        length,
        min(max(mtime, 0), (1 << 33) - 1),
        kind,
        bytes(100),
        user[:31].ljust(32, b"\0"),
        group[:31].ljust(32, b"\0"),
    )
    block = block.ljust(BLOCK, b"\0")
    return b"%s%06o\0 %s" % (block[:148], sum(block), block[156:])
