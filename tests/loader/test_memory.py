"""How much memory there is: by the machine, and by control groups of both versions."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from busy_support import HANG
from interpreter_support import METHODS
from process_support import Frames, write_to

from penstock import DataLoader
from penstock.errors import RingError
from penstock.loader.executors.process.ring import SharedFile
from penstock.memory import available_memory

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal:  {16 * MIB} kB\nMemFree:  1 kB\nMemAvailable:  {8 * MIB} kB\n"
MACHINE = 8 * MIB * 1024


def version_2(root: Path, path: str, folder: str, most: str, used: int = 0, stat: str = "anon 5\n") -> Path:
    return tree(
        root,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": f"0::{path}\n",
            f"sys/fs/cgroup/{folder}memory.max": f"{most}\n",
            f"sys/fs/cgroup/{folder}memory.current": f"{used}\n",
            f"sys/fs/cgroup/{folder}memory.stat": stat,
        },
    )


def test_without_proc(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_without_groups(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, {"proc/meminfo": MEMINFO})) == MACHINE
    assert available_memory(tree(tmp_path / "old", {"proc/meminfo": "MemFree: 1 kB\n"})) is None


def test_of_this_machine() -> None:
    left = available_memory()
    assert left is None or left > MIB


def test_version_2(tmp_path: Path) -> None:
    stat = f"anon 5\nfile {400 * MIB}\nactive_file {100 * MIB}\ninactive_file {50 * MIB}\nshmem 7\n"
    root = version_2(tmp_path, "/user/job", "user/job/", str(1000 * MIB), 700 * MIB, stat)
    assert available_memory(root) == 450 * MIB


def test_version_2_in_a_container(tmp_path: Path) -> None:
    assert available_memory(version_2(tmp_path / "namespace", "/", "", str(100 * MIB), 40 * MIB)) == 60 * MIB
    # Without a namespace the path is the host's, and what is mounted is the container's own group.
    assert available_memory(version_2(tmp_path / "none", "/docker/ab", "", str(100 * MIB), 40 * MIB)) == 60 * MIB
    assert available_memory(version_2(tmp_path / "above", "/../../other", "", str(100 * MIB), MIB)) in (
        99 * MIB,
        MACHINE,
    )


def test_the_least_of_all_levels(tmp_path: Path) -> None:
    version_2(tmp_path, "/a/b/c", "a/", str(300 * MIB), 100 * MIB)
    version_2(tmp_path, "/a/b/c", "a/b/", "max", 100 * MIB)
    assert available_memory(version_2(tmp_path, "/a/b/c", "a/b/c/", str(900 * MIB), 100 * MIB)) == 200 * MIB


@pytest.mark.parametrize("most", ["max", "", "nonsense", str(2**63 - 4096)])
def test_no_limit(tmp_path: Path, most: str) -> None:
    assert available_memory(version_2(tmp_path, "/a", "a/", most)) == MACHINE


def test_more_is_used_than_there_is(tmp_path: Path) -> None:
    assert available_memory(version_2(tmp_path, "/a", "a/", str(MIB), 2 * MIB)) == 0


def test_more_is_cached_than_is_used(tmp_path: Path) -> None:
    root = version_2(tmp_path, "/a", "a/", str(MIB), MIB, f"active_file {3 * MIB}\n")
    assert available_memory(root) == MIB


def test_version_1(tmp_path: Path) -> None:
    stat = (
        f"cache {500 * MIB}\ninactive_file {10 * MIB}\nactive_file {20 * MIB}\nhierarchical_memory_limit 5\n"
        f"total_inactive_file {100 * MIB}\ntotal_active_file {200 * MIB}\n"
    )
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/job\n1:name=systemd:/y\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5000 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": stat,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{1000 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{900 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": stat,
        },
    )
    assert available_memory(root) == 400 * MIB


def test_a_file_has_memory_where_it_is_reserved() -> None:
    file = SharedFile()
    assert file.size > 1 << 40
    file.reserve(1 << 40, MIB)
    assert os.fstat(file.fd).st_blocks * 512 == MIB
    array = np.ndarray(MIB, np.uint8, file.map, 1 << 40)
    array[:] = 7
    file.discard(1 << 40, MIB // 2)
    assert os.fstat(file.fd).st_blocks * 512 == MIB // 2
    assert not array[: MIB // 2].any()
    fd = file.fd
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert (array[MIB // 2 :] == 7).all()


@pytest.mark.parametrize("method", METHODS)
def test_workers_inherit_the_file(method: str) -> None:
    context = multiprocessing.get_context(method)
    file = SharedFile()
    ours, theirs = context.Pipe()
    process = context.Process(target=write_to, args=(file, theirs))
    process.start()
    assert ours.poll(HANG)
    assert ours.recv() == os.fstat(file.fd).st_ino
    process.join()
    assert os.pread(file.fd, 15, 0) == b"from the worker"


@pytest.fixture(name="small_files")
def _small_files() -> Any:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * MIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_a_limit_of_files_is_that_of_the_address_space() -> None:
    """Each slot is 1/1024 of it: batches that do not fit come by the pipe."""
    assert SharedFile().size == 16 * MIB
    with DataLoader(Frames([5000] * 8 + [100] * 8), 2, num_workers=1, executor="process") as loader:
        assert [len(batch[0]) for batch in loader] == [5000] * 4 + [100] * 4
        assert loader.stats()["ways"] == {"ring": 8}
    with DataLoader(Frames([50_000] * 8), 2, num_workers=1, executor="process") as loader:
        assert [batch[1, 0].item() for batch in loader] == [1, 3, 5, 7]
        assert loader.stats()["ways"] == {"pipe": 4}


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("limit", [1 << 10, 1 << 18])
def test_a_limit_of_files_that_leaves_no_room_for_workers(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    loader = DataLoader(Frames([100] * 8), 2, num_workers=1, executor="process")
    with pytest.raises(RingError, match=r"raise the limit.* \(.*ulimit -f.*executor='thread'"):
        iter(loader)


@pytest.mark.usefixtures("small_files")
def test_the_system_refuses() -> None:
    file = SharedFile()
    with pytest.raises(OSError) as caught:
        file.reserve(file.size - MIB, 2 * MIB)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize("ranks", [1, 1024])
def test_more_than_there_is_left(ranks: int) -> None:
    left = available_memory()
    if left is None:
        pytest.skip("nobody knows how much there is")
    shared = ", for 1024 ranks" if ranks > 1 else ""
    text = (
        rf"a batch needs \d.* MiB of shared memory, and \d+ MiB are left on this machine or in this container{shared}: "
    )
    with pytest.raises(RingError, match=text + "lower batch_size"):
        SharedFile(ranks).reserve(0, left * 2 // ranks)


class Scarce(Frames):
    """Batches for which there is no memory, from some sample on."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__([20_000] * 400)
        self.at, self.error = at, error

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            error = self.error

            def reserve(*_: Any) -> None:
                raise error

            SharedFile.reserve = reserve  # type: ignore[method-assign]
        return torch.full((20_000 if index < self.at else 80_000,), index % 251, dtype=torch.uint8)


def test_too_little_memory_is_the_error_of_its_batch() -> None:
    data = Scarce(4, RingError("a batch needs 0.2 MiB of shared memory, and 0 MiB are left"))
    with DataLoader(data, 2, num_workers=1, executor="process") as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        with pytest.raises(RingError, match=r"a batch needs 0\.2 MiB of shared memory"):
            next(batches)


def test_batches_for_which_the_system_refuses_memory_come_by_the_pipe() -> None:
    data = Scarce(200, OSError(errno.ENOSPC, "no more"))
    with DataLoader(data, 2, num_workers=1, prefetch_factor=8, executor="process") as loader:
        batches: Any = iter(loader)
        for number in range(200):
            assert (next(batches)[1] == (2 * number + 1) % 251).all()
        ways = loader.stats()["ways"]
        assert set(ways) == {"ring", "refused"}
        assert 100 <= ways["ring"] < 120
