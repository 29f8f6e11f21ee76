"""Random numbers for samplers: functions of a key and a position, and draws from torch's generators.

* `scale` turns 64-bit hashes into numbers below n; `Uniform` is a sequence of such numbers.
* `Draw` is the draw of torch's samplers at the start of an epoch (one seed from the global generator, or the user's
  own generator), in a form that a state can hold.
* `TorchDraws` is the stream of indices that torch's RandomSampler computes from that draw.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import StateError
from penstock.hashing import derive_key, mix_array
from penstock.order.permutation import Indices, normalise
from penstock.plan.cursor import Cursor, State, read_int
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochSampler

__all__ = ["Draw", "DrawingSampler", "TorchDraws", "Uniform", "check_entropy", "decode_generator", "scale"]

_MASK32 = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BLOCK = 1 << 14
"""Draws with replacement computed at once. torch computes 32 at once; the numbers are the same."""


def scale(hashes: npt.NDArray[np.uint64], n: int) -> Indices:
    """Return ``floor(hash * n / 2**64)``, exact for uint64 hashes and 0 < n <= 2**62: int64 below n."""
    low, high = np.uint64(n & 0xFFFFFFFF), np.uint64(n >> 32)
    first = hashes & _MASK32
    second = hashes >> _HALF
    middle = second * low + ((first * low) >> _HALF)  # fits: (2**32 - 1)**2 + 2**32 - 1 < 2**64
    if not high:
        product = middle >> _HALF
    else:
        cross = first * high + (middle & _MASK32)
        product = second * high + (middle >> _HALF) + (cross >> _HALF)
    return cast(Indices, product.astype(np.int64))


class Uniform:
    """``count`` numbers below n, with repetition; each is a function of the key and its position.

    Indexed like an `Order`, but not a bijection. O(1) memory.
    """

    def __init__(self, n: int, count: int, key: int) -> None:
        self.n = n
        self.count = count
        self.key = key

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        drawn = scale(mix_array(self.key, normalise(index, self.count).view(np.uint64)), self.n)
        return int(drawn) if drawn.ndim == 0 else drawn


class Draw:
    """The random draw at the start of one epoch, made at its first use and only once.

    Without a generator, one seed is drawn from torch's global generator, as torch's samplers do. With a generator, the
    generator itself is used, from its state at the start of the epoch.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.given = generator
        self._generator: torch.Generator | None = None
        self._restore: torch.Tensor | None = None
        self.drawn: int | None = None
        self.start: torch.Tensor | None = None
        """State of the generator at the start of the epoch."""
        self._stream: TorchDraws | None = None
        self._values: Indices | None = None
        self._cursor = Cursor()

    @classmethod
    def of(cls, generator: torch.Generator | None, cursor: Cursor) -> Draw:
        """Return the draw of a cursor's epoch: the draw that the cursor holds, or a new one."""
        draw, entropy = cls(generator), cursor.entropy
        draw._cursor = cursor
        if generator is None:
            draw.drawn = entropy.get("drawn")
        elif entropy and (entropy["begun"] or generator is torch.default_generator):
            draw._restore = decode_generator(entropy["generator"])
        return draw

    def fits(self, cursor: Cursor, seed: int | None) -> bool:
        """Return whether this draw is the draw of an epoch that begins at a cursor.

        Without a seed the number of the epoch does not matter.
        """
        return self._cursor.entropy == cursor.entropy and (seed is None or self._cursor.epoch == cursor.epoch)

    @property
    def shared(self) -> bool:
        """Whether the generator is the user's, so that others see its state."""
        return self.given is not None

    def begin(self) -> torch.Generator:
        """Return the generator to draw from. The first call sets it to its state at the start of the epoch."""
        if self._generator is None:
            if self.given is None:
                self._generator = torch.Generator()
                self._generator.manual_seed(self._seed())
            elif self._elsewhere:
                # The global generator belongs to the caller: its state must not change.
                self._generator = torch.Generator()
                self._generator.set_state(cast(torch.Tensor, self._restore))
            else:
                self._generator = self.given
                if self._restore is not None:
                    self._generator.set_state(self._restore)
            self.start = self._generator.get_state()
        return self._generator

    @property
    def _elsewhere(self) -> bool:
        """Whether this epoch began at a state of torch's global generator that is not its current state."""
        if self._restore is None or self.given is not torch.default_generator:
            return False
        return not torch.equal(self.given.get_state(), self._restore)

    def values(self, make: Callable[[torch.Generator], torch.Tensor]) -> Indices:
        """Return the result of ``make``, which draws the whole epoch from the generator at the first call."""
        if self._values is None:
            self._values = cast(Indices, make(self.begin()).numpy())
        return self._values

    def key(self) -> int:
        """Return one 64-bit number for the whole epoch."""
        if self.given is None:
            return self._seed()
        if self.drawn is None:
            self.drawn = _random(self.begin())
        return self.drawn

    def stream(self, n: int, count: int, replacement: bool) -> TorchDraws:
        """Return the indices of the epoch. All calls return the same stream."""
        if self._stream is None or self._stream.shape != (n, count, replacement):
            self._stream = TorchDraws(self, n, count, replacement)
        return self._stream

    def state(self) -> State:
        """Return the entries of a state with which another process begins the same epoch."""
        if self.given is None:
            return {"drawn": self._seed()}
        begun = self._restore if self.start is None else self.start
        now = self.given.get_state() if begun is None else begun
        return {"generator": base64.b64encode(now.numpy().tobytes()).decode(), "begun": begun is not None}

    def _seed(self) -> int:
        if self.drawn is None:
            self.drawn = _random(None)
        return self.drawn


