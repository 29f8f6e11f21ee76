"""Named stages: exclusive times, one account for each thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

import penstock as ps
from penstock.images import native
from penstock.images.transforms import RandomResizedCrop
from penstock.stages import by_clock, collect, spent, stage

pytestmark = pytest.mark.clock


@pytest.fixture(autouse=True)
def _nothing_before() -> None:
    collect()


def test_collect_gives_seconds_by_name_and_begins_anew() -> None:
    for _ in range(2):
        with stage("read"):
            time.sleep(0.02)
    with stage("decode"):
        time.sleep(0.01)
    seconds = collect()
    assert seconds.keys() == {"read", "decode"}
    assert 0.04 <= seconds["read"] < 0.2
    assert 0.01 <= seconds["decode"] < 0.1
    assert collect() == {}


def test_nested_stages_count_for_themselves_alone() -> None:
    start = time.perf_counter()
    with stage("outer"):
        time.sleep(0.01)
        with stage("inner"):
            time.sleep(0.03)
            with stage("innermost"):
                time.sleep(0.02)
        with stage("inner"):
            time.sleep(0.01)
    elapsed = time.perf_counter() - start
    seconds = collect()
    assert 0.01 <= seconds["outer"] < 0.03
    assert 0.04 <= seconds["inner"] < 0.06
    assert 0.02 <= seconds["innermost"] < 0.04
    assert sum(seconds.values()) == pytest.approx(elapsed, abs=0.002)


def test_a_stage_within_one_of_the_same_name_is_not_counted_twice() -> None:
    with stage("read"), stage("read"):
        time.sleep(0.02)
    assert 0.02 <= collect()["read"] < 0.035


def test_a_stage_that_raises_counts_and_leaves_the_account_in_order() -> None:
    with pytest.raises(KeyError), stage("outer"), stage("bad"):
        time.sleep(0.02)
        raise KeyError
    with stage("next"):
        time.sleep(0.01)
    seconds = collect()
    assert seconds["bad"] >= 0.02
    assert seconds["outer"] < 0.01
    assert seconds["next"] >= 0.01


def test_collect_within_a_stage_takes_what_has_ended() -> None:
    with stage("outer"):
        with stage("inner"):
            time.sleep(0.02)
        assert collect().keys() == {"inner"}
    assert collect()["outer"] < 0.01


def test_threads_have_accounts_of_their_own() -> None:
    found = {}

    def work(name: str, seconds: float) -> None:
        with stage(name):
            time.sleep(seconds)
        found[name] = collect()

    threads = [threading.Thread(target=work, args=(f"thread {k}", 0.01 * k)) for k in range(4)]
    for thread in threads:
        thread.start()
    with stage("main"):
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert all(seconds.keys() == {name} for name, seconds in found.items())
    assert len(found) == 4
    assert collect().keys() == {"main"}


def test_the_cost_of_a_stage_does_not_matter_for_a_sample() -> None:
    best = float("inf")
    for _ in range(20):  # under a microsecond on a quiet machine
        start = time.perf_counter()
        for _ in range(1000):
            with stage("nothing"):
                pass
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 5e-6


def test_a_part_of_a_stage_counts_for_another_one() -> None:
    with stage("outer"), stage("decode"):
        time.sleep(0.03)
        spent("resize", 0.02)
    seconds = collect()
    assert seconds.keys() == {"outer", "decode", "resize"}
    assert seconds["resize"] == 0.02
    assert 0.01 <= seconds["decode"] < 0.1
    assert seconds["outer"] < 0.01


@pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
def test_a_crop_in_one_call_counts_as_decoding_and_resizing(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "image.jpg"), np.zeros((64, 64, 3), np.uint8))
    (tmp_path / "meta.txt").write_text("image.jpg 3\n")
    manifest = ps.Manifest.open(tmp_path / "meta.txt", root=tmp_path)
    ps.ImageDataset(manifest, transform=[RandomResizedCrop(16)])[0]
    seconds = collect()
    assert {"decode", "resize"} <= seconds.keys()
    assert min(seconds["decode"], seconds["resize"]) > 0


def test_images_name_their_stages(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "image.png"), np.zeros((64, 64, 3), np.uint8))
    (tmp_path / "meta.txt").write_text("image.png 3\n")
    manifest = ps.Manifest.open(tmp_path / "meta.txt", root=tmp_path)
    ps.ImageDataset(manifest)[0]
    assert {"decode"} <= collect().keys() <= {"read", "decode", "resize", "augment"}
    ps.ImageDataset(manifest, size=16, flip=True)[0]
    assert {"decode", "resize", "augment"} <= collect().keys()


def test_by_the_clock_of_the_processor_waiting_costs_nothing() -> None:
    with by_clock(time.thread_time), stage("outer"):
        time.sleep(0.05)
        with stage("computes"):
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
    seconds = collect()
    assert seconds["outer"] < 0.025
    assert 0.02 <= seconds["computes"] < 0.04
    with stage("after"):
        time.sleep(0.01)
    assert collect()["after"] >= 0.01


def test_a_clock_belongs_to_one_thread_and_is_put_back_after_an_error() -> None:
    def sleep() -> None:
        with stage("read"):
            time.sleep(0.02)
        found.update(collect())

    found: dict[str, float] = {}
    with pytest.raises(KeyError), by_clock(time.thread_time):
        thread = threading.Thread(target=sleep)
        thread.start()
        thread.join()
        raise KeyError
    assert found["read"] >= 0.02
    with stage("read"):
        time.sleep(0.01)
    assert collect()["read"] >= 0.01
