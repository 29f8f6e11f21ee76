"""`TextTokenizer`: encode text to token ids with any tokenizer; picklable. And the texts of samples.

    tokenizer = TextTokenizer("tokenizer.json", append_eos="<|endoftext|>")
    tokenizer.encode(["a text", "another"])             a list of int64 arrays, one per text

The ids of a text depend only on the text, never on its batch. A pickle holds the tokenizer's JSON, so it
works where the file does not exist. It sets no environment variable and changes no object of the caller.

Rust threads: `tokenizers` encodes a batch in its own threads, which do not survive a fork: a forked process that uses
them hangs. So only processes that were started as programs use them. Worker processes encode one text at a time,
without these threads; there, the workers provide the parallelism.

Batches are a quarter faster than single texts, since `tokenizers` can omit offsets for them. If the environment
variable ``TOKENIZERS_PARALLELISM`` disables threads, worker processes encode batches, too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataFileError, DataFileIOError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["COLUMN", "NO_THREADS", "IdsOf", "TextTokenizer", "check_column", "has_rust_threads", "texts_of"]

COLUMN = "text"
"""The default text column."""

IdsOf = Callable[[str], Sequence[int]]
"""A user's function from text to ids."""

NO_THREADS = "TOKENIZERS_PARALLELISM"

_STARTED = os.getpid()


def has_rust_threads() -> bool:
    """Return whether this process may use the threads of `tokenizers`: it is neither forked nor a worker."""
    if os.getpid() != _STARTED or multiprocessing.parent_process() is not None:
        return False
    torch = sys.modules.get("torch.utils.data")  # a worker on a Ray cluster is started as a program, too
    is_main = threading.current_thread() is threading.main_thread()
    return torch is None or not is_main or torch.get_worker_info() is None


