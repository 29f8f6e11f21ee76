"""`AudioDataset`: clips in any order, by any executor, from anywhere, at any rate."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from loader_conformance import check_elastic, check_end_of_pass, check_load_into_used, check_resume
from loader_support import EXECUTORS, plain
from sound_cases import EXACT
from sound_support import all_samples, wave, write_sound
from store_server import Store
from video_support import write_video

import penstock as ps
from penstock.errors import ClipError, ConfigError, DataFileError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FILES: dict[str, dict[str, Any]] = {
    "ant/a.flac": {"codec": "flac", "seconds": 3.0},
    "ant/b.mp3": {"codec": "libmp3lame", "seconds": 2.5},
    "bee/c.wav": {"codec": "pcm_s16le", "seconds": 0.6, "rate": 22_050, "channels": 1},
    "cat/d.opus": {"codec": "libopus", "seconds": 4.0, "rate": 48_000},
    "cat/e.m4a": {"codec": "aac", "seconds": 1.5, "options": EXACT},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of different lengths, rates and channels, in folders of three classes."""
    root = tmp_path_factory.mktemp("sounds")
    for number, (name, how) in enumerate(FILES.items()):
        (root / name).parent.mkdir(exist_ok=True)
        write_sound(root / name, seed=number, **how)
    return root


def paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in FILES]


def test_clips_of_a_stride(folder: Path) -> None:
    exact = [str(folder / name) for name in ("ant/a.flac", "ant/b.mp3", "bee/c.wav", "cat/e.m4a")]
    dataset = ps.AudioDataset(exact, seconds=0.5, stride=0.25, shuffle="none")
    expected = []
    for path in exact:
        rate = 22_050 if path.endswith("wav") else 44_100
        samples, span, far = all_samples(path), round(rate * 0.5), round(rate * 0.25)
        expected += [
            (path, begin, rate, samples[:, begin : begin + span])
            for begin in range(0, max(1, samples.shape[1] - span + 1), far)
        ]
    assert len(dataset) == len(expected)
    assert dataset.lengths.tolist() == [clip.shape[1] for *_, clip in expected]
    for row, (path, begin, rate, clip) in enumerate(expected):
        audio, said = dataset[row]
        assert said == {"path": path, "seconds": begin / rate, "sample_rate": rate}
        assert audio.dtype is torch.float32
        assert np.array_equal(audio.numpy(), clip)


def test_whole_files(folder: Path) -> None:
    dataset = ps.AudioDataset(paths(folder), shuffle="none")
    for row, path in enumerate(paths(folder)):
        assert np.array_equal(dataset[row][0].numpy(), all_samples(path))
    assert dataset.lengths.tolist() == [all_samples(path).shape[1] for path in paths(folder)]


def test_samples_are_those_of_soundfile(folder: Path) -> None:
    expected, _ = soundfile.read(folder / "ant/a.flac", dtype="float32", always_2d=True)
    assert np.array_equal(ps.AudioDataset(folder / "ant/a.flac")[0][0].numpy(), expected.T)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000, 96_000])
def test_resampling_is_that_of_the_whole_file(folder: Path, rate: int) -> None:
    flac = folder / "ant/a.flac"
    whole = all_samples(flac).mean(axis=0, keepdims=True)
    whole = whole if rate == 44_100 else soxr.resample(whole.T, 44_100, rate, quality="HQ").T
    dataset = ps.AudioDataset([flac], seconds=0.3, sample_rate=rate, channels=1, stride=0.13, shuffle="none")
    assert len(dataset) > 15
    for row in range(len(dataset)):
        begin = row * round(0.13 * rate)
        audio = dataset[row][0].numpy()
        assert audio.shape == (1, round(0.3 * rate))
        assert np.abs(audio - whole[:, begin : begin + audio.shape[1]]).max() < 5e-6


