"""MDS, the shards of MosaicML Streaming: read at random, in any order, with a state.

* `index`, `shard`: the files, checked before they are trusted.
* `encodings`, `files`: columns, compressed shards, hashes.
* `folder`: samples by number. `penstock.MDSDataset` is one rank's share of them.
"""

from __future__ import annotations

from penstock.shards.mds.folder import MDSFolder

__all__ = ["MDSFolder"]
