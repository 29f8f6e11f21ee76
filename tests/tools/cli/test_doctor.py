"""``penstock doctor`` says what is here, what that costs which is not, and fails for what has to work."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.images import native
from penstock.images.backends import BACKENDS, installed
from penstock.tools.cli.app import app
from penstock.tools.doctor import filesystems, machine, packages, services

MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:9 / /data rw,relatime shared:1 - autofs systemd-1 rw
31 27 0:10 / /data ro,relatime shared:2 - nfs4 filer:/data rw
32 27 0:11 / /data/my\040work rw - fuse.s3fs s3fs rw
33 27 0:12 / /lustre rw - lustre 10.0.0.1@o2ib:/fs rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS.lstrip())
    return path


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of other tests."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def doctor(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


class TestCommand:
    def test_json(self, tmp_path: Path) -> None:
        code, report = doctor(tmp_path)
        assert (code, report["ok"]) == (0, True), report["advice"]
        versions = {package["name"]: package["version"] for package in report["packages"]}
        assert versions["numpy"] == np.__version__
        assert {name for name, here in report["images"]["backends"].items() if here} == set(installed())
        assert set(report["images"]["backends"]) == set(BACKENDS)
        assert report["images"]["extension"] == native.is_available()
        assert report["images"]["libjpeg_turbo"] == native.libjpeg_turbo()
        assert report["cores"]["usable"] <= len(os.sched_getaffinity(0))
        assert 0 < report["memory"]["usable"] <= report["memory"]["available"] <= report["memory"]["total"]
        assert report["places"][0]["path"] == str(tmp_path)
        assert report["places"][0]["writable"]
        assert report["cache"]["path"] is not None
        assert report["ray"] is None
        assert report["server"] is None

    def test_people_read_tables(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "is_available", lambda: False)
        result = CliRunner().invoke(app, ["doctor", str(tmp_path), "/etc/passwd"])
        assert result.exit_code == 0, result.output
        for title in ("Installed", "Optional", "This machine", "Paths", "Could be better"):
            assert title in result.stdout
        assert "crops need the whole image decoded" in result.stdout
        assert "-> install a C compiler" in result.stdout
        assert "Does not work" not in result.stdout
        assert max(map(len, result.stdout.splitlines())) < 400  # text, not padding
        assert not result.stderr

    @pytest.mark.parametrize("arguments", [["nowhere"], ["."]], ids=["missing", "readable"])
    def test_a_path_that_cannot_be_read_fails(self, arguments: list[str]) -> None:
        code, report = doctor(*arguments)
        assert code == (arguments == ["nowhere"])
        assert [(advice["about"]) for advice in report["advice"] if advice["failure"]] == arguments * code

    def test_services_that_do_not_answer_fail(self) -> None:
        with socket.socket() as taken:  # not listening
            taken.bind(("127.0.0.1", 0))
            nobody = "{}:{}".format(*taken.getsockname())
            code, report = doctor("--ray", nobody, "--server", nobody)
        assert code == 1
        assert {advice["about"] for advice in report["advice"] if advice["failure"]} == {"Ray", "server"}
        assert report["ray"]["error"]
        assert report["server"]["datasets"] is None

    def test_a_server_that_answers(self, tmp_path: Path) -> None:
        from penstock.manifest import Manifest
        from penstock.server import Server

        (tmp_path / "train.txt").write_text("a.jpg 1\nb.jpg 2\n")
        with Server({"train": Manifest.open(tmp_path / "train.txt")}) as server:
            code, report = doctor("--server", server.address.removeprefix("grpc://"))
        assert code == 0
        assert report["server"] == {"address": server.address, "datasets": {"train": 2}, "error": None}

    def test_a_token_without_a_server_is_no_question(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "doctor", "--token-file", "token"], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert done.stderr == "error: --token-file and --tls-roots need --server: add it\n"


class TestPackages:
    def test_one_that_cannot_be_imported_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "simplejpeg.py").write_text("raise ImportError('libturbojpeg.so.0: cannot open shared object')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "simplejpeg")
        code, report = doctor(tmp_path)
        assert (code, report["images"]) == (1, None)
        failures = [advice for advice in report["advice"] if advice["failure"]]
        assert [advice["about"] for advice in failures] == ["simplejpeg"]
        assert "libturbojpeg.so.0: cannot open shared object" in failures[0]["what"]
        assert failures[0]["do"].startswith("pip install --force-reinstall 'simplejpeg>=")

    @pytest.mark.parametrize(
        ("version", "oldest", "failures"),
        [("2.9.1", "2.10", 1), ("2.10", "2.9", 0), ("2.6.0+cpu", "2.6", 0), ("unknown", "2.6", 0)],
    )
    def test_versions(self, version: str, oldest: str, failures: int) -> None:
        package = packages.Package("torch", version, oldest, None, "all of it", None)
        assert len(packages._judged(package)) == failures


class TestPlaces:
    @pytest.mark.parametrize(
        ("path", "point", "kind"),
        [
            ("/home/me", "/", "local"),
            ("/data/x", "/data", "network"),  # not what automounts it
            ("/database", "/", "local"),
            ("/data/my work/a", "/data/my work", "fuse"),
            ("/lustre", "/lustre", "parallel"),
        ],
    )
    def test_the_last_and_longest_mount(self, mounts: Path, path: str, point: str, kind: str) -> None:
        mount = filesystems.mount_of(path, mounts)
        assert mount is not None
        assert (mount.point, filesystems.kind_of(mount.type)) == (point, kind)

    def test_this_machine(self, tmp_path: Path) -> None:
        """Against the system's own program."""
        mount = filesystems.mount_of(tmp_path)
        done = subprocess.run(["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True)
        shared = filesystems.mount_of("/dev/shm")
        assert mount is not None
        assert shared is not None
        assert shared.type == done.stdout.strip()

    def test_advice_follows_the_kind(self, tmp_path: Path) -> None:
        listing = tmp_path / "mountinfo"
        listing.write_text("27 1 254:0 / / rw - nfs4 filer:/ rw\n")
        found, advice = filesystems.place(str(tmp_path), listing)
        assert (found.kind, found.source, found.writable) == ("network", "filer:/", True)
        assert "penstock shards pack" in advice[0].do
        listing.write_text("27 1 254:0 / / ro - squashfs image ro\n")
        found, advice = filesystems.place(str(tmp_path), listing)
        assert (found.kind, found.writable) == ("image", False)
        assert "penstock manifest build" in advice[0].do
        assert not any(one.failure for one in advice)

    def test_a_pipe_that_nobody_writes_into_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        assert filesystems.place(str(tmp_path / "pipe"))[0].error is None

    def test_a_cache_folder_that_others_may_write_to_or_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = tmp_path / "penstock"
        folder.mkdir()
        folder.chmod(0o777)
        found, advice = filesystems.cache_folder()
        assert (found.path, found.mode) == (str(folder), "777")
        assert f"chmod go-w {folder}" in [one.do for one in advice]
        folder.chmod(0o755)
        assert f"chmod go-rwx {folder}" in [one.do for one in filesystems.cache_folder()[1]]
        folder.chmod(0o700)
        assert not any(one.do.startswith("chmod") for one in filesystems.cache_folder()[1])


class TestMachine:
    def test_memory_of_a_container(self, tmp_path: Path) -> None:
        group = tmp_path / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n")
        (tmp_path / "proc/self/cgroup").write_text("0::/\n")
        (group / "memory.max").write_text(f"{1 << 30}\n")
        (group / "memory.current").write_text("0\n")
        (group / "memory.stat").write_text("active_file 0\n")
        found, advice = machine.memory(tmp_path)
        assert found == machine.Memory(16_000_000 * 1024, 8_000_000 * 1024, 1 << 30)
        assert "1.1 GB can be used" in advice[0].what

    def test_few_open_files(self) -> None:
        """What a process may have, asked for in one that may have few."""
        program = (
            "from penstock.tools.doctor import machine; "
            "found, advice = machine.open_files(); print(found, advice[0].do)"
        )
        command = ["bash", "-c", f'ulimit -Sn 512; ulimit -Hn 2048; "{sys.executable}" -c "{program}"']
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout == "OpenFiles(soft=512, hard=2048) ulimit -n 2048\n", done.stderr

    def test_shared_memory(self, tmp_path: Path) -> None:
        found, _ = machine.shared_memory()
        assert found is not None
        assert 0 <= found.free <= found.size
        assert machine.shared_memory(str(tmp_path / "none")) == (None, [])


class TestRay:
    def test_signs_of_a_cluster_are_knocked_at(self, tmp_path: Path) -> None:
        (tmp_path / "ray").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as head:
            address = f"127.0.0.1:{head.getsockname()[1]}"
            (tmp_path / "ray" / "ray_current_cluster").write_text(address)
            found, advice = services.ray_cluster(None, installed=True)
            assert found == services.RayCluster(address, None, None, None)
            assert not advice
        found, advice = services.ray_cluster(None, installed=True)  # a sign that a kill has left
        assert found is not None
        assert found.error is not None
        assert [one.failure for one in advice] == [False]