def test_a_short_file_is_followed_by_silence(folder: Path) -> None:
    audio, _ = ps.AudioDataset(folder / "bee/c.wav", seconds=1.0)[0]
    count = all_samples(folder / "bee/c.wav").shape[1]
    assert audio.shape == (1, 22_050)
    assert np.array_equal(audio[:, :count].numpy(), all_samples(folder / "bee/c.wav"))
    assert not audio[:, count:].any()


def test_random_starts(folder: Path) -> None:
    flac = folder / "ant/a.flac"
    dataset, samples, starts = ps.AudioDataset([flac], seconds=0.5, seed=3), all_samples(flac), set()
    for epoch in range(8):
        dataset.set_epoch(epoch)
        audio, said = dataset[0]
        begin = round(said["seconds"] * 44_100)
        assert np.array_equal(audio.numpy(), samples[:, begin : begin + 22_050])
        starts.add(begin)
    assert len(starts) == 8
    assert ps.AudioDataset([flac], seconds=0.5, random_start=False)[0][1]["seconds"] == 0


def test_folders_are_classes(folder: Path) -> None:
    dataset = ps.AudioDataset(folder, seconds=0.2, sample_rate=16_000, channels=1, shuffle="none")
    assert dataset.classes == ["ant", "bee", "cat"]
    assert [dataset[row][1] for row in range(5)] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor_makes_the_same_batches(folder: Path, executor: str) -> None:
    def run(executor: str) -> list[Any]:
        dataset = ps.AudioDataset(folder, seconds=0.4, sample_rate=16_000, channels=1, seed=2)
        loader = ps.DataLoader(dataset, batch_size=2, executor=executor, num_workers=EXECUTORS[executor])
        return [plain(batch) for _ in range(2) for batch in loader]

    assert run(executor) == run("inline")


