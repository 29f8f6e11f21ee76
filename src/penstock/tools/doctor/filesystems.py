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
    """A line of mountinfo: mount point, type and source of a file system, and whether it is read-only."""

    point: str
    type: str
    source: str
    read_only: bool


@dataclass(frozen=True)
class Place:
    """A path and its file system.

    Attributes:
        kind: local, memory, overlay, network, parallel, fuse, image or unknown.
        type: the system's name for the file system: ext4, nfs4, ...
        mount, source: mount point and source of the file system.
        writable: whether files can be created in the folder, or beside the file.
        free: free bytes.
        error: why the path cannot be read.
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
    """The folder for indexes and copies that are not stored beside the data. ``mode`` is an octal number."""

    path: str | None
    kind: str
    mode: str | None
    free: int | None
    error: str | None


def _unescaped(text: str) -> str:
    """Replace mountinfo's octal escapes of spaces and similar characters."""
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
    """Return the mount that holds a path (the last one listed, if several do); None if mounts are not listed."""
    real, best = os.path.realpath(path), None
    for mount in _mounts(listing):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def kind_of(type_name: str) -> str:
    """Return the kind of a file system.

    >>> kind_of("nfs4"), kind_of("ext4"), kind_of("fuse.s3fs"), kind_of("lustre")
    ('network', 'local', 'fuse', 'parallel')
    """
    return _KIND.get(type_name) or ("fuse" if type_name.partition(".")[0] == "fuse" else "unknown")


def place(path: str, listing: Path = _MOUNTS) -> tuple[Place, list[Advice]]:
    """Check a file or folder: read a little of it, and identify its file system."""
    error = _read(path)
    mount = mount_of(path, listing)
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    kind = "unknown" if mount is None else kind_of(mount.type)
    writable = not (mount is not None and mount.read_only) and os.access(folder, os.W_OK | os.X_OK)
    type_name, point, source = (None, None, None) if mount is None else (mount.type, mount.point, mount.source)
    found = Place(path, kind, type_name, point, source, writable, _free(folder), error)
    if error is not None:
        do = "correct the path or its permissions; addresses of object stores are not checked"
        return found, [Advice(path, f"it cannot be read: {error}", do, failure=True)]
    return found, list(_advice(found))


def _read(path: str) -> str | None:
    """Return the reason why a file or folder cannot be read; None if it can."""
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
    """Open a file. If it is a pipe, do not wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _free(folder: str | os.PathLike[str]) -> int | None:
    try:
        state = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return state.f_frsize * state.f_bavail


_SHARED = (
    "each small file is a request to another machine, and overwriting a mapped file may kill its readers",
    "pack small files (penstock shards pack); index manifests once, before the job starts (penstock manifest build); "
    "replace files by rename",
)
_WORDS = {
    "network": _SHARED,
    "parallel": _SHARED,
    "fuse": (
        "each random read may be a request over the network, and mapped files may be slow",
        "use the object store's own address (s3://...), which is read ahead and cached; else copy to a local disk",
    ),
    "overlay": (
        "it is the writable layer of a container: slow to write to, and lost with the container, indexes included",
        "mount a volume for data, outputs and the cache folder",
    ),
    "memory": (
        "files here take memory, and count towards a container's limit",
        "plan for their size (penstock plan); they need no warming",
    ),
}


def _advice(found: Place) -> Iterator[Advice]:
    if found.kind in _WORDS:
        what, do = _WORDS[found.kind]
        yield Advice(found.path, f"{found.type}: {what}", do)
    if not found.writable:
        what = "indexes cannot be written beside the files, so each machine writes its own into its cache folder"
        yield Advice(found.path, what, "run penstock manifest build (or shards index) where it is writable")


def cache_folder(listing: Path = _MOUNTS) -> tuple[CacheFolder, list[Advice]]:
    """Check the user's cache folder, and create it if missing. Locks are stored there, too."""
    from penstock.storage.local import cache_root

    try:
        folder = cache_root()
        mode = folder.stat().st_mode
    except OSError as error:
        reason = error.strerror or str(error)
        found = CacheFolder(None, "unknown", None, None, reason)
        do = "make ~/.cache writable, or set XDG_CACHE_HOME to a folder on a local disk"
        return found, [Advice("cache folder", f"it cannot be created: {reason}", do, failure=True)]
    mount = mount_of(folder, listing)
    kind = "unknown" if mount is None else kind_of(mount.type)
    found = CacheFolder(str(folder), kind, f"{stat.S_IMODE(mode):o}", _free(folder), None)
    return found, list(_cache_advice(found, mode, mount, fallback=folder.name != "penstock"))


def _cache_advice(found: CacheFolder, mode: int, mount: Mount | None, *, fallback: bool) -> Iterator[Advice]:
    move = "set XDG_CACHE_HOME to a folder on a local disk"
    if fallback:
        yield Advice("cache folder", f"it is {found.path}, because ~/.cache is not writable", move)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield Advice("cache folder", "other users may write to it, and so change your data", f"chmod go-w {found.path}")
    elif mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Advice("cache folder", "other users may read the copies in it", f"chmod go-rwx {found.path}")
    if mount is not None and found.kind in ("network", "parallel", "fuse"):
        what = f"it is on {mount.type}: locks may be slow or missing there, and copies cross the network twice"
        yield Advice("cache folder", what, move)
    if found.free is not None and found.free < _LITTLE_SPACE:
        what = f"{found.free / 1e6:,.0f} MB are free: an index needs a fifth of its manifest, a copy all of its file"
        yield Advice("cache folder", what, f"penstock cache clear, or {move}")
