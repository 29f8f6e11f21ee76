"""The text of a sample: the sample itself, or a column of a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError, DataFileError

__all__ = ["COLUMN", "check_column", "text_of"]

COLUMN = "text"
"""The default text column."""


def check_column(columns: Any, column: str) -> None:
    """Check that a source has this column, if its columns are known.

    Raises:
        ConfigError: the column is missing; the message lists the existing ones.
    """
    if isinstance(columns, list | tuple) and column not in columns:
        raise ConfigError(f"there is no column {column!r}: the columns are {', '.join(map(str, columns))}; see column=")


def text_of(sample: Any, column: str, row: Any) -> str:
    """Return the text of a sample.

    Args:
        sample: a string or a mapping.
        column: the text column of a mapping.
        row: row of the sample, for error messages.

    Raises:
        ConfigError: a mapping without this column, or a sample of another type.
        DataFileError: the column does not hold text.
    """
    if isinstance(sample, str):
        return sample
    if not isinstance(sample, Mapping):
        raise ConfigError(f"sample {row} is {type(sample).__name__}: samples are text, or dicts with a column of text")
    if column not in sample:
        check_column(list(sample), column)
    text = sample[column]
    if not isinstance(text, str):
        raise DataFileError(
            f"sample {row} has {type(text).__name__} in the column {column!r}, not text: leave such samples out"
        )
    return text