def test_clips_are_written_where_the_batch_is(folder: Path) -> None:
    dataset = ps.AudioDataset(folder, seconds=0.4, sample_rate=16_000, channels=1, shuffle="none")
    memory: list[torch.Tensor] = []

    def into(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory.append(torch.empty(shape, dtype=dtype))
        return memory[0]

    keys = dataset.keys(range(5))
    items = dataset.load_samples(range(5), keys, into=into)
    assert memory[0].shape == (5, 1, 6_400)
    assert [item[0].data_ptr() for item in items] == [row.data_ptr() for row in memory[0]]
    assert torch.equal(memory[0], torch.stack([dataset[row][0] for row in range(5)]))


N = 13


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Recordings whose label is their number, each longer than the one before."""
    root = tmp_path_factory.mktemp("numbered")
    return [
        str(write_sound(root / f"{number}.flac", 0.1 + number / 50, codec="flac", rate=8_000, channels=1, seed=number))
        for number in range(N)
    ]


def test_resume(numbered: list[str]) -> None:
    def loader(rank: int = 0, world: int = 1, **options: Any) -> Any:
        share = {"rank": rank, "world_size": world, "seed": 2, **options}
        return ps.DataLoader(ps.AudioDataset(numbered, seconds=0.05, labels=range(N), **share), batch_size=2)

    check_resume(lambda: loader(mini_epochs=2))
    check_resume(lambda: loader(rank=1, world=2))
    check_elastic(loader, lambda batch: batch[1].tolist(), N, [(2, 2), (3, 1), (1, 3)])
    check_end_of_pass(loader)
    check_load_into_used(loader)


def test_batches_of_a_budget(numbered: list[str]) -> None:
    """Whole files of any length, in batches of so many samples; also resumed."""
    dataset = ps.AudioDataset(numbered, labels=range(N), shuffle="none")

    def pad(items: list[Any]) -> Any:
        longest = max(audio.shape[1] for audio, _ in items)
        padded = [torch.nn.functional.pad(audio, (0, longest - audio.shape[1])) for audio, _ in items]
        return torch.stack(padded), [label for _, label in items]

    def loader() -> Any:
        batches = ps.TokenBudgetBatchSampler(dataset.lengths, 6_000, seed=1)
        return ps.DataLoader(dataset, batch_sampler=batches, collate_fn=pad)

    had = []
    for audio, labels in loader():
        assert audio.shape[0] * audio.shape[2] <= 6_000
        had += labels
    assert sorted(had) == list(range(N))
    check_resume(loader)


def test_stores(folder: Path, tmp_path: Path) -> None:
    """Of an object in a store no more than the packets that a clip needs, and a few before them."""
    (tmp_path / "bucket").mkdir()
    write_sound(tmp_path / "bucket/long.flac", 60, codec="flac")
    write_sound(tmp_path / "bucket/long.mp3", 60, codec="libmp3lame", bit_rate=128_000)
    with Store(tmp_path) as store:
        for name, most in (("long.flac", 100_000), ("long.mp3", 12_000)):
            dataset = ps.AudioDataset([f"{store.url}/bucket/{name}"], seconds=0.5, seed=3)
            local = ps.AudioDataset([tmp_path / "bucket" / name], seconds=0.5, seed=3)
            for epoch in range(5):
                dataset.set_epoch(epoch)
                local.set_epoch(epoch)
                store.reset()
                assert torch.equal(dataset[0][0], local[0][0])
                assert store.counts()["bytes"] < most


def test_pickles_are_handles(folder: Path) -> None:
    dataset = ps.AudioDataset(folder, seconds=0.2)
    data = pickle.dumps(dataset)
    assert len(data) < 6000
    assert torch.equal(pickle.loads(data)[1][0], dataset[1][0])


def loud(audio: torch.Tensor) -> torch.Tensor:
    return audio * 2


def test_a_transform(folder: Path) -> None:
    dataset = ps.AudioDataset(folder, seconds=0.2, transform=loud, random_start=False, shuffle="none")
    without = ps.AudioDataset(folder, seconds=0.2, random_start=False, shuffle="none")
    assert torch.equal(dataset[1][0], 2 * without[1][0])
    assert not dataset.pure


def test_wrong_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.mp3").write_text("no sound " * 100)
    write_video(tmp_path / "silent.mp4", 5)
    wrong = [str(tmp_path / name) for name in ("empty.wav", "text.mp3", "silent.mp4", "missing.flac")]
    dataset = ps.AudioDataset([*wrong, folder / "ant/a.flac"], seconds=0.1, shuffle="none", labels=range(5))
    for row, path in enumerate(wrong):
        with pytest.raises(ClipError, match=Path(path).name):
            dataset[row]
    loader = ps.DataLoader(dataset, batch_size=5, on_error="skip")
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert next(iter(loader))[1].tolist() == [4]
    two = ps.AudioDataset([folder / "bee/c.wav"], channels=2)
    with pytest.raises(ClipError, match="has 1 channels and not 2"):
        two[0]


def test_an_index_of_videos_is_none_of_sound(folder: Path, tmp_path: Path) -> None:
    film = write_video(tmp_path / "a.mp4", 5)
    ps.VideoDataset([film], index=tmp_path / "clips")
    with pytest.raises(DataFileError, match="is not an index of recordings"):
        ps.AudioDataset([film], index=tmp_path / "clips")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seconds": 0}, "seconds= takes a positive number"),
        ({"seconds": "2"}, "seconds= takes a positive number"),
        ({"seconds": float("nan")}, "seconds= takes a positive number"),
        ({"seconds": 1, "stride": -1}, "stride= takes a positive number"),
        ({"stride": 1}, "a clip is a whole file"),
        ({"random_start": True}, "a clip is a whole file"),
        ({"seconds": 1, "stride": 1, "random_start": True}, "fixed positions"),
        ({"sample_rate": 16_000.5}, "sample_rate= takes a positive integer"),
        ({"channels": 0}, "channels= takes a positive integer"),
        ({"labels": [1]}, "1 labels for 5 files"),
        ({"transform": 3}, "transform= takes a function"),
    ],
)
def test_arguments(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ps.AudioDataset(folder, **options)


def test_the_wave_of_the_tests_is_what_lossless_files_hold(folder: Path) -> None:
    expected = wave(round(3.0 * 44_100), 44_100)
    assert np.abs(all_samples(folder / "ant/a.flac") - expected).max() < 1e-4
