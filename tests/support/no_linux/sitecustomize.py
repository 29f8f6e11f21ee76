"""Make this interpreter look like one on macOS to Penstock, torch and multiprocessing.

Python runs this before the program. Names that only Linux has are removed, files below /proc and /sys cannot be opened,
and ``sys.platform`` is "darwin". Child processes begin the same way: they inherit the environment that leads here.
"""

import builtins
import mmap
import os
import select
import signal
import socket
import sys
import types

ONLY_LINUX = {
    os: (
        "CLONE_ EFD_ MFD_ O_TMPFILE POSIX_FADV_ SCHED_BATCH SPLICE_ copy_file_range eventfd getrandom getresuid "
        "memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity "
        "sched_setscheduler setns splice unshare"
    ),
    mmap: (
        "MAP_POPULATE MAP_STACK MADV_REMOVE MADV_DONTFORK MADV_DOFORK MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTDUMP "
        "MADV_DODUMP MADV_MERGEABLE MADV_UNMERGEABLE MADV_HWPOISON"
    ),
    select: "EPOLL epoll",
    signal: "SIGPWR SIGRTMAX SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK AF_PACKET AF_ALG AF_VSOCK SO_PEERCRED SO_PASSCRED SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC",
}


def _remove() -> None:
    for module, prefixes in ONLY_LINUX.items():
        for name in [name for name in vars(module) if name.startswith(tuple(prefixes.split()))]:
            delattr(module, name)
            if hasattr(module, "__all__") and name in module.__all__:
                module.__all__.remove(name)


def _is_hidden(path: object) -> bool:
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:  # a descriptor
        return False
    return text in ("/proc", "/sys") or text.startswith(("/proc/", "/sys/", "/dev/shm"))


def _hide(module: object, name: str) -> None:
    known = getattr(module, name)

    def hidden(path: object, *args: object, **kwargs: object) -> object:
        if _is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return known(path, *args, **kwargs)

    setattr(module, name, hidden)


_remove()
for name in ("open", "stat", "lstat", "listdir", "scandir", "statvfs", "readlink", "access"):
    _hide(os, name)
_hide(builtins, "open")
import io  # noqa: E402  (pathlib opens by io.open)

_hide(io, "open")
sys.platform = "darwin"
# urllib asks macOS itself for proxies.
_scproxy = types.ModuleType("_scproxy")
_scproxy._get_proxy_settings = _scproxy._get_proxies = dict  # type: ignore[attr-defined]
sys.modules["_scproxy"] = _scproxy
