"""`penstock.open` of documents of tokens: our folders, Megatron's pairs, nanoGPT's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_support import END, TEXTS, expected, tokenizer

import penstock as ps
from penstock.errors import ConfigError, DataFileError
from penstock.opening import kind_of
from penstock.tokens.megatron import write_index

SHARE: dict[str, Any] = {"shuffle": "none", "rank": 0, "world_size": 1}


def listed(dataset: Any) -> list[list[int]]:
    assert isinstance(dataset, ps.DocumentDataset)
    return [document.tolist() for document in dataset]


@pytest.fixture(params=["penstock", "megatron"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "tokens"
    ps.tokenize(
        TEXTS, path, tokenizer(), append_eos=END, workers=1, format=request.param, shard_tokens=40, progress=False
    )
    assert len(list(path.glob("*.bin"))) > 1
    return path


def test_a_folder_gives_what_a_document_dataset_gives(folder: Path) -> None:
    assert listed(ps.open(folder, **SHARE)) == listed(ps.DocumentDataset(folder, **SHARE)) == expected(TEXTS)
    assert listed(ps.open(folder / "tokens.json", **SHARE)) == expected(TEXTS)
    options: dict[str, Any] = {"seed": 3, "rank": 1, "world_size": 3, "mini_epochs": 2, "token_type": "int32"}
    assert listed(ps.open(folder, **options)) == listed(ps.DocumentDataset(folder, **options))
    assert ps.open(folder, load=len, **SHARE)[1] == len(expected(TEXTS)[1])
    assert kind_of(folder) == "documents"


def test_a_folder_as_sequences_of_one_length(folder: Path) -> None:
    every = ps.open(folder, sequence_length=4, dtype="uint16", **SHARE)
    assert isinstance(every, ps.TokenDataset)
    whole = [np.fromfile(path, np.uint16) for path in sorted(folder.glob("*.bin"))]
    assert len(every) == sum(len(tokens) // 4 for tokens in whole)  # the indexes are no tokens
    assert every[0].tolist() == whole[0][:4].tolist()


def test_a_folder_that_is_not_finished(folder: Path) -> None:
    about = json.loads((folder / "tokens.json").read_bytes())
    (folder / "tokens.json").write_text(json.dumps({**about, "shards": about["shards"][:1], "complete": False}))
    done = about["shards"][0]["documents"]
    for options in ({}, {"sequence_length": 4, "dtype": "uint16"}):
        with pytest.raises(DataFileError, match=rf"{done} of {len(TEXTS)} rows are tokenized. Run `penstock tokenize`"):
            ps.open(folder, **options)


@pytest.mark.parametrize("name", ["../other/tokens-00000", "/etc/tokens-00000", "%2E%2e/other/tokens-00000"])
def test_shards_outside_the_folder_are_refused(folder: Path, name: str) -> None:
    about = json.loads((folder / "tokens.json").read_bytes())
    about["shards"][0]["name"] = name
    (folder / "tokens.json").write_text(json.dumps(about))
    with pytest.raises(DataFileError, match="is not a file within its folder"):
        ps.open(folder)


def test_options_of_others_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tokenized documents do not take size="):
        ps.open(folder, size=32)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="says type and ends of its documents"):
        ps.open(folder, end_token=3)


@pytest.mark.parametrize("name", ["a.b_text_document", "a.b_text_document.bin", "a.b_text_document.idx"])
def test_pairs_of_megatron(tmp_path: Path, name: str) -> None:
    documents = [[1, 2, 3], [], [4, 5]]
    prefix = tmp_path / "a.b_text_document"
    np.array([1, 2, 3, 4, 5], np.int32).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        write_index(file, "int32", [len(document) for document in documents])
    assert listed(ps.open(tmp_path / name, **SHARE)) == documents
    assert listed(ps.DocumentDataset(tmp_path / name, **SHARE)) == documents
    if name.endswith(".bin"):
        assert ps.open(tmp_path / name, dtype="int32", sequence_length=5, **SHARE)[0].tolist() == [1, 2, 3, 4, 5]


def test_an_index_of_somebody_else_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(8))
    (tmp_path / "a.idx").write_bytes(b"something else")
    (tmp_path / "b.idx").write_bytes(b"")
    for name in ("a.bin", "a.idx", "b"):
        with pytest.raises(ConfigError, match=r"unknown kind of data|no such file"):
            ps.open(tmp_path / name)


def test_files_whose_documents_end_with_a_token(tmp_path: Path) -> None:
    np.array([1, 2, 0, 3, 0], np.uint16).tofile(tmp_path / "train.bin")
    np.save(tmp_path / "train.npy", np.array([1, 2, 0, 3, 0], np.uint16))
    assert listed(ps.open(tmp_path / "train.bin", dtype="uint16", end_token=0, **SHARE)) == [[1, 2, 0], [3, 0]]
    assert listed(ps.open(tmp_path / "train.npy", end_token=0, **SHARE)) == [[1, 2, 0], [3, 0]]
    with pytest.raises(ConfigError, match="give dtype=, and sequence_length= or end_token="):
        ps.open(tmp_path / "train.bin")
