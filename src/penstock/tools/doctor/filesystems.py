"""The file systems under paths, and the user's cache folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.tools.doctor.result import Advice

__all__ = ["CacheFolder", "Mount", "Place", "cache_folder", "kind_of", "mount_of", "place"]

_MOUNTS = Path("/proc/self/mountinfo")
_LITTLE_SPACE = 1 << 30

_KINDS = {
    "local": "ext2 ext3 ext4 xfs btrfs f2fs zfs bcachefs jfs reiserfs vfat exfat ntfs ntfs3 fuseblk apfs hfs ufs",
    "memory": "tmpfs ramfs devtmpfs hugetlbfs",
    "overlay": "overlay aufs fuse.fuse-overlayfs",
    "network": "nfs nfs4 cifs smb3 smbfs 9p virtiofs afs ceph glusterfs fuse.glusterfs fuse.sshfs",
    "parallel": "lustre gpfs beegfs wekafs panfs pvfs2 orangefs fuse.ceph fuse.juicefs",
    "image": "squashfs erofs iso9660 fuse.squashfuse fuse.squashfuse_ll",
}
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}


class Mount(NamedTuple):
    """A line of mountinfo: where it is mounted, type and source of the file system, whether for reading only."""

    point: str
    type: str
    source: str
    read_only: bool


@dataclass(frozen=True)
class Place:
    """A path and what it lies on.

    Attributes:
        kind: local, memory, overlay, network, parallel, fuse, image or unknown.
        type: as the system calls it: ext4, nfs4, ...
        mount, source: where that is mounted, and what.
        writable: whether files can be made there: beside it, if it is a file.
        free: bytes.
        error: why it cannot be read.
    """

    path: str
    kind: str
    type: str | None
    mount: str | None
    source: str | None
    writable: bool
    free: int | None
    error: str | None


@dataclass(frozen=True)
class CacheFolder:
    """Where indexes and copies are kept that cannot lie beside the data. ``mode`` is in octal."""

    path: str | None
    kind: str
    mode: str | None
    free: int | None
    error: str | None


def _unescaped(text: str) -> str:
    """Spaces and such come as octal numbers."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def _mounts(listing: Path) -> Iterator[Mount]:
    try:
        lines = listing.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(), after.split()
        yield Mount(_unescaped(fields[4]), kind, _unescaped(source), "ro" in fields[5].split(","))


def mount_of(path: str | os.PathLike[str], listing: Path = _MOUNTS) -> Mount | None:
    """What is mounted where a path lies, the last of several; None where the system does not say."""
    real, best = os.path.realpath(path), None
    for mount in _mounts(listing):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def kind_of(type_name: str) -> str:
    """The kind of a file system.

    >>> kind_of("nfs4"), kind_of("ext4"), kind_of("fuse.s3fs"), kind_of("lustre")
    ('network', 'local', 'fuse', 'parallel')
    """
    return _KIND.get(type_name) or ("fuse" if type_name.partition(".")[0] == "fuse" else "unknown")


def place(path: str, listing: Path = _MOUNTS) -> tuple[Place, list[Advice]]:
    """Look at a file or a folder, by reading a little of it."""
    error = _read(path)
    mount = mount_of(path, listing)
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    kind = "unknown" if mount is None else kind_of(mount.type)
    writable = not (mount is not None and mount.read_only) and os.access(folder, os.W_OK | os.X_OK)
    type_name, point, source = (None, None, None) if mount is None else (mount.type, mount.point, mount.source)
    found = Place(path, kind, type_name, point, source, writable, _free(folder), error)
    if error is not None:
        do = "mend the path, or the rights to it; addresses of stores are not looked at"
        return found, [Advice(path, f"it cannot be read: {error}", do, failure=True)]
    return found, list(_advice(found))


def _read(path: str) -> str | None:
    """The reason why a file or folder cannot be read."""
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            with open(path, "rb", buffering=0, opener=_at_once) as file:
                file.read(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _at_once(path: str, flags: int) -> int:
    """Open a file, without waiting for somebody to write into a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _free(folder: str | os.PathLike[str]) -> int | None:
    try:
        state = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return state.f_frsize * state.f_bavail


_SHARED = (
    "each small file is a question to another machine, and a file that is overwritten may kill whoever has it mapped",
    "pack small files (penstock shards pack); index manifests once, before the job starts (penstock manifest build); "
    "replace files by rename",
)
_WORDS = {
    "network": _SHARED,
    "parallel": _SHARED,
    "fuse": (
        "random reads may each be a request over the network, and mapped files may fault slowly",
        "give an object store's own address (s3://...), which is read ahead and cached; else copy to a local disk",
    ),
    "overlay": (
        "it is the writable layer of a container: slow to write to, and gone with the container, indexes included",
        "mount a volume for data, outputs and the cache folder",
    ),
    "memory": (
        "what is here takes memory, and counts towards a container's limit",
        "plan for its size (penstock plan); there is no need to warm it",
    ),
}


def _advice(found: Place) -> Iterator[Advice]:
    if found.kind in _WORDS:
        what, do = _WORDS[found.kind]
        yield Advice(found.path, f"{found.type}: {what}", do)
    if not found.writable:
        what = "indexes cannot be written beside the files, so each machine makes its own in its cache folder"
        yield Advice(found.path, what, "penstock manifest build (or shards index) where it can be written to")


def cache_folder(listing: Path = _MOUNTS) -> tuple[CacheFolder, list[Advice]]:
    """The user's cache folder, which is made if it is not there: locks need it too."""
    from penstock.storage.cache import cache_root

    try:
        folder = cache_root()
        mode = folder.stat().st_mode
    except OSError as error:
        reason = error.strerror or str(error)
        found = CacheFolder(None, "unknown", None, None, reason)
        do = "make ~/.cache writable, or set XDG_CACHE_HOME to a folder on a local disk"
        return found, [Advice("cache folder", f"there is no place for it: {reason}", do, failure=True)]
    mount = mount_of(folder, listing)
    kind = "unknown" if mount is None else kind_of(mount.type)
    found = CacheFolder(str(folder), kind, f"{stat.S_IMODE(mode):o}", _free(folder), None)
    return found, list(_cache_advice(found, mode, mount, fallback=folder.name != "penstock"))


def _cache_advice(found: CacheFolder, mode: int, mount: Mount | None, *, fallback: bool) -> Iterator[Advice]:
    move = "set XDG_CACHE_HOME to a folder on a local disk"
    if fallback:
        yield Advice("cache folder", f"it is {found.path}, since ~/.cache cannot be written to", move)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield Advice("cache folder", "others may write to it, and change what is read", f"chmod go-w {found.path}")
    elif mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Advice("cache folder", "others may read what is copied there", f"chmod go-rwx {found.path}")
    if mount is not None and found.kind in ("network", "parallel", "fuse"):
        what = f"it is on {mount.type}: locks may be slow or missing there, and copies cross the network twice"
        yield Advice("cache folder", what, move)
    if found.free is not None and found.free < _LITTLE_SPACE:
        what = f"{found.free / 1e6:,.0f} MB are free: indexes take about a fifth of a manifest, copies what they copy"
        yield Advice("cache folder", what, f"penstock cache clear, or {move}")
