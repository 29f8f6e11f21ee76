"""`profile` over data sets whose stages take known times: it names the slowest one, and what the machine wants.

Times are held to a factor of two: the machine is not ours alone.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from busy_support import slowness
from full_run import full_only
from profiling_support import Broken, Cold, Drawing, Known, Pure, Stream, ThreadShy, slow_collate

import penstock as ps
from penstock.cores import cores
from penstock.errors import ConfigError
from penstock.tools.profiling import Profile, Setting, Stage, profile

pytestmark = pytest.mark.clock


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at no figure: trials may end after a few batches."""
    monkeypatch.setattr("penstock.tools.profiling.measure._SHORTEST", 0.05)


def stage_of(found: Profile, name: str) -> Stage:
    return next(stage for stage in found.stages if stage.name == name)


class TestStages:
    @full_only("measures for seconds")
    def test_reading_that_sleeps_limits_and_wants_more_workers_than_cores(self) -> None:
        loader = ps.DataLoader(Known(read=0.02, decode=0.0005), batch_size=4)
        found = profile(loader, seconds=6)
        read, decode = stage_of(found, "read"), stage_of(found, "decode")
        assert (found.verdict.limit, found.verdict.limit_cached) == ("read", "read")
        assert 0.02 <= read.again < 0.04
        assert 0.02 <= read.first < 0.04
        assert 25 < read.ceiling() <= 50
        assert read.waits > 0.8
        assert decode.again >= 0.0005
        assert read.together is not None
        assert read.together >= 0.02
        assert found.verdict.setting.workers > cores()
        many = max(trial.rate for trial in found.trials)
        alone = next(trial.rate for trial in found.trials if not trial.setting.workers)
        assert many > 2 * alone
        assert "more workers than cores" in " ".join(found.verdict.sentences)

    def test_decoding_that_computes_limits(self) -> None:
        before = slowness()
        found = profile(ps.DataLoader(Known(read=0.001, decode=0.006, augment=0.001), batch_size=4), seconds=1.5)
        decode = stage_of(found, "decode")
        assert found.verdict.limit == "decode"
        assert 0.006 <= decode.again < 0.03 * max(before, slowness())  # by the clock on the wall
        assert stage_of(found, "augment").again < decode.again / 2

    @full_only("measures for seconds; decoding that limits is always tested")
    def test_collating_limits(self) -> None:
        loader = torch.utils.data.DataLoader(Known(decode=0.0005), batch_size=4, collate_fn=slow_collate)
        found = profile(loader, seconds=1)
        assert found.verdict.limit == "collate"
        assert stage_of(found, "collate").again >= 0.002

    @full_only("measures for seconds")
    def test_samples_that_are_slow_the_first_time(self) -> None:
        loader = ps.DataLoader(Cold(read=0.02, decode=0.001, size=2000), batch_size=4, shuffle=True, seed=0)
        found = profile(loader, seconds=3)
        read = stage_of(found, "read")
        assert read.first >= 0.02
        assert read.again < read.first / 10
        assert (found.verdict.limit, found.verdict.limit_cached) == ("read", "decode")
        new = [trial for trial in found.trials if not trial.cached]
        assert new
        assert found.verdict.rate in [trial.rate for trial in new]
        assert not found.rehearsal.cached
        assert "The first read" in found.verdict.sentences[0]

    @full_only("measures for seconds")
    def test_inline_is_not_chosen_for_what_storage_makes_slow(self) -> None:
        """Read before, the batches cost a fiftieth of the step; not read before, most of it."""
        loader = ps.DataLoader(Cold(read=0.02, size=2000), batch_size=4, shuffle=True, seed=0)
        found = profile(loader, seconds=2.5, step=0.1)
        assert found.verdict.keeps_up
        assert found.verdict.setting.workers > 0
        assert found.rehearsal.waiting < 0.05

    @full_only("measures for seconds")
    def test_a_stream_and_single_samples(self) -> None:
        before = slowness()
        found = profile(ps.DataLoader(Stream(), batch_size=8), seconds=1)
        assert found.verdict.limit == "decode"
        assert all(trial.rate > 0 for trial in found.trials), found.trials
        assert 0.001 <= stage_of(found, "decode").again < 0.01 * max(before, slowness())
        found = profile(torch.utils.data.DataLoader(Known(decode=0.01), batch_size=None), seconds=0.5)
        assert (found.batch_size, found.verdict.limit) == (1, "decode")

    @full_only("measures for seconds")
    def test_batches_that_take_too_long_are_divided(self) -> None:
        found = profile(ps.DataLoader(Known(read=0.02, size=256), batch_size=256), seconds=3)
        assert found.batch_size == 256
        assert found.measured < 64
        assert found.samples >= found.measured
        assert f"Batches of {found.measured}" in " ".join(found.verdict.sentences)
        assert found.seconds < 30

    @full_only("measures for seconds")
    def test_of_a_part_of_a_batch_a_step_takes_its_part(self) -> None:
        found = profile(ps.DataLoader(Known(read=0.02, size=256), batch_size=256), seconds=3, step=2.0)
        assert found.share == found.measured / 256 < 0.25
        assert found.rehearsal.step == pytest.approx(2.0 * found.share)
        told = " ".join(found.verdict.sentences)
        assert "A step of 2.00 s needs 128 samples/s" in told
        assert f"a step, over {len(found.rehearsal.moments)} parts of batches" in told
        waited = found.rehearsal.waiting / found.share
        assert f"waited {waited * 1000:,.3g} ms a step" in told or f"waited {waited:,.2f} s a step" in told