class DrawingSampler(EpochSampler):
    """Base of the samplers that begin an epoch with a `Draw`, which is made once even if a state is taken first.

    Attributes:
        generator: the user's generator, which Accelerate assigns after construction; None draws from torch's global
            one.
        at_once: whether the whole epoch is drawn from the global generator. Otherwise it gives one seed.
    """

    generator: torch.Generator | None
    at_once: ClassVar[bool] = False

    def _draw(self, cursor: Cursor, draws: Draws) -> Draw:
        """Return the draw of one epoch: the one that was made, if it is still of this epoch, else a new one."""
        held, seed, at_once = draws.held, draws.seed, self.at_once
        seeded = seed is not None and self.generator is None
        generator = torch.default_generator if self.generator is None and at_once else self.generator
        if isinstance(held, Draw) and (
            draws.fixed or (held.fits(cursor, seed) and (held.given is generator or (seeded and at_once)))
        ):
            return held
        if seed is None or not seeded:
            draw = Draw.of(generator, cursor)
        elif at_once:
            draw = Draw.of(torch.Generator().manual_seed(derive_key(seed, cursor.epoch, "draw") >> 1), cursor)
        else:
            draw = Draw.of(None, cursor)
            draw.drawn = derive_key(seed, cursor.epoch, "draw") >> 1 if draw.drawn is None else draw.drawn
        draws.held = draw
        return draw

    def chosen(self, cursor: Cursor) -> None:
        """Restore the state of the user's generator, if the cursor was taken before its epoch began.

        Other users of this generator draw from it before the epoch begins, as they did in the first run.
        """
        if self.generator is not None and cursor.entropy.get("begun") is False:
            self.generator.set_state(decode_generator(cursor.entropy["generator"]))

    def _check_draw(self, cursor: Cursor) -> Cursor:
        """Return the cursor if its entropy matches how this sampler draws; else raise a StateError."""
        drawn_at_once = self.generator is not None or self.at_once
        check_entropy(cursor.entropy, of=type(self.source).__name__, generator=drawn_at_once)
        return cursor


def check_entropy(entropy: State, *, of: str, generator: bool) -> None:
    """Raise a StateError if a cursor's entropy is damaged, or was drawn in another way.

    Args:
        entropy: of the cursor.
        of: name of the sampler, for the message.
        generator: whether the sampler draws from a generator that it was given, not from torch's global one.
    """
    if not generator:
        if type(entropy.get("drawn")) is not int:
            raise StateError(
                f"this state does not belong to this {of}: it holds no drawn seed, so it was taken with a "
                "generator; pass generator= as in that run"
            )
        read_int(entropy, "drawn", of=of, below=1 << 63)
    elif not isinstance(entropy.get("begun"), bool):
        raise StateError(
            f"this state does not belong to this {of}: it holds no generator's state, so it was taken without a "
            "generator; leave generator= out as in that run"
        )
    else:
        decode_generator(entropy.get("generator"))


class TorchDraws:
    """The indices of torch's RandomSampler, one permutation (or block of draws with replacement) in memory at a time.

    It is meant to be read forward, then exhausted. Reading an earlier block draws the stream again from its start, from
    a copy of the generator. The generator itself moves only forward, with the furthest block that was read: one
    permutation or one block of draws at a time.
    """

    def __init__(self, draw: Draw, n: int, count: int, replacement: bool) -> None:
        self._draw = draw
        self.shape = n, count, replacement
        self._n = n
        self._count = count
        self._replacement = replacement
        self._size = _BLOCK if replacement else n
        # torch always draws one more permutation for the rest of the samples, even if no sample is left.
        self._blocks = -(-count // _BLOCK) if replacement else count // n + 1
        # The last block that was drawn from the generator, and the block in memory.
        self._front = -1
        self._held = -1
        self._values: Indices = np.empty(0, dtype=np.int64)
        # For earlier blocks: a copy of the generator, and the last block drawn from it.
        self._again: tuple[torch.Generator, int] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        positions = normalise(index, self._count)
        flat = positions.reshape(-1)
        numbers = flat // self._size
        for number in np.unique(numbers).tolist():
            here = numbers == number
            flat[here] = self._block(number)[flat[here] - number * self._size]
        return int(positions) if positions.ndim == 0 else positions

    def exhaust(self) -> None:
        """Draw to the end, so that the generator has the state in which torch would leave it."""
        generator = self._draw.begin()
        while self._draw.shared and self._front < self._blocks - 1:
            self._front += 1
            self._make(generator, self._front)

    def _block(self, number: int) -> Indices:
        if number != self._held:
            generator = self._draw.begin()
            if number <= self._front:
                self._values = self._reread(number)
            while self._front < number:
                self._front += 1
                self._values = self._make(generator, self._front)
            self._held = number
        return self._values

    def _reread(self, number: int) -> Indices:
        if self._again is None or self._again[1] >= number:
            generator = torch.Generator()
            generator.set_state(cast(torch.Tensor, self._draw.start))
            self._again = generator, -1
        generator, at = self._again
        for earlier in range(at + 1, number):
            self._make(generator, earlier)
        self._again = generator, number
        return self._make(generator, number)

    def _make(self, generator: torch.Generator, number: int) -> Indices:
        if not self._replacement:
            values = torch.randperm(self._n, generator=generator)
        else:
            size = min(_BLOCK, self._count - number * _BLOCK)
            values = torch.randint(self._n, (size,), dtype=torch.int64, generator=generator)
        return cast(Indices, values.numpy())


def decode_generator(text: Any) -> torch.Tensor:
    """Return the state of a torch.Generator from its text in a state.

    Raises:
        StateError: the text is not the state of a generator.
    """
    try:
        state = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (TypeError, ValueError, RuntimeError, binascii.Error) as error:
        raise StateError(f"the state of the generator in this state cannot be read: {error}") from error
    return state


def _random(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
