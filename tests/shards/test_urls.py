"""Brace notation, lists, patterns."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError, ShardIOError
from penstock.shards.urls import expand, expand_versions, local_path
from penstock.storage import Storage
from penstock.storage.backend import Stat


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a.tar", ["a.tar"]),
        ("x-{08..11}.tar", ["x-08.tar", "x-09.tar", "x-10.tar", "x-11.tar"]),
        ("{0..8..4}", ["0", "4", "8"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{a..c}{1,2}", ["a1", "a2", "b1", "b2", "c1", "c2"]),
        ("{a,b{1..2},}", ["a", "b1", "b2", ""]),
        ("{x}", ["{x}"]),
        ("{-1..1}", ["-1", "0", "1"]),
        (r"a\{1,2\}", ["a{1,2}"]),
        ("${V}-{0,1}", ["${V}-0", "${V}-1"]),
        ("s3://b/{0..1}.tar::a.tar", ["s3://b/0.tar", "s3://b/1.tar", "a.tar"]),
        ("pipe:cat {0,1}*.tar", ["pipe:cat 0*.tar", "pipe:cat 1*.tar"]),
    ],
)
def test_expand(text: str, expected: list[str]) -> None:
    from penstock.shards.urls import braces

    assert [url for part in text.split("::") for url in braces(part)] == expected
    if "" not in expected:
        assert expand(text) == expected


def test_lists_are_expanded_and_paths_are_not() -> None:
    assert expand(["{a,b}", Path("{a,b}"), "c"]) == ["a", "b", "{a,b}", "c"]


@pytest.mark.parametrize("text", ["{a", "a}", "{a,{b}"])
def test_unbalanced(text: str) -> None:
    with pytest.raises(ConfigError, match="unbalanced"):
        expand(text)


def test_too_many() -> None:
    with pytest.raises(ConfigError, match="shards"):
        expand("{0..99999}{0..99999}")
    with pytest.raises(ConfigError, match="shards"):
        expand("{0..99999999999999999999}")


def test_nothing() -> None:
    for urls in ([], "", "a::"):
        with pytest.raises(ConfigError, match="no source given"):
            expand(urls)


def test_patterns(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", "c.tgz", "w[1].tar"):
        (tmp_path / name).touch()
    assert expand(str(tmp_path / "?.tar")) == [str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]
    assert expand(str(tmp_path / "{a,c}.t*")) == [str(tmp_path / "a.tar"), str(tmp_path / "c.tgz")]
    assert expand(str(tmp_path / "w[1].tar")) == [str(tmp_path / "w[1].tar")]
    with pytest.raises(ShardIOError, match="no file matches"):
        expand(str(tmp_path / "*.zip"))


def test_local() -> None:
    assert local_path("a/b.tar") == "a/b.tar"
    assert local_path("file:///a/b.tar") == "/a/b.tar"
    assert local_path("file:a.tar") == "a.tar"
    assert local_path("s3://b/a.tar") is None
    assert local_path("pipe:cat a.tar") is None


def test_patterns_in_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, asked = Storage(options={"a": 1}), []

    def found(self: Storage, url: str) -> list[tuple[str, Stat]]:
        assert self is storage
        asked.append(url)
        return [(url.replace("*", str(i)), Stat(i)) for i in range(2)]

    monkeypatch.setattr(Storage, "list_objects", found)
    assert expand(["s3://b/{x,y}-*.tar", Path("*"), "http://h/*.tar?a=*"], storage) == [
        *("s3://b/x-0.tar", "s3://b/x-1.tar", "s3://b/y-0.tar", "s3://b/y-1.tar"),
        *("*", "http://h/*.tar?a=*"),
    ]
    assert asked == ["s3://b/x-*.tar", "s3://b/y-*.tar"]
    assert expand_versions("s3://b/x-*.tar", storage) == [("s3://b/x-0.tar", Stat(0)), ("s3://b/x-1.tar", Stat(1))]
