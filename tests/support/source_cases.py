"""Every kind of `Source` with rows that are numbers, so that a record says which row it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
from lerobot_support import write_lerobot
from mds_writer import write_mds
from sound_support import write_sound
from video_support import picture, write_video

import penstock as ps
from penstock.clips.clip_files import ClipFiles, ClipRecord, FrameRule, SoundRule
from penstock.clips.clip_index import SOUND
from penstock.clips.indexing import open_index
from penstock.clips.lerobot import FrameRecord, LeRobotFiles
from penstock.order.permutation import normalise
from penstock.plan.source import Source
from penstock.sources.arrays import ArrayFiles, LabelledArrays
from penstock.sources.tokens import DocumentFiles, TokenFiles
from penstock.tokens.folder import TokenFolder, TokenShardWriter
from penstock.tokens.megatron import write_index

PER_FILE = 4
"""Rows of a file, where a source has several."""

END = 60_000
"""The token behind each document."""

Numbers = Sequence[int]


def per_file(
    folder: Path, name: str, numbers: Numbers, write: Callable[[Path, list[int]], Any], per_file: int = PER_FILE
) -> list[str]:
    """Write files of some rows each; return their paths."""
    files = []
    for begin in range(0, len(numbers), per_file):
        file = folder / name.format(begin)
        write(file, list(numbers[begin : begin + per_file]))
        files.append(str(file))
    return files


def columns(numbers: Numbers) -> pa.Table:
    """Return rows as a table."""
    return pa.table({"path": [f"images/{number}.jpg" for number in numbers], "label": list(numbers)})


def write_text(file: Path, numbers: Numbers) -> None:
    file.write_text("".join(f"images/{number}.jpg {number}\n" for number in numbers))


def write_csv(file: Path, numbers: Numbers) -> None:
    file.write_text("path,label\n" + "".join(f"images/{number}.jpg,{number}\n" for number in numbers))


def write_jsonl(file: Path, numbers: Numbers) -> None:
    file.write_text("".join(f'{{"path": "images/{number}.jpg", "label": {number}}}\n' for number in numbers))


def write_parquet(file: Path, numbers: Numbers) -> None:
    pyarrow.parquet.write_table(columns(numbers), file)


def write_arrow(file: Path, numbers: Numbers) -> None:
    pyarrow.feather.write_feather(columns(numbers), str(file), compression="uncompressed")


def write_array(file: Path, numbers: Numbers) -> None:
    np.save(file, np.array(numbers))


def write_tokens(file: Path, numbers: Numbers) -> None:
    np.save(file, np.repeat(np.array(numbers, np.uint16), 3))


def write_documents(file: Path, numbers: Numbers) -> None:
    """Write a document a row, of which the number is the first token."""
    np.save(file, np.array([token for number in numbers for token in (number, number, END)], np.uint16))


def write_pair(file: Path, numbers: Numbers) -> None:
    """Write the same documents as Megatron does."""
    np.array([token for number in numbers for token in (number, number, END)], np.uint16).tofile(
        file.with_suffix(".bin")
    )
    with file.open("wb") as out:
        write_index(out, "uint16", [3] * len(numbers))


def tokenized(folder: Path, numbers: Numbers) -> Source:
    """Write documents into a folder, as ``penstock tokenize`` does."""
    said = TokenFolder("penstock", "uint16", len(numbers), {})
    with TokenShardWriter(folder, said, 2 * PER_FILE) as writer:
        writer.write(np.repeat(np.array(numbers, np.uint16), 2), np.full(len(numbers), 2))
        writer.finish()
    return DocumentFiles(folder)


def write_tar(file: Path, numbers: Numbers) -> None:
    with ps.TarWriter(str(file), mtime=0) as writer:
        for number in numbers:
            writer.write({"__key__": f"{number:04d}", "cls": number})


def videos(folder: Path, numbers: Numbers) -> Source:
    """Write a video of a few frames for each row, which is its label."""
    paths = [str(write_video(folder / f"{number:03d}.mp4", 3, pictures=partial(_still, number))) for number in numbers]
    return ClipFiles(open_index(paths, folder / "clips.arrow"), FrameRule(2, 1, None, True), list(numbers))


def sounds(folder: Path, numbers: Numbers) -> Source:
    """Write a short recording for each row, which is its label."""
    paths = [str(write_sound(folder / f"{number:03d}.wav", 0.02, rate=8_000, seed=number)) for number in numbers]
    index = open_index(paths, folder / "clips.arrow", kind=SOUND)
    return ClipFiles(index, SoundRule(0.01, None, None, True), list(numbers))


def robots(folder: Path, numbers: Numbers) -> Source:
    """Write an episode of one frame for each row, which has its number as a feature."""
    write_lerobot(folder, [1] * len(numbers), per_table=PER_FILE, cameras=(), numbers=numbers)
    return LeRobotFiles(folder, columns=["number"])


def _still(number: int, _: int) -> np.ndarray[Any, Any]:
    return picture(number)


def one_file(name: str, write: Callable[[Path, Numbers], None]) -> Callable[[Path, Numbers], Source]:
    """Return a maker of manifests of one file."""

    def make(folder: Path, numbers: Numbers) -> Source:
        write(folder / name, numbers)
        return ps.Manifest.open(folder / name)

    return make


def several_files(name: str, write: Callable[[Path, Numbers], None]) -> Callable[[Path, Numbers], Source]:
    """Return a maker of manifests of several files."""
    return lambda folder, numbers: ps.Manifest.open(per_file(folder, name, numbers, write))


def labelled(folder: Path, numbers: Numbers) -> Source:
    rows, labels = (per_file(folder, name, numbers, write_array) for name in ("row-{}.npy", "label-{}.npy"))
    return LabelledArrays(ArrayFiles(rows), ArrayFiles(labels))


def mds(compression: str | None) -> Callable[[Path, Numbers], Source]:
    """Return a maker of MDS folders whose index has hashes, without which it does not know contents."""

    def make(folder: Path, numbers: Numbers) -> Source:
        samples = [{"row": number, "text": str(number)} for number in numbers]
        options: Any = {"per_shard": PER_FILE, "compression": (compression,), "hashes": ("xxh64",)}
        write_mds(folder, {"row": "int", "text": "str"}, samples, **options)
        return ps.MDSFolder(folder, cache_dir=folder / "unpacked")

    return make


class UsersRows:
    """A user's own source, of the protocol's four members and nothing else."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def fingerprint(self) -> str:
        return " ".join(map(str, self.numbers))

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        return rows <= len(self) and UsersRows(self.numbers[:rows]).fingerprint == fingerprint

    def records(self, rows: Any) -> list[Any]:
        return [self.numbers[row] for row in normalise(rows, len(self)).tolist()]


