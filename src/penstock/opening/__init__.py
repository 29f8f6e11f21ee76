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

from penstock.opening.kinds import folder_manifest, kind_of, shards_in
from penstock.opening.signatures import open

__all__ = ["folder_manifest", "kind_of", "open", "shards_in"]
