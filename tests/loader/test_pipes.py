"""Pipes between the consumer and its workers: messages arrive whole, whatever the pipe makes of them."""

from __future__ import annotations

import os
import pickle
import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.executors.process.transport import Channel


class Pipe:
    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        os.set_blocking(self.out, False)
        self.inbox = Channel(self.out, -1)

    def close(self) -> None:
        for fd in (self.out, self.into):
            if fd >= 0:
                os.close(fd)
        self.out = self.into = -1

    def hang_up(self) -> None:
        os.close(self.into)
        self.into = -1

    def collect(self) -> list[Any]:
        """All messages until the other end is closed."""
        messages = []
        while not self.inbox.ended:
            assert select.select([self.out], [], [], 20)[0]
            messages += self.inbox.receive()
        return messages


@pytest.fixture(name="pipe")
def _pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def raw(message: Any) -> bytes:
    """A message as bytes in a pipe."""
    data = pickle.dumps(message, 5)
    return len(data).to_bytes(8, "little") + data


MESSAGES = [None, b"a", [], [(1, 2, b"one")], b"m" * 40]


@pytest.mark.parametrize("size", [*range(1, 30), 50, 89])
def test_messages_split_at_every_byte(pipe: Pipe, size: int) -> None:
    data = b"".join(map(raw, MESSAGES))
    got = []
    for begin in range(0, len(data), size):
        os.write(pipe.into, data[begin : begin + size])
        got += pipe.inbox.receive()
    assert got == MESSAGES
    assert not pipe.inbox.ended
    pipe.hang_up()
    assert pipe.inbox.receive() == []
    assert pipe.inbox.ended


def test_many_messages_in_one_read(pipe: Pipe) -> None:
    os.write(pipe.into, b"".join(map(raw, range(200))))
    assert pipe.inbox.receive() == list(range(200))
    assert not pipe.inbox.empty
    assert pipe.inbox.receive() == []
    assert pipe.inbox.empty


SIZES = st.one_of(st.integers(0, 40), st.integers(65_500, 65_600), st.integers(262_100, 262_200))


@given(st.lists(SIZES, max_size=6))
def test_messages_of_all_sizes(sizes: list[int]) -> None:
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    pipe = Pipe()

    def send() -> None:
        for message in messages:
            Channel(-1, pipe.into).send(pickle.dumps(message, 5))
        pipe.hang_up()

    thread = threading.Thread(target=send)
    thread.start()
    assert pipe.collect() == messages
    thread.join()
    pipe.close()


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_writer_that_stops_within_a_message(pipe: Pipe, cut: int) -> None:
    data = raw(b"message")
    os.write(pipe.into, raw(b"before") + data[:cut])
    assert pipe.inbox.receive() == [b"before", b"message"][: 1 + (cut >= len(data))]
    assert pipe.inbox.receive() == []
    pipe.hang_up()
    assert pipe.inbox.receive() == []
    assert pipe.inbox.ended
    assert pipe.inbox.receive() == []


def test_an_outbox_never_waits(pipe: Pipe) -> None:
    os.set_blocking(pipe.into, False)
    outbox = Channel(-1, pipe.into)
    messages = [bytes([number]) * 50_000 for number in range(20)]
    for message in messages:
        outbox.send(pickle.dumps(message, 5))
    assert outbox.waiting
    got = []
    while outbox.waiting:
        got += pipe.inbox.receive()
        outbox.send()
    assert got + pipe.inbox.receive() == messages


def test_a_closed_outbox_writes_nothing(pipe: Pipe) -> None:
    """The number of its pipe may be another file's."""
    outbox = Channel(-1, pipe.into)
    outbox.closed = True
    outbox.send(pickle.dumps("next", 5))
    assert pipe.inbox.receive() == []


def test_an_outbox_whose_reader_is_gone() -> None:
    out, into = os.pipe()
    os.set_blocking(into, False)
    outbox = Channel(-1, into)
    outbox.send(b"a" * 200_000)
    assert outbox.waiting
    os.close(out)
    outbox.send()
    assert not outbox.waiting
    assert outbox.closed
    outbox.send(b"b")
    assert not outbox.waiting
    os.close(into)
