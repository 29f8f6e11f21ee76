"""Random programs across packages, against plain Python: filters, exclusions, tokens, lengths, caches, targets."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from text_support import letters

import penstock as ps

ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}
N = 23
TEXTS = ["x" * (7 * row % 11) + str(row) for row in range(N)]

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Path]:
    table = pa.table({"text": TEXTS, "n": list(map(len, TEXTS))})
    paths = {end: tmp_path / f"a.{end}" for end in ("parquet", "arrow", "jsonl")}
    pq.write_table(table, paths["parquet"], row_group_size=5)
    with pa.OSFile(str(paths["arrow"]), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    paths["jsonl"].write_text("".join(f'{{"text": "{text}", "n": {len(text)}}}\n' for text in TEXTS))
    return paths


@given(st.data())
@settings(quick, max_examples=10)
def test_tokens_and_lengths_of_filtered_rows(tables: dict[str, Path], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(tables)))
    excluded = data.draw(st.none() | st.lists(st.integers(0, N - 1), max_size=4))
    dataset: Any = ps.open(tables[kind], exclude=excluded, shuffle=data.draw(st.sampled_from(["none", "global"])))
    rows = list(range(N))
    for how in data.draw(st.lists(st.sampled_from(["mask", "rows", "expression"]), max_size=3)):
        if how == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            keep: Any = np.array(mask, np.bool_)
            kept = [row for row, kept in zip(rows, mask, strict=True) if kept]
        elif how == "rows":
            keep = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
            kept = [rows[place] for place in keep]
        elif kind != "jsonl":
            least = data.draw(st.integers(0, 9))
            keep, kept = pc.field("n") >= least, [row for row in rows if len(TEXTS[row]) >= least]
        else:
            continue
        if excluded and set(kept) <= set(excluded):
            break
        rows, dataset = kept, ps.Subset(dataset, keep)
    left = [row for row in rows if row not in (excluded or [])]
    with tempfile.TemporaryDirectory() as folder:
        tokens, lengths = Path(folder, "tokens"), Path(folder, "lengths.npy")
        report = ps.tokenize(dataset, tokens, letters, dtype="uint16", workers=1, progress=False)
        assert report.documents == len(left)
        if left:
            documents = [item.tolist() for item in ps.open(tokens, shuffle="none", **ALONE)]
            assert documents == [letters(TEXTS[row]) for row in left]
        ps.count_lengths(dataset, lengths, measure=lambda item: len(item["text"]), progress=False)
        assert np.load(lengths).tolist() == [len(TEXTS[row]) for row in rows]
        if kind != "jsonl":
            ps.count_lengths(dataset, lengths, column="n", progress=False)
            assert np.load(lengths).tolist() == [len(TEXTS[row]) for row in rows]
    assert {item["text"] for item in dataset} <= {TEXTS[row] for row in left}


@pytest.mark.parametrize("seed", [0])
def test_filters_and_lengths_of_a_file_that_is_written_again(tmp_path: Path, seed: int) -> None:
    rng, path, values = np.random.default_rng(seed), tmp_path / "a.arrow", np.ones(600_000, np.uint8)
    times: Any = None
    for step in range(3):
        begin = int(rng.integers(0, len(values)))
        values[begin : begin + int(rng.integers(1, 500))] ^= 1
        # In place, or by a rename that keeps the time of the file before.
        renamed = step > 0 and bool(rng.integers(2))
        new = tmp_path / f"{step}.arrow" if renamed else path
        with pa.OSFile(str(new), "wb") as file, pa.ipc.new_file(file, pa.schema({"n": pa.uint8()})) as writer:
            writer.write_table(pa.table({"n": values}))
        if renamed:
            os.utime(new, ns=times)
            new.rename(path)
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        table = ps.TableDataset(path, **ALONE)
        kept = ps.Subset(table, pc.field("n") > 0)
        assert len(kept) == np.count_nonzero(values)
        assert len(ps.PackedDataset(table, 1, lengths="n", **ALONE)) == np.count_nonzero(values)
        assert len(ps.Subset(kept, pc.field("n") < 1)) == 0


def pictures(folder: Path) -> None:
    for number in range(6):
        out = io.BytesIO()
        pixels = np.zeros((20, 30, 3), np.uint8)
        pixels[:, :15] = 200
        Image.fromarray(pixels).save(out, "PNG")
        where = folder / "ab"[number % 2] / f"{number}.png"
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(out.getvalue())


def left_half(record: Any) -> dict[str, Any]:
    mask = np.zeros((20, 30), np.uint8)
    mask[:, :15] = 1
    return {"masks": mask, "label": record.label}


@given(
    st.sampled_from([None, 8, (10, 12)]), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9)
)
@settings(quick, max_examples=30)
def test_targets_follow_size_and_flip(
    tmp_path: Path, size: Any, flip: bool, target: bool, row: bool, opened: bool, seed: int
) -> None:
    folder = tmp_path / "images"
    if not folder.exists():
        pictures(folder)
    options: dict[str, Any] = {"size": size, "flip": flip, "row": row, "target": left_half if target else None}
    share: dict[str, Any] = {"seed": seed, "shuffle": "none", **ALONE}
    source = ps.open(folder, **share)
    dataset = ps.open(folder, **options, **share) if opened else ps.ImageDataset(source, **options)
    plain = ps.ImageDataset(source, flip=flip)
    for number, (item, (reference, label)) in enumerate(zip(dataset, plain, strict=True)):
        image, found, *rest = item
        assert image.shape[1:] == ((20, 30) if size is None else (8, 8) if size == 8 else size)
        mirrored = bool(reference[0, 0, 0] == 0)
        assert flip or not mirrored
        assert bool(image[0, 0, 0] < 100) is mirrored
        if target:
            assert found["masks"].shape == image.shape[1:]
            assert bool(found["masks"][0, 0] == 0) is mirrored
            found = found["label"]
        assert (found, rest) == (label, [number] if row else [])
