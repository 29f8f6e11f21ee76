"""What the conformance suite of streams is run on, in a module that other processes can import."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from state_support import BothStream, HubStream, IteratorStream, PlainStream, share

from penstock import Mixture, StreamShards, wds
from penstock.plan.stream import ResumableDataset

COUNTS = [7, 1, 0, 9, 4]
TOTAL = sum(COUNTS)

Make = Callable[[list[str]], Any]


class StreamCase(NamedTuple):
    """A data set, and others whose states it must refuse.

    Attributes:
        make: of the paths of shards.
        others: by what differs.
        whole: whether an epoch has each sample of the shards once.
    """

    make: Make
    others: dict[str, Make]
    whole: bool = False


def compressed(paths: list[str]) -> list[str]:
    """Return the paths of the same shards, compressed."""
    for path in paths:
        Path(path + ".gz").write_bytes(gzip.compress(Path(path).read_bytes(), mtime=0))
    return [path + ".gz" for path in paths]


def label(sample: Any) -> int:
    return int(sample["cls"])


class Doubled(StreamShards):
    """A program's own idea of the items."""

    def __iter__(self) -> Any:
        return (2 * label(sample) for sample in super().__iter__())


class LiveStream(PlainStream):
    """Its state is a dict that it goes on writing into."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.start, self.live = 0, {"places": [0]}

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for place, item in enumerate(share(self.n)[start:], start + 1):
            self.live["places"][0] = place
            yield item

    def state_dict(self) -> dict[str, Any]:
        return self.live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.live = state["places"][0], state


def pipeline(paths: list[str], seed: int = 3) -> wds.WebDataset:
    return wds.WebDataset(paths, shardshuffle=True, seed=seed).shuffle(3).map(label)


def stream(paths: list[str], **options: Any) -> StreamShards:
    return StreamShards(paths, load=label, **{"seed": 4, **options})


def mixed(*sources: Any, **options: Any) -> Any:
    """Return a mixture of data sets; the first one has the weight 2, the others 1."""
    return Mixture([(source, 1 + (number == 0)) for number, source in enumerate(sources)], **options)


def of_shards(paths: list[str], **options: Any) -> Any:
    return mixed(stream(paths[:3]), stream(paths[3:], buffer_bytes=900), **options)


def nested(paths: list[str], **options: Any) -> Any:
    inner = mixed(stream(paths[:2]), PlainStream(5), stop="first")
    return mixed(inner, mixed(stream(paths[3:]), stop=8), **options)


def given_twice(paths: list[str], **options: Any) -> Any:
    shards = stream(paths)
    again = mixed(shards, PlainStream(4), tag=True, stop=9)
    return mixed(shards, again, again, shards, **options)


def of_users(paths: list[str], **options: Any) -> Any:
    return mixed(IteratorStream(9), HubStream(7), BothStream(4), PlainStream(5), stream(paths), **options)


SHARDS: dict[str, Make] = {
    "another seed": lambda paths: stream(paths, seed=2),
    "fewer shards": lambda paths: stream(paths[:2]),
    "of two ranks": lambda paths: stream(paths, rank=0, world_size=2),
    "a mixture": of_shards,
}
MIXTURES: dict[str, Make] = {
    "another stop": lambda paths: of_shards(paths, stop=11),
    "other shards": lambda paths: mixed(stream(paths[:2]), stream(paths[3:], buffer_bytes=900)),
    "other sources": lambda paths: mixed(stream(paths[:3]), IteratorStream(9)),
    "sources without a state": lambda paths: mixed(PlainStream(9), PlainStream(9)),
    "one source more": lambda paths: mixed(stream(paths[:3]), stream(paths[3:], buffer_bytes=900), PlainStream(3)),
    "no mixture": stream,
}
CASES: dict[str, StreamCase] = {
    "shards": StreamCase(stream, SHARDS, whole=True),
    "shards in their order": StreamCase(lambda paths: stream(paths, shuffle="none"), SHARDS, whole=True),
    "shuffled shards": StreamCase(lambda paths: stream(paths, buffer_bytes=1200), SHARDS, whole=True),
    "compressed shards": StreamCase(lambda paths: stream(compressed(paths), buffer_bytes=1200), SHARDS, whole=True),
    "mixture": StreamCase(of_shards, MIXTURES),
    "mixture to the first end": StreamCase(lambda paths: of_shards(paths, stop="first"), MIXTURES),
    "mixture of a number": StreamCase(lambda paths: of_shards(paths, stop=23, tag=True), MIXTURES),
    "mixture of mixtures": StreamCase(nested, MIXTURES),
    "mixture with the same twice": StreamCase(given_twice, MIXTURES),
    "mixture of users' streams": StreamCase(of_users, MIXTURES),
    "users' streams to the first end": StreamCase(lambda paths: of_users(paths, stop="first"), MIXTURES),
    "mixture of a live state": StreamCase(lambda paths: mixed(LiveStream(6), PlainStream(9)), MIXTURES),
    "mixture of a program's own items": StreamCase(lambda paths: mixed(Doubled(paths), PlainStream(3)), MIXTURES),
    "mixture of pipelines": StreamCase(
        lambda paths: mixed(pipeline(paths), pipeline(paths, seed=5), PlainStream(3)), MIXTURES
    ),
}


def send_rests(cases: list[tuple[ResumableDataset, list[Any]]], pipe: Any) -> None:
    """In another process: send what comes after each cursor."""
    pipe.send([[list(dataset.open(cursor)) for cursor in cursors] for dataset, cursors in cases])
    pipe.close()