SOURCES: dict[str, Callable[[Path, Numbers], Source]] = {
    "text": one_file("rows.txt", write_text),
    "csv": several_files("rows-{:03d}.csv", write_csv),
    "jsonl": one_file("rows.jsonl", write_jsonl),
    "parquet": several_files("rows-{:03d}.parquet", write_parquet),
    "arrow": several_files("rows-{:03d}.arrow", write_arrow),
    "arrays": lambda folder, numbers: ArrayFiles(per_file(folder, "row-{}.npy", numbers, write_array)),
    "labelled arrays": labelled,
    "tokens": lambda folder, numbers: TokenFiles(per_file(folder, "tokens-{}.npy", numbers, write_tokens), 3),
    "documents": lambda folder, numbers: TokenFiles(
        per_file(folder, "tokens-{}.npy", numbers, write_documents), 3, end_token=END
    ),
    "documents by an end token": lambda folder, numbers: DocumentFiles(
        per_file(folder, "tokens-{}.npy", numbers, write_documents), end_token=END
    ),
    "documents of a folder": tokenized,
    "documents of Megatron": lambda folder, numbers: DocumentFiles(
        per_file(folder, "tokens-{}.idx", numbers, write_pair)
    ),
    "parquet table": lambda folder, numbers: ps.TableFiles(
        per_file(folder, "table-{}.parquet", numbers, write_parquet)
    ),
    "arrow table": lambda folder, numbers: ps.TableFiles(per_file(folder, "table-{}.arrow", numbers, write_arrow)),
    "shards": lambda folder, numbers: ps.ShardSet(per_file(folder, "shard-{:03d}.tar", numbers, write_tar)),
    "MDS": mds(None),
    "compressed MDS": mds("zstd"),
    "videos": videos,
    "sounds": sounds,
    "robots": robots,
    "a user's": lambda folder, numbers: UsersRows(numbers),
}
"""Makers of sources: each writes its rows into an empty folder and opens them."""


def number_of(record: Any) -> int:
    """Return the number that a record, or an item made of one, holds."""
    if isinstance(record, ps.Record | ClipRecord):
        assert isinstance(record.label, int)
        return record.label
    if isinstance(record, FrameRecord):
        return int(record.values["number"])
    if isinstance(record, dict):
        return int(next(record[name] for name in ("number", "label", "row", "__key__") if name in record))
    return int(np.asarray(record[0] if isinstance(record, tuple) else record).reshape(-1)[0])


def numbers(source: Source, rows: Any) -> list[int]:
    """Return the numbers in some rows of a source."""
    return [number_of(record) for record in source.records(np.array(rows, dtype=np.int64))]


def send_numbers(sources: dict[str, Source], pipe: Any) -> None:
    """Send identity and rows of each source, from another process."""
    for name, source in sources.items():
        pipe.send((name, source.fingerprint, numbers(source, [7, 2, -1])))
    pipe.close()
