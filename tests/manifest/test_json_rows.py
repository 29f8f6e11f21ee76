"""JSON lines against the json module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ManifestError
from penstock.manifest import Manifest

WriteFile = Callable[..., Path]
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
value = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.lists(st.integers(), max_size=2)
)
item = st.fixed_dictionaries(
    {"path": text.filter(bool), "label": st.integers(-(2**63), 2**63 - 1), "x": value, "other": value}
)


@given(st.lists(item, max_size=6), st.booleans(), st.sampled_from(["\n", "\r\n", "\n \t\n"]))
@one_file
def test_what_the_json_module_writes_is_read_back(
    write: WriteFile, items: list[dict[str, Any]], ascii_only: bool, end: str
) -> None:
    lines = [json.dumps(one, ensure_ascii=ascii_only) for one in items]
    manifest = Manifest.open(write(end.join(lines), suffix=".jsonl"), columns=["path", "label", "x"])
    expected = [(one["path"], one["label"], row, {"x": one["x"]}) for row, one in enumerate(items)]
    assert list(manifest) == expected
    assert [manifest[k] for k in range(len(items))] == expected
    table = manifest.take(range(len(items)))
    assert table["label"].to_pylist() == [one["label"] for one in items]
    as_text = [x if x is None or isinstance(x, str) else json.dumps(x) for x in (one["x"] for one in items)]
    assert table["x"].to_pylist() == as_text


@pytest.mark.parametrize(
    ("line", "label", "message"),
    [
        ("{", "int", "line 2: not JSON"),
        ("[1]", "int", "line 2: expected a JSON object, found list"),
        ('{"path": "a"}', "int", "line 2: no key 'label'"),
        ('{"path": "a", "label": true}', "int", "line 2: label True is not int"),
        ('{"path": "a", "label": 1.0}', "int", "line 2: label 1.0 is not int"),
        ('{"path": "a", "label": 9223372036854775808}', "int", "line 2: label .* outside the range of int64"),
        ('{"path": "", "label": 1}', "int", "line 2: path '' is empty"),
        ('{"path": 3, "label": 1}', "int", "line 2: path 3 is not str"),
        ('{"path": "a", "label": [1]}', "int[2]", r"line 2: label \[1\] is not a list of 2"),
        ('{"path": "a", "label": null}', "float", "line 2: label None is not float"),
    ],
)
def test_rows_that_do_not_parse_are_named(write: WriteFile, line: str, label: str, message: str) -> None:
    good = {"int": "1", "int[2]": "[1, 2]", "float": "1"}[label]
    manifest = Manifest.open(write(f'{{"path": "a", "label": {good}}}\n{line}\n', suffix=".jsonl"), label=label)
    for read in (lambda: manifest[1], lambda: manifest.records([0, 1]), lambda: manifest.take([1])):
        with pytest.raises(ManifestError, match=message):
            read()


def test_lists_become_tuples_and_arrays(write: WriteFile) -> None:
    path = write('{"path": "a", "label": [1, 2.5]}\n', suffix=".jsonl")
    manifest = Manifest.open(path, label="float[2]")
    assert manifest[0].label == (1.0, 2.5)
    assert manifest.take([0])["label"].to_pylist() == [[1.0, 2.5]]


def test_a_lone_surrogate_cannot_be_a_string_of_arrow(write: WriteFile) -> None:
    manifest = Manifest.open(write('{"path": "\\ud800", "label": 1}\n', suffix=".jsonl"))
    assert manifest[0].path == "\ud800"
    with pytest.raises(ManifestError, match="line 1: path is not UTF-8"):
        manifest.take([0])


def test_a_header_makes_no_sense(write: WriteFile) -> None:
    with pytest.raises(ConfigError, match="header=True is not supported"):
        Manifest.open(write("", suffix=".jsonl"), header=True)
