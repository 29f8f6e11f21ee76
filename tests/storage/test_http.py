"""Objects over HTTP from a server that fails: every byte is right, or there is an error that names the object."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_run import full_only

from penstock import DataLoader, ImageDataset, LoadBytes, Manifest, RankDataset
from penstock.datasets.arrays import LoadArray
from penstock.datasets.loading import LoadImage
from penstock.errors import (
    ConfigError,
    ImageError,
    PenstockError,
    StorageAuthError,
    StorageChangedError,
    StorageError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from penstock.images.sizes import measure
from penstock.images.transforms import HorizontalFlip
from penstock.storage import Storage, local_path, open_source, read_object

DATA = os.urandom((5 << 20) + 12345)
QUICK = Storage(idle=0.5, deadline=10.0, attempts=4, block=1 << 20)


class TestReading:
    def test_size_version_and_parts(self, server: Any) -> None:
        source = open_source(server.put("a.bin", DATA, etag='"v1"'))
        assert (source.size, source.etag) == (len(DATA), '"v1"')
        assert source.read_at(0, 10) == DATA[:10]
        assert source.read_at(len(DATA) - 3, 10) == DATA[-3:]
        assert source.read_at(len(DATA), 10) == source.read_at(5, 0) == b""
        assert source.read_at(100, len(DATA)) == DATA[100:]

    def test_a_stream_is_a_file(self, server: Any) -> None:
        with QUICK.open(server.put("a.bin", DATA)).stream(begin=7) as file:
            assert file.read(3) == DATA[7:10]
            assert file.tell() == 10
            file.seek(3 << 20)
            assert file.read(5) == DATA[3 << 20 : (3 << 20) + 5]
            file.seek(8)
            buffer = bytearray(2 << 20)
            assert file.readinto(buffer) == len(buffer)
            assert buffer == DATA[8 : 8 + len(buffer)]
            assert file.read() == DATA[8 + len(buffer) :]
            assert file.read(10) == b""
            file.seek(-4, os.SEEK_END)
            assert file.read() == DATA[-4:]

    def test_a_stream_reads_ahead_and_no_further(self, server: Any) -> None:
        url = server.put("a.bin", bytes(64 << 20))
        server.fault = lambda *_: "drip:0.002"  # so long that the next request comes meanwhile
        storage = Storage(block=1 << 20, parallel=4)
        with storage.open(url).stream() as file:
            file.read(1)
            time.sleep(0.2)
            assert len(server.data_requests()) <= 2  # a look at the header fetches two blocks
            file.read(20 << 20)
            time.sleep(0.2)
            assert len(server.data_requests()) <= 21 + 4
        assert 1 < server.most_under_way <= 4

    def test_whole_small_objects_cost_one_request(self, server: Any) -> None:
        url = server.put("a.jpg", DATA)
        assert read_object(url) == DATA
        assert server.requests == [("/a.jpg", None)]

    def test_empty_objects(self, server: Any) -> None:
        url = server.put("empty", b"")
        source = open_source(url)
        assert (source.size, source.read_at(0, 5), source.stream().read(), read_object(url)) == (0, b"", b"", b"")
        with open(local_path(url), "rb") as file:
            assert file.read() == b""

    def test_stored_encodings_are_left_alone(self, server: Any) -> None:
        """Web servers say ``Content-Encoding: gzip`` of files that end in .gz; their bytes are the object."""
        url = server.put("a.tar.gz", DATA, encoding="gzip")
        assert read_object(url) == open_source(url).read_at(0, len(DATA)) == DATA

    def test_a_server_without_ranges(self, server: Any, tmp_path: Any) -> None:
        url = server.put("a.bin", DATA, ranges=False)
        server.faults("cut:2000000", "cut:3000000")  # begins at the beginning each time
        source = Storage(cache=tmp_path / "cache").open(url)
        assert source.stream().read() == DATA
        assert source.read_at(4 << 20, 9) == DATA[4 << 20 : (4 << 20) + 9]
        assert len(server.requests) == 1 + 3

    def test_objects_without_ranges_are_copied_at_the_same_time(self, server: Any) -> None:
        sources = [open_source(server.put(name, DATA[:300_000], ranges=False)) for name in ("a.bin", "b.bin")]
        server.fault = lambda *request: "drip:0.2"
        server.most_under_way = 0
        threads = [threading.Thread(target=source.read_at, args=(0, 9)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.most_under_way == 2
        assert [source.read_at(5, 9) for source in sources] == [DATA[5:14]] * 2

    def test_sources_are_pickled(self, server: Any) -> None:
        source = pickle.loads(pickle.dumps(QUICK.open(server.put("a.bin", DATA))))
        assert source.read_at(1, 4) == DATA[1:5]
        assert source.storage == QUICK


class TestFaults:
    @full_only("waits between attempts", but=["hang", "503 429 408", "lie:10 lie:1"])
    @pytest.mark.parametrize(
        "faults",
        [
            ["500"],
            ["503", "429", "408"],
            ["cut:0"],
            ["cut:100000", "cut:1", "cut:400000", "500"],
            ["lie:10", "lie:1"],
            ["hang"],
            ["silent"],
            ["cut:70000"] * 12,  # progress between failures
        ],
        ids=" ".join,
    )
    def test_every_byte_arrives_all_the_same(self, server: Any, faults: list[str]) -> None:
        source = QUICK.open(server.put("a.bin", DATA))
        server.faults(*faults)
        assert source.read_at(1000, 1 << 20) == DATA[1000 : 1000 + (1 << 20)]

    def test_resumes_at_the_byte(self, server: Any) -> None:
        source = QUICK.open(server.put("a.bin", DATA))
        server.faults("cut:100000")
        assert source.read_at(0, 1 << 20) == DATA[: 1 << 20]
        first, second = (request[1] for request in server.data_requests())
        assert first == "bytes=0-1048575"
        begin = int(second.removeprefix("bytes=").partition("-")[0])
        assert 0 < begin <= 100000

    def test_whole_objects_resume_too(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        server.faults("cut:1000000", "500", "cut:2000000")
        assert QUICK.read(url) == DATA
        assert server.requests[1][1] is not None

    @full_only("waits between attempts", but=["500"])
    @pytest.mark.parametrize("fault", ["500", "cut:0", "lie:999999"])
    def test_what_never_works_is_an_error(self, server: Any, fault: str) -> None:
        source = QUICK.open(server.put("a.bin", DATA))
        server.fault = lambda *_: fault
        with pytest.raises(
            StorageUnavailableError, match=r"read bytes 0 to 1,000,000 of http.*/a\.bin.*\(attempt 4"
        ) as e:
            source.read_at(0, 1_000_000)
        assert isinstance(e.value, OSError)
        assert isinstance(e.value, ConnectionError)

    @full_only("waits for real time-outs", but=["silent"])
    @pytest.mark.parametrize("fault", ["hang", "silent"])
    def test_silence_is_an_error(self, server: Any, fault: str) -> None:
        source = Storage(idle=0.3, attempts=2).open(server.put("a.bin", DATA))
        server.fault = lambda *_: fault
        with pytest.raises(StorageUnavailableError, match="no byte came in time"):
            source.stream().read(1)

    def test_a_drip_is_an_error(self, server: Any) -> None:
        source = Storage(idle=5, deadline=1.0).open(server.put("a.bin", DATA))
        server.fault = lambda *_: "drip:0.3"
        with pytest.raises(StorageUnavailableError, match="not done in 1 s"):
            source.read_at(0, 1 << 20)

    def test_nobody_listens(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        server.shutdown()
        server.server_close()
        with pytest.raises(StorageUnavailableError, match="cannot open http"):
            Storage(attempts=2).open(url)

    def test_an_object_that_changes(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        source = QUICK.open(url)
        assert source.read_at(0, 5) == DATA[:5]
        server.put("a.bin", bytes(len(DATA)))
        with pytest.raises(StorageChangedError, match="changed while it was read: its etag was"):
            source.read_at(0, 5)
        server.put("a.bin", b"short")
        with pytest.raises(StorageChangedError, match=r"shorter|had 5,255,225 bytes and has 5"):
            source.read_at(1 << 20, 5)

    def test_an_object_that_changes_in_the_middle_of_a_stream(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        with QUICK.open(url).stream() as file:
            file.read(10)
            server.put("a.bin", bytes(len(DATA)))
            with pytest.raises(StorageChangedError):
                file.read()

    def test_an_object_that_changes_between_cut_and_resume(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        source = QUICK.open(url)

        def fault(path: str, begin: int, end: int, number: int) -> str | None:
            if begin:
                return None
            server.put("a.bin", bytes(len(DATA)))  # this answer is still of the old one
            return "cut:300000"

        server.fault = fault
        with pytest.raises(StorageChangedError):
            source.read_at(0, 1 << 20)

    def test_without_etag_the_time_tells(self, server: Any) -> None:
        url = server.put("a.bin", DATA, etag="", modified="Mon, 01 Jan 2024 00:00:00 GMT")
        source = QUICK.open(url)
        server.put("a.bin", bytes(len(DATA)), etag="", modified="Tue, 02 Jan 2024 00:00:00 GMT")
        with pytest.raises(StorageChangedError, match="it was modified at Tue"):
            source.read_at(0, 5)

    @pytest.mark.parametrize(
        ("status", "kind"), [(404, StorageNotFoundError), (403, StorageAuthError), (400, StorageError)]
    )
    def test_what_stays_wrong_is_not_tried_again(self, server: Any, status: int, kind: type[PenstockError]) -> None:
        source = QUICK.open(server.put("a.bin", DATA))
        server.fault = lambda *_: str(status)
        with pytest.raises(kind, match=rf"a\.bin.*{status}"):
            source.read_at(0, 5)
        assert len(server.data_requests()) == 1

    def test_missing(self, server: Any) -> None:
        server.put("a.bin", DATA)
        with pytest.raises(FileNotFoundError, match="does not exist"):
            open_source(f"http://127.0.0.1:{server.server_address[1]}/nothing")

    def test_signatures_are_not_printed(self, server: Any) -> None:
        with pytest.raises(StorageNotFoundError) as caught:
            open_source(f"http://me:secret@127.0.0.1:{server.server_address[1]}/nothing?signature=hush")
        assert "hush" not in str(caught.value)
        assert "secret" not in str(caught.value)

    def test_an_unknown_length_is_an_error(self, server: Any) -> None:
        url = server.put("a.bin", DATA, length=False, ranges=False)
        with pytest.raises(StorageError, match="does not say how large"):
            open_source(url)

    def test_the_rank_is_named(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "8")
        source = QUICK.open(server.put("a.bin", DATA))
        server.fault = lambda *_: "500"
        with pytest.raises(StorageUnavailableError, match=r"\(rank 3 of 8\)"):
            source.read_at(0, 5)

    def test_leaving_a_stream_leaves_no_thread(self, server: Any) -> None:
        def waiting() -> int:
            return sum(thread.name == "penstock-storage" for thread in threading.enumerate())

        server.fault = lambda *_: "hang"
        before = waiting()
        stream = Storage(idle=20).open(server.put("a.bin", DATA)).stream()

        def read() -> None:
            with pytest.raises(StorageError):
                stream.read(1)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.2)
        stream.close()
        reader.join(5)
        assert not reader.is_alive()
        deadline = time.monotonic() + 5
        while waiting() > before + 2:  # the requests hang on the server
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def test_threads_that_ask_are_used_again(self, server: Any) -> None:
        source = QUICK.open(server.put("a.bin", DATA))

        def asking() -> int:
            return sum(thread.name == "penstock-storage" for thread in threading.enumerate())

        before = asking()
        for begin in range(20):
            assert source.read_at(begin, 5) == DATA[begin : begin + 5]
        assert asking() <= before  # those of earlier tests may have ended

    @full_only("starts a process")
    def test_a_server_that_hangs_does_not_keep_a_process(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        server.fault = lambda *_: "hang"
        program = (
            "import sys, threading; from penstock.storage import Storage; "
            "file = Storage(idle=60).open(sys.argv[1]).stream(); "
            "threading.Thread(target=file.read, args=(1,), daemon=True).start(); "
            "sys.stdin.readline()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, url], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while server.under_way == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.communicate(b"\n", timeout=8) == (None, None)
        assert process.returncode == 0


def test_forks_read_on(server: Any) -> None:
    """A stream that was begun before a fork goes on in both processes."""
    source = QUICK.open(server.put("a.bin", DATA))
    stream = source.stream()
    first = stream.read(10)
    child = os.fork()
    if child == 0:
        good = first + stream.read() == DATA and source.read_at(3, 4) == DATA[3:7]
        os._exit(0 if good else 1)
    assert first + stream.read() == DATA
    deadline = time.monotonic() + 20
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done
    assert os.waitstatus_to_exitcode(status) == 0


class TestImages:
    @pytest.fixture
    def dataset(self, server: Any, tmp_path: Path) -> ImageDataset:
        for number in range(8):
            ok, encoded = cv2.imencode(".png", np.full((4, 4, 3), number, np.uint8))
            assert ok
            url = server.put(f"images/{number}.png", encoded.tobytes())
        (tmp_path / "meta.txt").write_text("".join(f"{number}.png {number}\n" for number in range(8)))
        return ImageDataset(Manifest.open(tmp_path / "meta.txt", root=url.rpartition("/")[0], storage=QUICK))

    def test_those_of_a_batch_come_together(self, server: Any, dataset: ImageDataset) -> None:
        server.fault = lambda *_: "drip:0.2"
        items = dataset.__getitems__([5, 0, 3, 7, 1, 2])
        assert [(int(image[0, 0, 0]), label) for image, label in items] == [(i, i) for i in (5, 0, 3, 7, 1, 2)]
        assert server.most_under_way > 1
        assert len(server.requests) == 6

    def test_a_bad_one_is_named(self, server: Any, dataset: ImageDataset) -> None:
        server.objects.pop("/images/3.png")
        with pytest.raises(ImageError, match=r"/images/3\.png does not exist"):
            dataset.__getitems__([0, 3, 1])
        loader = DataLoader(dataset, batch_size=4, on_error="skip")
        assert [labels.tolist() for _, labels in loader] == [[0, 1, 2], [4, 5, 6, 7]]

    def test_signatures_of_bad_ones_are_not_printed(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "list.txt").write_text(server.put("a.jpg", b"\xff\xd8 no image") + "?signature=hush 0\n")
        for load in (LoadImage(), LoadImage(transform=[HorizontalFlip()]), LoadArray()):
            dataset = RankDataset(Manifest.open(tmp_path / "list.txt"), load=load, rank=0, world_size=1)
            with pytest.raises(PenstockError, match=r"/a\.jpg\?\.\.\.") as caught:
                dataset.__getitems__([0])
            assert "hush" not in "".join(traceback.format_exception(caught.value))

    def test_sizes_are_measured_as_the_manifest_says(self, server: Any, dataset: ImageDataset, tmp_path: Path) -> None:
        me = Storage({"headers": {dataset.source.root: {"Authorization": "Bearer me"}}})
        manifest = Manifest.open(tmp_path / "meta.txt", root=dataset.source.root, storage=me)
        assert measure(manifest)[0].tolist() == [4] * 8
        assert {given for _, given in server.authorizations} == {"Bearer me"}


class TestAddresses:
    def test_redirections_keep_credentials_at_home(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        server.redirect["/here"] = url
        server.redirect["/round"] = url.replace("a.bin", "round")
        assert read_object(url.replace("a.bin", "here")) == DATA
        assert open_source(url.replace("a.bin", "here")).read_at(5, 9) == DATA[5:14]
        with pytest.raises(StorageError, match="more than 10 redirections"):
            read_object(url.replace("a.bin", "round"))
        me = Storage({"headers": {url: {"Authorization": "Bearer me"}}})
        server.redirect["/away"] = url.replace("127.0.0.1", "localhost")
        assert me.read(url.replace("a.bin", "away")) == DATA
        assert [given for path, given in server.authorizations[-2:]] == ["Bearer me", None]

    @pytest.mark.parametrize("form", ["txt", "parquet"])
    def test_headers_go_to_the_named_host_alone(self, server: Any, tmp_path: Path, form: str) -> None:
        """A row, an index or a folder may name any other host; `root=` is the base of relative paths only."""
        home = server.put("a.npy", DATA).removesuffix("/a.npy")
        away = home.replace("127.0.0.1", "localhost")
        me = Storage({"headers": {home.upper().replace("HTTP", "http") + "/": {"Authorization": "Bearer me"}}})
        paths = ["a.npy", f"{away}/a.npy", f"{away.replace('//', '//127.0.0.1@')}/a.npy"]
        if form == "txt":
            (tmp_path / "list.txt").write_text("".join(f"{path} 0\n" for path in paths))
        else:
            pq.write_table(pa.table({"path": paths, "label": [0, 0, 0]}), tmp_path / "list.parquet")
        manifest = Manifest.open(tmp_path / f"list.{form}", root=home, storage=me)
        wanted = [f"{home}/a.npy", *paths[1:]]
        assert [record.path for record in manifest] == [manifest[k].path for k in range(3)] == wanted
        assert manifest.take(np.arange(3))["path"].to_pylist() == wanted
        dataset = RankDataset(manifest, shuffle="none", load=LoadBytes(storage=me), rank=0, world_size=1)
        assert [data for data, _ in dataset.__getitems__([0, 1, 2])] == [DATA] * 3
        given = [token for _, token in server.authorizations]
        assert sorted(token or "" for token in given) == ["", "Basic MTI3LjAuMC4xOg==", "Bearer me"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"headers": {"Authorization": "hush"}}, "'Authorization' is not a host with its headers"),
            ({"headers": {"https://a": {"X-Token": "hush"}}}, "'X-Token' would be sent to any host that https://a"),
            ({"client_options": {"default_headers": {"a": "hush"}}}, "default_headers would go to any host"),
        ],
    )
    def test_headers_without_a_host_are_refused(self, server: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            Storage(options).read(server.put("a.bin", DATA))
        assert "hush" not in str(caught.value)
        assert server.requests == []

    def test_users_and_odd_names(self, server: Any) -> None:
        url = server.put("a%20b%C3%A9.bin", DATA)
        address = url.replace("//", "//me:p%40ss@").replace("a%20b%C3%A9", "a bé")
        assert read_object(address) == DATA
        assert server.authorizations[-1][1] == "Basic bWU6cEBzcw=="

    def test_a_proxy(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which is asked for the whole address; the host itself does not exist."""
        proxy = server.put("a.bin", DATA).removesuffix("a.bin")
        server.objects["http://far.example:81/a.bin"] = server.objects["/a.bin"]
        monkeypatch.setenv("http_proxy", proxy)
        assert read_object("http://far.example:81/a.bin?x=1") == DATA

    def test_connections_are_used_again(self, server: Any) -> None:
        url = server.put("a.bin", DATA)
        source = Storage(idle=27).open(url)
        for begin in range(20):
            assert source.read_at(begin, 5) == DATA[begin : begin + 5]
        # Those that are done go back by a thread of their own, so that another may be made meanwhile.
        assert len(server.connections) <= 3

    def test_what_makes_no_sense(self, server: Any) -> None:
        with pytest.raises(ConfigError, match="unknown options for HTTP: 'anon'"):
            Storage({"anon": True}).open(server.put("a.bin", DATA))
        with pytest.raises(StorageError, match="not a URL of a web server"):
            open_source("http:///a.bin")
