"""MDS, the shards of MosaicML Streaming: read at random, in any order, with a state.

* `index`, `shard`: what is on disk, checked before it is believed.
* `encodings`, `compression`, `files`: columns, compressed shards, hashes.
* `folder`: the samples by their numbers. One rank's share of them is a `penstock.MDSDataset`.
"""

from __future__ import annotations

from penstock.shards.mds.folder import MDSFolder

__all__ = ["MDSFolder"]
