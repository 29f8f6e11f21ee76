"""The texts of samples: the samples themselves, or a column of dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError, DataFileError

__all__ = ["COLUMN", "check_column", "texts_of"]

COLUMN = "text"
"""The default text column."""


def check_column(columns: Any, column: str) -> None:
    """Check that a source has this column, if its columns are known.

    Raises:
        ConfigError: the column is missing; the message lists the existing ones.
    """
    if isinstance(columns, list | tuple) and column not in columns:
        raise ConfigError(f"there is no column {column!r}: the columns are {', '.join(map(str, columns))}; see column=")


def texts_of(samples: Sequence[Any], column: str, name: Callable[[int], str]) -> list[str]:
    """Return the texts of samples.

    Args:
        samples: strings or mappings.
        column: the text column of a mapping.
        name: returns the name of a sample for messages, given its position in ``samples``.

    Raises:
        ConfigError: a sample of another type.
        DataFileError: a mapping without this column, or whose column does not hold text.
    """
    return [
        sample if isinstance(sample, str) else _text_of(sample, column, name, place)
        for place, sample in enumerate(samples)
    ]


def _text_of(sample: Any, column: str, name: Callable[[int], str], place: int) -> str:
    if not isinstance(sample, Mapping):
        raise ConfigError(f"{name(place)} is {type(sample).__name__}: samples are text, or dicts with a column of text")
    if column not in sample:
        raise DataFileError(
            f"{name(place)} has no column {column!r}: the columns are {', '.join(map(str, sample))}. Leave such "
            "samples out, or see column="
        )
    text = sample[column]
    if not isinstance(text, str):
        raise DataFileError(
            f"{name(place)} has {type(text).__name__} in the column {column!r}, not text: leave such samples out"
        )
    return text
