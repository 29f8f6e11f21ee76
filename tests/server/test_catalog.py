"""Versions of data sets: files that change while they are served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from server_support import Share, expected, lines, pages_of, whole, write_lines

from penstock.errors import ManifestChangedError, ManifestError, ServerChangedError
from penstock.manifest import Manifest
from penstock.server import Client, Server


class TestVersions:
    def test_reload(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "train.txt", 100_000, "old")
        with Server({"train": path, "other": path}) as server, Client(server.address) as client:
            old = client.info("train")
            part = Share(name="train", fingerprint=old.fingerprint, samples=old.rows, seed=1)
            before = Manifest.open(path)
            stream = pages_of(client, part)
            head = next(stream)
            os.replace(write_lines(tmp_path / "new.txt", 500, "new"), path)
            assert server.reload() == ["train", "other"]
            assert server.reload() == []
            assert client.info("train").rows == 500
            assert lines([head, *stream]) == expected(before, part)
            assert lines(pages_of(client, part)) == expected(before, part)
            assert client.rows("train", old.fingerprint, [99_999]).column(0)[0].as_py() == b"old/0099999.jpg 9"
            assert client.info("train", old.fingerprint) == old
            assert [(one.rows, one.versions) for one in server.datasets] == [(500, 2)] * 2

    def test_a_version_that_comes_back_is_the_newest(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "train.txt", 10)
        with Server({"train": path}) as server:
            first = server.datasets[0].fingerprint
            for rows in (20, 10):
                os.replace(write_lines(tmp_path / "new.txt", rows), path)
                server.reload()
            assert (server.datasets[0].fingerprint, server.datasets[0].versions) == (first, 2)

    def test_only_some_versions_stay(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "train.txt", 10)
        with Server({"train": path}) as server, Client(server.address) as client:
            first = client.info().fingerprint
            for rows in range(11, 20):
                os.replace(write_lines(tmp_path / "new.txt", rows), path)
                server.reload()
            with pytest.raises(ServerChangedError, match=f"{first} was requested"):
                client.info("train", first)

    def test_a_file_that_cannot_be_opened(self, tmp_path: Path) -> None:
        good, bad = write_lines(tmp_path / "good.txt", 10), write_lines(tmp_path / "bad.txt", 10)
        with Server({"bad": bad, "good": good}) as server, Client(server.address) as client:
            bad.unlink()
            os.replace(write_lines(tmp_path / "new.txt", 20), good)
            with pytest.raises(ManifestError, match=r"bad\.txt") as caught:
                server.reload()
            assert "'bad', which keeps its current version" in caught.value.__notes__[0]
            assert [info.rows for info in client.list()] == [10, 20]
            assert client.manifest("bad")[3].label == 3

    def test_options_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("x.jpg,cat\n")
        manifest = Manifest.open(path, label="str", root="/data")
        with Server({"a": manifest}) as server, Client(server.address) as client:
            (tmp_path / "b.csv").write_text("x.jpg,cat\ny.jpg,dog\n")
            os.replace(tmp_path / "b.csv", path)
            server.reload()
            assert tuple(client.manifest()[1][:2]) == ("/data/y.jpg", "dog")

    def test_a_file_changed_in_place(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "train.txt", 100)
        with Server({"train": path}) as server, Client(server.address) as client:
            part = whole(client)
            path.write_text("other 1\n")
            with pytest.raises(ManifestChangedError, match=r"train\.txt"):
                list(pages_of(client, part))
            assert client.health() == {server.address: "ok"}
            server.reload()
            assert client.manifest()[0].path == "other"
