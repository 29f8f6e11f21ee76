"""Random numbers for samplers: functions of a key and a position, and draws from torch's generators.

* `Hashed` is a sequence of numbers from 64-bit hashes; `scale` turns these into numbers below n.
* `Rounds` is a sequence of indices that is made in blocks.
* `Draw` has torch's rules: how its samplers draw the indices of an epoch from one seed of the global generator, or from
  a generator, in a form that a state can hold. Samplers that follow these rules are a `DrawingSampler`.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import StateError
from penstock.hashing import derive_key, mix_array
from penstock.order import Partition
from penstock.order.permutation import Indices
from penstock.plan.cursor import Cursor, State, read_int
from penstock.plan.epoch import EpochOrder, PartitionedOrder
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochSampler

__all__ = ["Draw", "DrawingSampler", "Hashed", "Rounds", "scale"]

_MASK32 = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Block = Callable[[torch.Generator, int], torch.Tensor]


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


class Hashed:
    """Numbers with repetition, each a function of a key and its position. O(1) memory.

    ``number`` returns the numbers for an array of hashes.
    """

    def __init__(self, key: int, number: Callable[[npt.NDArray[np.uint64]], Indices]) -> None:
        self._key, self._number = key, number

    def __getitem__(self, positions: Indices) -> Indices:
        return self._number(mix_array(self._key, positions.view(np.uint64)))


class Rounds:
    """Indices in blocks of one size, with one block in memory.

    Args:
        size: indices of a block; the last block may have fewer.
        make: returns the block with a number.
    """

    def __init__(self, size: int, make: Callable[[int], EpochOrder]) -> None:
        self._size, self._make = size, make
        self._held: tuple[int, EpochOrder] = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, positions: Indices) -> Indices:
        numbers, within = np.divmod(positions, self._size)
        # Positions usually ascend, so that each block is one slice.
        begins = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for begin, end in itertools.pairwise([*begins, len(within)]):
            within[begin:end] = self.block(int(numbers[begin]))[within[begin:end]]
        return cast(Indices, within)

    def block(self, number: int) -> EpochOrder:
        """Return a block, which is kept until another one is needed."""
        if number != self._held[0]:
            self._held = number, self._make(number)
        return self._held[1]


class Draw:
    """The random draw of one epoch, made at its first use and only once.

    Without a generator it is one seed from torch's global generator, as in torch's samplers. With a generator, the
    generator itself is used, from its state at the start of the epoch: it moves only forward, with the furthest block
    that was read. An earlier block is drawn again from a copy.

    Args:
        of: what draws of the same epoch have in common, see `DrawingSampler`.
        generator: the user's, or torch's global one if the whole epoch is drawn from it.
        entropy: of a cursor: the draw to repeat; empty for a new one.
        drawn: the seed, if it is not drawn.
    """

    def __init__(self, of: object, generator: torch.Generator | None, entropy: State, drawn: int | None = None) -> None:
        self.of, self._given = of, generator
        self._drawn: int | None = entropy.get("drawn", drawn)
        # State of the generator at the start of the epoch, if that has begun.
        self._start: torch.Tensor | None = None
        if generator is not None and entropy and (entropy["begun"] or generator is torch.default_generator):
            self._start = _decode_generator(entropy["generator"])
        self._generator: torch.Generator | None = None
        # Number of the last block that moved the generator.
        self._front = -1
        # For earlier blocks: a copy of the generator, and the number of the last block drawn from it.
        self._again: tuple[Block, torch.Generator, int] | None = None
        self._order: tuple[Any, Rounds, Callable[[], None]] | None = None

    def key(self) -> int:
        """Return one 64-bit number for the whole epoch."""
        if self._drawn is None:
            generator = None if self._given is None else self._begin()
            self._drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        return self._drawn

    def order(self, size: int, count: int, last: int, block: Block) -> tuple[Rounds, Callable[[], None]]:
        """Return the indices of the epoch, and a function that draws them to the end.

        All calls with the same numbers return the same indices, once one of them was read. Until then the data of the
        last call count.

        Args:
            size: indices of a block, see `Rounds`.
            count: number of indices.
            last: number of the last block that torch draws, perhaps one of which no index is read.
            block: draws the block with a number from a generator. Blocks are drawn one after another.
        """
        numbers = size, count, last
        if self._order is None or self._front < 0 or self._order[0] != numbers:
            rounds = Rounds(size, partial(self._read, block))
            self._order = numbers, rounds, partial(self._exhaust, block, last)
        return self._order[1:]

    def _exhaust(self, block: Block, last: int) -> None:
        """Draw blocks to the end, so that the generator has the state in which torch would leave it."""
        if self._given is None:
            self.key()
        elif self._front < last:
            self._read(block, last)

    def state(self) -> State:
        """Return the entries of a state with which another process begins the same epoch."""
        if self._given is None:
            return {"drawn": self.key()}
        state = self._given.get_state() if self._start is None else self._start
        return {"generator": base64.b64encode(state.numpy().tobytes()).decode(), "begun": self._start is not None}

    def _begin(self) -> torch.Generator:
        """Return the generator to draw from. The first call sets it to its state at the start of the epoch."""
        if self._generator is None:
            generator = self._given
            if generator is None:
                generator = torch.Generator().manual_seed(self.key())
            elif self._start is not None:
                if generator is torch.default_generator and not torch.equal(generator.get_state(), self._start):
                    # The global generator belongs to the caller: its state must not change.
                    generator = torch.Generator()
                generator.set_state(self._start)
            self._generator, self._start = generator, generator.get_state()
        return self._generator

    def _read(self, block: Block, number: int) -> Indices:
        """Return the block with a number, and draw those before it."""
        generator, at = self._begin(), self._front
        ahead = number > at
        if not ahead:
            if self._again is None or self._again[0] is not block or self._again[2] >= number:
                self._again = block, torch.Generator(), -1
                self._again[1].set_state(cast(torch.Tensor, self._start))
            _, generator, at = self._again
        while at < number:
            at += 1
            values = block(generator, at)
        if ahead:
            self._front = number
        else:
            self._again = block, generator, number
        return cast(Indices, values.numpy())


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
        generator, seed, entropy = self.generator, draws.seed, cursor.entropy
        # Without a seed the number of the epoch does not matter.
        of = generator, entropy, None if seed is None else cursor.epoch
        held = draws.held
        if isinstance(held, Draw) and (draws.fixed or held.of == of):
            return held
        drawn = None if seed is None or generator is not None else derive_key(seed, cursor.epoch, "draw") >> 1
        if generator is None and self.at_once:
            generator = torch.default_generator if drawn is None else torch.Generator().manual_seed(drawn)
        draws.held = draw = Draw(of, generator, entropy, drawn)
        return draw

    def _drawn(
        self,
        cursor: Cursor,
        draws: Draws,
        identity: Callable[[], State],
        *,
        size: int,
        count: int,
        last: int,
        block: Block,
        rounds: int | None = None,
    ) -> PartitionedOrder:
        """Return the rest of an epoch that torch draws in blocks, see `Draw.order` and `PartitionedOrder`."""
        draw = self._draw(cursor, draws)
        order, exhaust = draw.order(size, count, last, block)

        def entropy() -> State:
            # Other code may draw from the global generator in between, so taking a state fixes the draw of the epoch.
            if self.at_once and self.generator is None:
                order.block(0)
            return draw.state()

        return PartitionedOrder(
            lambda: order if count > size else order.block(0),
            Partition(count, remainder="uneven", consumed=cursor.consumed),
            identity,
            seed=None,
            epoch=cursor.epoch,
            rounds=rounds,
            entropy=entropy,
            at_end=exhaust,
        )

    def chosen(self, cursor: Cursor) -> None:
        """Restore the state of the user's generator, if the cursor was taken before its epoch began.

        Other users of this generator draw from it before the epoch begins, as they did in the first run.
        """
        if self.generator is not None and cursor.entropy.get("begun") is False:
            self.generator.set_state(_decode_generator(cursor.entropy["generator"]))

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state. Its entropy must match how this sampler draws."""
        of, draws = type(self.source).__name__, Draws()
        run = self.bind(Cursor(), draws)
        assert isinstance(run, PartitionedOrder)
        cursor = Cursor.read(state, of=of, plan=run.identity(), most=run.partition.n)
        entropy = cursor.entropy
        if draws.held is None:
            pass  # a function of seed and epoch
        elif self.generator is None and not self.at_once:
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
            _decode_generator(entropy.get("generator"))
        return cursor


def _decode_generator(text: Any) -> torch.Tensor:
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
