"""WebDataset's rules for keys and samples."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_support import make_tar

from penstock.errors import ShardError
from penstock.shards.grouping import base_and_extension, group, split_name
from penstock.shards.tar import walk_stream


def read(members: list[tuple[str, bytes]], **options: object) -> list[dict[str, object]]:
    file = io.BytesIO(make_tar(members))
    return list(group(walk_stream(file, "u"), "u", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("a/b.c/d.e.f", ("a/b.c/d", "e.f")),
        ("a.", ("a", "")),
        ("x..y", ("x", ".y")),
        ("README", None),
        (".hidden", None),
        (".hidden.jpg", None),
        ("a.b/c", None),
        ("a/.foo.bar", ("a/", "foo.bar")),
        ("x.y/.foo", None),
        ("x.y/z/.foo", ("x.y/z/", "foo")),
        ("/.foo", ("/", "foo")),
        ("./a.jpg", ("./a", "jpg")),
        ("a/b/", None),
    ],
)
def test_names(name: str, expected: tuple[str, str] | None) -> None:
    assert base_and_extension(name) == expected


@given(st.text(st.sampled_from("ab./\n_"), max_size=12))
def test_names_by_their_definition(name: str) -> None:
    """Key: anything up to a slash, then no dots; then a dot; extension: anything but slashes."""
    found = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)\Z", name)
    assert base_and_extension(name) == (found.groups() if found else None)


def test_metadata_is_left_out() -> None:
    for name in ("__meta__", "__meta__/x.jpg", "__a__/b/c.d", "__", "___"):
        assert split_name(name) is None
    for name in ("./__meta__/x.jpg", "__x.jpg", "__a/b.jpg", "a__/b.jpg"):
        assert split_name(name) is not None


def test_consecutive_members_and_order() -> None:
    got = read(
        [
            ("b.JPG", b"1"),
            ("b.Cls", b"2"),
            ("README", b""),
            ("b.x", b"3"),
            ("a.jpg", b"4"),
            ("b.jpg", b"5"),
            ("d/", b""),
        ]
    )
    assert got == [
        {"__key__": "b", "__url__": "u", "jpg": b"1", "cls": b"2", "x": b"3"},
        {"__key__": "a", "__url__": "u", "jpg": b"4"},
        {"__key__": "b", "__url__": "u", "jpg": b"5"},
    ]
    assert list(got[0]) == ["__key__", "__url__", "jpg", "cls", "x"]


def test_local_path_comes_after_the_first_component() -> None:
    got = read([("b.jpg", b"1"), ("b.cls", b"2")], local_path="/x")
    assert list(got[0].items())[2:] == [("jpg", b"1"), ("__local_path__", "/x"), ("cls", b"2")]


def test_duplicates() -> None:
    members = [("a.jpg", b"1"), ("a.JPG", b"2"), ("a.cls", b"3"), ("b.jpg", b"4")]
    with pytest.raises(ShardError, match=r"a.JPG: duplicate file name in tar file jpg .*u: byte 1024"):
        read(members)
    seen: list[Exception] = []
    got = read(members, handler=lambda error: seen.append(error) is None)
    assert len(seen) == 1
    assert [{k: v for k, v in s.items() if k[0] != "_"} for s in got] == [{"jpg": b"1", "cls": b"3"}, {"jpg": b"4"}]
    assert len(read(members, handler=lambda error: False)) == 0
    with pytest.raises(ShardError, match="duplicate"):
        read([("a.__key__", b"1")])


def test_a_cut_drops_the_sample_in_progress() -> None:
    data = make_tar([("a.jpg", b"1"), ("a.cls", b"2"), ("b.jpg", b"3"), ("b.cls", b"4")])
    stream = group(walk_stream(io.BytesIO(data[: 512 * 7]), "u"), "u")
    assert next(stream)["__key__"] == "a"
    with pytest.raises(ShardError, match="ends at byte"):
        next(stream)
