"""Text, and tokenizers of it, that tests of several folders share; programs of tests import this by name."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

END = "<|end|>"
TEXTS = [f"{'water ' * (k % 5)}flows through pipe {k} of {k * k}" for k in range(40)]
TEXTS[7] = ""
TEXTS[11] = "été ☂ 水"


@cache
def tokenizer() -> Any:
    """Return a tokenizer of bytes with a few merges and an end token; it is trained in some milliseconds."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], show_progress=False, initial_alphabet=sorted(alphabet)
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def expected(texts: list[str], end: bool = True) -> list[list[int]]:
    """Return the ids of texts by the tokenizer itself, one after the other."""
    made = tokenizer()
    last = [made.token_to_id(END)] if end else []
    return [made.encode(text).ids + last for text in texts]


def letters(text: str) -> list[int]:
    """Encode each letter by its number: the tokenizer of a program's own."""
    return [ord(letter) % 1000 for letter in text]


letters.pure = True  # type: ignore[attr-defined]
letters.fingerprint = "letters, version 1"  # type: ignore[attr-defined]


def write_table(path: Path, texts: list[str], rows: int = 7) -> Path:
    """Write texts as the column "text" of Parquet, in row groups of some rows."""
    table = pa.table({"text": texts, "number": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def digests(folder: Path) -> dict[str, str]:
    """Return a hash of each file of a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def tokens_of(folder: Path, dtype: str = "<u2") -> list[int]:
    """Return the tokens of all shards of a folder, by NumPy alone."""
    files = sorted(folder.glob("tokens-*.bin"))
    return np.concatenate([np.fromfile(path, dtype) for path in files]).tolist()