class TextTokenizer:
    """Encodes texts. See `penstock.TokenizedDataset` for the arguments.

    Raises:
        ConfigError: not a tokenizer; a tokenizer without a JSON form; an unknown end token; too small a ``max_length``.
        DataFileIOError, DataFileError: a ``tokenizer.json`` that cannot be read, or is invalid.

    Memory: one copy of the vocabulary in each process that encodes.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        append_eos: int | str | None = None,
    ) -> None:
        if isinstance(tokenizer, TextTokenizer):
            raise ConfigError("tokenizer= is a TextTokenizer already: give what it was made of")
        if max_length is not None and max_length < 1 + (append_eos is not None):
            raise ConfigError(f"max_length={max_length} leaves no room for a token of the text")
        self.add_special_tokens = add_special_tokens
        self.max_length = max_length
        self._json: str | None = None
        self._function: IdsOf | None = None
        module = sys.modules.get("tokenizers")
        # The fast tokenizers of transformers are wrappers.
        found = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if isinstance(tokenizer, str | os.PathLike):
            found, module = _from_file(Path(tokenizer)), _tokenizers()
        if module is not None and isinstance(found, module.Tokenizer):
            try:
                self._json = str(found.to_str())
            except Exception as error:
                raise ConfigError(
                    f"this tokenizer cannot be written as JSON, so it cannot go to workers: {error}. Give a function "
                    "from text to ids instead"
                ) from error
        elif callable(tokenizer):
            if not add_special_tokens:
                raise ConfigError("add_special_tokens=False is for tokenizers; a function decides by itself")
            self._function = tokenizer
        else:
            raise ConfigError(
                "tokenizer= takes the path of a tokenizer.json, a tokenizers.Tokenizer, a tokenizer of transformers, "
                f"or a function from text to ids, got {tokenizer!r}"
            )
        self._rust: Tokenizer | None = None
        self.end = self._end(append_eos)
        """The token appended to each text, or None."""

    # Properties.

    @property
    def is_pure(self) -> bool:
        """Whether the ids of a text are deterministic."""
        if self._json is None:
            return bool(getattr(self._function, "pure", False))
        return not json.loads(self._json)["model"].get("dropout")

    @property
    def fingerprint(self) -> str | None:
        """The identity of the tokenizer and its options; None for a function."""
        if self._json is None:
            return None
        options = f"{self.add_special_tokens} {self.max_length} {self.end}"
        return xxhash.xxh3_128_hexdigest(f"{options}\n{self._json}".encode())

    @property
    def largest(self) -> int | None:
        """The largest possible id; None for a function."""
        if self._json is None:
            return None
        return max([0, *self._tokenizer().get_vocab(with_added_tokens=True).values(), self.end or 0])

    def __repr__(self) -> str:
        return f"<TextTokenizer: {'a function' if self._json is None else f'{self.largest or 0:,} is its largest id'}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rust": None}

    # Encoding.

    def encode(
        self, texts: Sequence[str], *, threads: bool | None = None, name: Callable[[int], str] = "text {}".format
    ) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each text, int64 of shape (tokens,), with the end token last, if set.

        Args:
            texts: a batch.
            threads: use the threads of `tokenizers`; by default if `has_rust_threads`.
            name: returns the name of a text for messages, given its position in the batch.

        Raises:
            DataFileError: a function returned something other than ids; a text has a lone surrogate.
        """
        if self._function is not None:
            return [self._finished(_checked(self._function(text))) for text in texts]
        tokenizer, special = self._tokenizer(), self.add_special_tokens
        # `tokenizers` reads the variable at each batch.
        without_threads = os.environ.get(NO_THREADS, "true").lower() in ("", "off", "false", "f", "no", "n", "0")
        try:
            if without_threads or (len(texts) > 1 and (has_rust_threads() if threads is None else threads)):
                found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            else:
                found = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
        except TypeError:
            for place, text in enumerate(texts):
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise DataFileError(
                        f"{name(place)} is not valid Unicode: character {error.start} of its text is the lone "
                        f"surrogate {text[error.start]!r}. Repair it, or leave such samples out"
                    ) from None
            raise
        return [self._finished(np.array(encoding.ids, np.int64)) for encoding in found]

    def _finished(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Truncate the ids, and append the end token."""
        if self.max_length is not None:
            ids = ids[: self.max_length - (self.end is not None)]
        return ids if self.end is None else np.append(ids, self.end)

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer, built at the first call in each process."""
        if self._rust is None:
            assert self._json is not None
            made = _tokenizers().Tokenizer.from_str(self._json)
            # Ignore the file's settings: with padding, a text's ids would depend on the rest of its batch.
            made.no_padding()
            made.no_truncation()
            if self.max_length is not None:
                made.enable_truncation(self.max_length - (self.end is not None))
            self._rust = made
        return self._rust

    def _end(self, token: int | str | None) -> int | None:
        if not isinstance(token, str):
            if isinstance(token, bool) or (token is not None and token < 0):
                raise ConfigError(f"append_eos= takes an id or a token, got {token!r}")
            return token
        if self._json is None:
            raise ConfigError(f"append_eos={token!r}: a function has no tokens by name, give the id")
        found = _tokenizers().Tokenizer.from_str(self._json).token_to_id(token)
        if found is None:
            raise ConfigError(f"append_eos={token!r} is no token of this tokenizer: give its id, or another one")
        return int(found)


def _from_file(path: Path) -> Tokenizer:
    if path.is_dir():
        path = path / "tokenizer.json"
    module = _tokenizers()
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise DataFileIOError(f"cannot read {path}: {error.strerror}; a tokenizer is a file tokenizer.json") from error
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path} is not the tokenizer.json of a tokenizer: {error}") from error
    try:
        found: Tokenizer = module.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise DataFileError(f"{path} is not the tokenizer.json of a tokenizer: {error}") from error
    return found


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError("a tokenizer.json needs the package tokenizers: pip install 'penstock[text]'") from error
    return tokenizers


def _checked(ids: Any) -> npt.NDArray[np.int64]:
    found = np.asarray(ids)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise DataFileError(
            f"the tokenizer gave {type(ids).__name__} of {found.dtype}, shape {found.shape}: ids are integers in a row"
        )
    return found.astype(np.int64)


def check_column(columns: Any, column: str) -> None:
    """Raise ConfigError, which lists the columns of a source, if they are known and this one is missing."""
    if isinstance(columns, list | tuple) and column not in columns:
        raise ConfigError(f"there is no column {column!r}: the columns are {', '.join(map(str, columns))}; see column=")


def texts_of(samples: Sequence[Any], column: str, name: Callable[[int], str]) -> list[str]:
    """Return the texts of samples: strings, or mappings with a text ``column``.

    ``name`` returns the name of a sample for messages, given its position in ``samples``.
    """
    texts = []
    for place, sample in enumerate(samples):
        text = sample
        if not isinstance(sample, str):
            if not isinstance(sample, Mapping):
                kind = type(sample).__name__
                raise ConfigError(f"{name(place)} is {kind}: samples are text, or dicts with a column of text")
            if column not in sample:
                raise DataFileError(
                    f"{name(place)} has no column {column!r}: the columns are {', '.join(map(str, sample))}. Leave "
                    "such samples out, or see column="
                )
            text = sample[column]
            if not isinstance(text, str):
                raise DataFileError(
                    f"{name(place)} has {type(text).__name__} in the column {column!r}, not text: leave such samples "
                    "out"
                )
        texts.append(text)
    return texts