class TestStep:
    @full_only("measures for seconds; a fast step is always tested")
    def test_a_slow_step_is_kept_up_with(self) -> None:
        found = profile(ps.DataLoader(Known(read=0.005), batch_size=4, num_workers=1), seconds=4, step=0.3)
        verdict = found.verdict
        assert (verdict.limit, verdict.keeps_up, verdict.waiting) == ("training", True, 0.0)
        assert verdict.needed == pytest.approx(4 / 0.3)
        assert verdict.setting.workers == 1  # more would only cost
        assert found.rehearsal.waiting < 0.15
        moments = found.rehearsal.moments
        assert len(moments) >= 3
        assert moments[-1].had - moments[0].had >= 0.3 * (len(moments) - 1)

    def test_a_fast_step_is_not(self) -> None:
        found = profile(ps.DataLoader(Known(read=0.04), batch_size=4), seconds=4, step=0.001)
        verdict = found.verdict
        assert (verdict.limit, verdict.keeps_up) == ("read", False)
        assert verdict.waiting is not None
        assert verdict.waiting == pytest.approx(4 / verdict.rate - 0.001)
        assert verdict.waiting / 3 < found.rehearsal.waiting < verdict.waiting * 3
        assert "does not keep up" in " ".join(verdict.sentences)


@pytest.mark.usefixtures("brief")
class TestExecutors:
    def test_threads_are_tried_where_the_data_set_says_that_it_is_pure(self) -> None:
        def tried(dataset: Known, **options: Any) -> set[str]:
            found = profile(ps.DataLoader(dataset, batch_size=4, **options), seconds=0.1)
            assert not any(trial.error for trial in found.trials)
            return {trial.setting.executor for trial in found.trials}

        assert tried(Known(decode=0.001)) == {"inline", "process"}
        assert tried(Pure(decode=0.001)) == {"inline", "process", "thread"}
        assert tried(Known(decode=0.001), num_workers=2, executor="thread") == {"inline", "process", "thread"}

    def test_a_setting_that_fails_is_a_result(self) -> None:
        found = profile(ps.DataLoader(ThreadShy(decode=0.001), batch_size=4), seconds=0.1, executors=["thread"])
        errors = {trial.setting.executor: trial.error for trial in found.trials}
        assert errors == {"inline": "", "thread": "RuntimeError: this handle belongs to another thread"}
        assert found.verdict.setting == Setting("inline", 0)
        assert any("no result" in sentence for sentence in found.verdict.sentences)

    def test_the_setting_of_the_loader_is_among_those_that_are_tried(self) -> None:
        found = profile(ps.DataLoader(Known(decode=0.001), batch_size=4, num_workers=3), seconds=0.1)
        assert found.given == Setting("process", 3)
        assert found.given in [trial.setting for trial in found.trials]

    def test_errors(self) -> None:
        with pytest.raises(KeyError, match="sample nine"):
            profile(ps.DataLoader(Broken(), batch_size=4), seconds=1)
        with pytest.raises(ConfigError, match="no batches"):
            profile(ps.DataLoader(Known(size=0), batch_size=4), seconds=1)
        with pytest.raises(ConfigError, match="yields nothing"):
            profile(ps.DataLoader(Stream(0), batch_size=4), seconds=1)
        with pytest.raises(ConfigError, match="unknown executor 'ray'"):
            profile(ps.DataLoader(Known(), batch_size=4), executors=["ray"])
        with pytest.raises(ConfigError, match="must be positive"):
            profile(ps.DataLoader(Known(), batch_size=4), seconds=0)


