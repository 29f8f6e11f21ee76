"""The HTML report: one file that asks for nothing else, plots inside their frames, and what Chromium makes of it."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from browser_support import BROWSER, DARK, browse
from full_run import full_only
from interpreter_support import FULL
from report_support import made_up

from penstock.tools.profiling import Profile, report
from penstock.tools.profiling.plots import ceilings, settings, timeline, waiting

SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


def without_much(found: Profile) -> Profile:
    """One core, no step, one batch, nothing but inline."""
    rehearsal = replace(found.rehearsal, step=0.0, moments=found.rehearsal.moments[:1], settled=0)
    verdict = replace(found.verdict, needed=None, keeps_up=None, waiting=None)
    return replace(found, cores=1, trials=found.trials[:1], rehearsal=rehearsal, verdict=verdict)


@pytest.mark.parametrize("found", [made_up(), made_up(batches=1000), without_much(made_up())], ids=["", "long", "bare"])
def test_plots_are_well_formed_and_stay_in_their_frames(found: Profile) -> None:
    page = report(found)
    svgs = SVG.findall(page)
    assert len(svgs) == 4
    for text in svgs:
        root = ElementTree.fromstring(text)
        left, top, width, height = map(float, root.attrib["viewBox"].split())
        assert root.attrib["aria-label"]
        for part in root:
            numbers = {name: float(value) for name, value in part.attrib.items() if re.fullmatch(r"[-\d.]+", value)}
            for name in ("x", "x1", "x2", "cx"):
                assert left <= numbers.get(name, 0.0) <= width
            for name in ("y", "y1", "y2", "cy"):
                assert top <= numbers.get(name, 0.0) <= height
            assert numbers.get("x", 0.0) + numbers.get("width", 0.0) <= width + 0.5
            assert numbers.get("y", 0.0) + numbers.get("height", 0.0) <= height + 0.5
            for point in part.attrib.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_nothing_is_fetched_and_names_are_escaped() -> None:
    page = report(made_up(name="<script>alert(1)</script>&co"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
    assert "not in threads &lt;b&gt;" in page


def test_bars_are_as_long_as_their_logarithms() -> None:
    found = made_up()
    boxes = [part for part in ElementTree.fromstring(ceilings(found)) if part.attrib.get("class") == "one"]
    assert len(boxes) == 4  # "nothing" has no ceiling; "all stages" has
    widths = [float(box.attrib["width"]) for box in boxes]
    rates = [stage.ceiling() for stage in found.stages if stage.name != "nothing"] + [found.rate_alone()]
    scale = (widths[0] - widths[1]) / np.log10(rates[0] / rates[1])
    assert widths[2] - widths[1] == pytest.approx(scale * np.log10(rates[2] / rates[1]), abs=1)


def test_the_timeline_shows_each_batch_once_and_waiting_shows_the_longest() -> None:
    rehearsal = made_up(batches=30).rehearsal
    parts = list(ElementTree.fromstring(timeline(rehearsal)))
    for kind in ("wait", "train", "ready"):
        assert sum(part.attrib.get("class") == kind for part in parts) == 30
    bars = [part for part in ElementTree.fromstring(waiting(rehearsal)) if part.attrib.get("class") == "wait"]
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert len(heights) == 30
    assert heights[0] == max(heights)
    assert heights[0] == pytest.approx(10 * heights[1], rel=0.05)  # 300 ms and 30


def test_settings_have_a_line_for_each_executor() -> None:
    parts = list(ElementTree.fromstring(settings(made_up())))
    kinds = [part.attrib.get("class", "") for part in parts]
    assert kinds.count("line s0") == kinds.count("line s1") == 1
    assert kinds.count("line s2") == 0
    assert kinds.count("dot s0 hollow") == 2
    assert {"inline", "need"} <= set(kinds)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
class TestBrowser:
    @full_only("a browser for each; what the report says is tested without")
    @pytest.mark.parametrize(
        ("width", "scheme"), itertools.product([1160, 400], ["light", "dark"]) if FULL else [(400, "dark")]
    )
    def test_screenshot(self, tmp_path: Path, scheme: str, width: int) -> None:
        page = tmp_path / "report.html"
        page.write_text(report(made_up()))
        options = [f"--screenshot={tmp_path / 'page.png'}", *(DARK if scheme == "dark" else ())]
        browse(page.as_uri(), tmp_path, *options, size=(width, 2400))
        image = cv2.imread(str(tmp_path / "page.png"))
        assert image is not None
        assert image.shape == (2400, width, 3)
        assert image[5, 5].mean() > 230 if scheme == "light" else image[5, 5].mean() < 40
        blue, green, red = (image[..., channel].astype(int) for channel in range(3))
        bars = (blue > 150) & (blue - red > 80)
        waits = (red - blue > 100) & (green - blue > 40) & (red > 190)  # and not the red of what is needed
        trains = (green - red > 60) & (green > 110)
        for drawn in (bars, waits, trains):
            assert drawn.sum() > 0.2 * width
        assert np.unique(image.reshape(-1, 3), axis=0).shape[0] > 50

    @pytest.mark.parametrize("width", [1160, 400])
    def test_no_horizontal_overflow(self, tmp_path: Path, width: int) -> None:
        name = "a.module.with.a.long.name.that.has.no.place.to.break:and_a_loader_of_a_long_name_too"
        probe = (
            "<script>addEventListener('load', () => { const e = document.documentElement;"
            " document.title = `${innerWidth} ${e.scrollWidth} ${document.body.scrollWidth}` })</script></body>"
        )
        page = tmp_path / "report.html"
        page.write_text(report(made_up(name=name)).replace("</body>", probe))
        found = re.search(
            r"<title>(\d+) (\d+) (\d+)</title>", browse(page.as_uri(), tmp_path, "--dump-dom", size=(width, 900))
        )
        assert found is not None
        inner, whole, body = map(int, found.groups())
        assert inner == width
        assert max(whole, body) <= width
