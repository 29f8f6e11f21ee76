"""`penstock.open`: open any kind of data as the dataset that fits it.

penstock.open("data/imagenet", size=224)          ImageDataset     a folder with one subfolder of images per class
penstock.open("train.txt", root="data", size=224) ImageDataset     text, CSV, JSONL, Parquet, Arrow with image paths
penstock.open("data/imagenet")                    RankDataset      without size= or transform=: (path, label, row)
penstock.open("train-{000..099}.tar")             ShardDataset     tar shards; compressed ones: StreamShards
penstock.open("data/imagenet-mds")                MDSDataset       a folder with index.json
penstock.open("data/shards")                      ShardDataset     a folder of tar files; compressed: StreamShards
penstock.open("data/squad", split="train")        TableDataset     a folder of `datasets`, of Arrow or Parquet files
penstock.open("train-*.parquet")                  TableDataset     tables without columns path and label
penstock.open("rows.csv")                         TableDataset     CSV and TSV without columns path and label
penstock.open("part-*.jsonl.zst")                 TableDataset     JSON lines with any keys, plain, .zst or .gz
penstock.open("features-*.npy")                   ArrayDataset     rows of memory-mapped NumPy files
penstock.open("pixels.npy", transform=[...])      ImageDataset     pixels of images of one size in NumPy files
penstock.open("data/arrays")                      RankDataset      a folder with one NumPy file per sample
penstock.open("tokens-*.bin", dtype="uint16", sequence_length=2048)             TokenDataset; also .npy
penstock.open("tokens")                           DocumentDataset  a folder that `penstock tokenize` wrote
penstock.open("corpus_text_document")             DocumentDataset  Megatron's .bin and .idx, or one of these names
penstock.open("train.bin", dtype="uint16", end_token=50256)                     DocumentDataset, such as nanoGPT's
penstock.open("videos", frames=16, step=2, size=112)                            VideoDataset; for audio, AudioDataset
penstock.open("pusht", delta_timestamps={"action": [0.0, 0.1]})                 LeRobotDataset: has meta/info.json

Tar shards, MDS folders and tables with images take ``size=`` and ``transform=``, too. For files of any other kind, use
a manifest of their paths, and ``load=penstock.LoadBytes()``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import Any

from penstock.opening.kinds import (
    DATASETS,
    check_options,
    folder_manifest,
    identify,
    image_options,
    kind_of,
    make_dataset,
    options_of,
    shards_in,
)
from penstock.storage.names import expand

__all__ = ["folder_manifest", "kind_of", "open", "shards_in"]


def open(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], **options: Any) -> Any:
    """Return the dataset for a source. The kind of dataset follows from the source's name and contents.

    Args:
        source: a path or an address; see `penstock.opening` for all kinds. For several files, such as shards or
            manifests, give a list, braces, patterns or ``::``.
        options: the options of the dataset, and for a manifest also the options of `Manifest.open`. If the source
            contains images, any option of `LoadImage` (``size``, ``transform``, ``flip``, ``target``, ``row``,
            ``max_pixels``, ``index``) returns an `ImageDataset`: items are ``(image, label)``, and
            ``dataset.classes[label]`` is the name of the class, if the source has class names. ``size=None`` keeps the
            size of each file.
            Without any of them, nothing of a folder of images is decoded: items are ``(path, label, row)``.

    Raises:
        ConfigError: the kind of source is unknown, or does not take an option. The message lists the known kinds
            or options.
        PenstockError: the errors of the dataset.

    For a folder of images, videos or recordings by class, a label is the index of the class folder in the sorted list
    of class folders. Hidden folders and hidden image files are ignored. Beside folders of images, a folder without any
    counts as a class, with a warning.
    """
    found = identify(expand(source, options.get("storage")), options)
    check_options(found, options)
    return make_dataset(found, options)


class _Signature(inspect.Signature):
    """The signature of `open`, with the options of all kinds. They are read when they are needed, because this imports
    every dataset.
    """

    @property
    def parameters(self) -> Any:
        names = {name for kind in DATASETS for name in options_of(kind)} | image_options().keys()
        source = inspect.Parameter("source", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in sorted(names)]
        return {each.name: each for each in (source, *options)}


open.__signature__ = _Signature()  # type: ignore[attr-defined]