@pytest.mark.usefixtures("brief")
class TestTheLoaderStays:
    @full_only("measures for seconds", but=["ours", "torch"])
    @pytest.mark.parametrize("kind", ["torch", "generator", "ours", "own generator", "seeded"])
    def test_as_it_is(self, kind: str) -> None:
        def make() -> torch.utils.data.DataLoader[Any]:
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            if kind == "torch":
                return torch.utils.data.DataLoader(Drawing(), batch_size=4, shuffle=True)
            if kind == "generator":
                order = torch.Generator().manual_seed(1)
                return torch.utils.data.DataLoader(Drawing(), batch_size=4, shuffle=True, generator=order)
            options: dict[str, Any] = {"seed": 1} if kind == "seeded" else {}
            if kind == "own generator":
                options = {"generator": torch.Generator().manual_seed(1)}
            return ps.DataLoader(Drawing(), batch_size=4, shuffle=True, **options)

        def batches(loader: torch.utils.data.DataLoader[Any]) -> list[Any]:
            return [[part.tolist() for part in batch] for batch in loader]

        expected = batches(make())
        loader = make()
        state = loader.state_dict() if isinstance(loader, ps.DataLoader) and kind == "seeded" else None
        profile(loader, seconds=0.1)
        assert random.random() == random.Random(5).random()
        assert np.random.rand() == np.random.RandomState(5).rand()
        if state is not None:
            assert isinstance(loader, ps.DataLoader)
            assert loader.state_dict() == state
            assert loader.stats()["batches"] == 0
        assert batches(loader) == expected

    def test_where_it_is_in_an_epoch(self) -> None:
        def make() -> ps.DataLoader[Any]:
            return ps.DataLoader(Known(size=64), batch_size=4, shuffle="global", seed=3)

        first = make()
        steps = iter(first)
        next(steps)
        state = first.state_dict()
        rest = [batch[1].tolist() for batch in steps]
        loader = make()
        loader.load_state_dict(state)
        profile(loader, seconds=0.1)
        assert loader.state_dict() == state
        assert [batch[1].tolist() for batch in loader] == rest


@pytest.mark.usefixtures("brief")
def test_files_of_a_manifest_are_dropped_from_the_page_cache(tmp_path: Path) -> None:
    names = [f"{number}.jpg" for number in range(12)]
    for name in names:
        cv2.imwrite(str(tmp_path / name), np.zeros((40, 40, 3), np.uint8))
    (tmp_path / "train.txt").write_text("".join(f"{name} 0\n" for name in names))
    manifest = ps.Manifest.open(tmp_path / "train.txt", root=tmp_path)
    for source in (manifest, ps.RankDataset(manifest, seed=0)):
        found = profile(ps.DataLoader(ps.ImageDataset(source, size=32), batch_size=6), seconds=0.1)
        assert found.dropped >= 24  # before the first time, and before the rehearsal
        assert {"read", "decode", "collate"} <= {stage.name for stage in found.stages}
        assert {trial.setting.executor for trial in found.trials} == {"inline", "process", "thread"}
    assert profile(ps.DataLoader(Known(), batch_size=4), seconds=0.1, executors=[]).dropped == 0


def test_time_and_progress() -> None:
    told: list[tuple[int, int]] = []
    start = time.perf_counter()
    found = profile(ps.DataLoader(Known(decode=0.001), batch_size=4), seconds=1, progress=lambda *now: told.append(now))
    passed = time.perf_counter() - start
    assert found.seconds <= passed < 12
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] <= told[-1][1] == 1000
    assert found.name == "Known"
