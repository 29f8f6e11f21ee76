"""`penstock.open`: one door to whatever holds samples.

penstock.open("data/imagenet", size=224)          ImageDataset     one folder of images a class: images and labels
penstock.open("train.txt", root="data", size=224) ImageDataset     text, CSV, JSONL, Parquet, Arrow that name images
penstock.open("data/imagenet")                    RankDataset      without size= or transform=: (path, label, row)
penstock.open("train-{000..099}.tar")             ShardDataset     tar shards; compressed ones: StreamShards
penstock.open("data/imagenet-mds")                MDSDataset       a folder with index.json
penstock.open("data/shards")                      ShardDataset     a folder of tar files; compressed: StreamShards
penstock.open("data/squad", split="train")        TableDataset     a folder of `datasets`, of Arrow or Parquet files
penstock.open("train-*.parquet")                  TableDataset     the same, if there are no columns path and label
penstock.open("part-*.jsonl.zst")                 TableDataset     JSON lines of any keys, plain, .zst or .gz
penstock.open("features-*.npy")                   ArrayDataset     rows of memory-mapped NumPy files
penstock.open("data/arrays")                      RankDataset      a folder of NumPy files, one a sample
penstock.open("tokens-*.bin", dtype="uint16", sequence_length=2048)             TokenDataset; .npy too
penstock.open("tokens")                           DocumentDataset  a folder that `penstock tokenize` wrote
penstock.open("corpus_text_document")             DocumentDataset  Megatron's .bin and .idx, or the name of one of them
penstock.open("train.bin", dtype="uint16", end_token=50256)                     DocumentDataset, such as nanoGPT's
penstock.open("videos", frames=16, step=2, size=112)                            VideoDataset; AudioDataset of recordings
penstock.open("pusht", delta_timestamps={"action": [0.0, 0.1]})                 LeRobotDataset: meta/info.json in it

Tar shards, MDS folders and tables that hold images take ``size=`` and ``transform=``, too. Files of any other kind: a
manifest that names them, and ``load=penstock.LoadBytes()``.
"""

from __future__ import annotations

from penstock.opening.kinds import folder_manifest, kind_of, shards_in
from penstock.opening.signatures import open

__all__ = ["folder_manifest", "kind_of", "open", "shards_in"]
