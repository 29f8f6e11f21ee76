"""Pipes between the consumer and its workers: frames arrive whole, whatever the pipe makes of them."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.executors.process.channel import Frame, Inbox, Outbox, frame, write


class Pipe:
    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        os.set_blocking(self.out, False)
        self.inbox = Inbox(self.out)

    def close(self) -> None:
        for fd in (self.out, self.into):
            if fd >= 0:
                os.close(fd)
        self.out = self.into = -1

    def hang_up(self) -> None:
        os.close(self.into)
        self.into = -1

    def collect(self) -> list[tuple[bytes, list[bytes]]]:
        """All frames until the other end is closed."""
        frames = []
        while not self.inbox.ended:
            assert select.select([self.out], [], [], 20)[0]
            frames += self.inbox.receive()
        return [plain(one) for one in frames]


@pytest.fixture(name="pipe")
def _pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def plain(one: Frame) -> tuple[bytes, list[bytes]]:
    return one.message, [bytes(buffer) for buffer in one.buffers]


def raw(message: bytes, buffers: list[bytes]) -> bytes:
    return frame(message, [len(buffer) for buffer in buffers]) + b"".join(buffers)


FRAMES = [
    (b"", []),
    (b"a", []),
    (b"", [b"b"]),
    (b"one", [b"", b"xy", b""]),
    (b"", [b"", b""]),
    (b"m" * 40, [b"12345678", b"z"]),
]


@pytest.mark.parametrize("size", range(1, 90))
def test_frames_split_at_every_byte(pipe: Pipe, size: int) -> None:
    data = b"".join(raw(*one) for one in FRAMES)
    got = []
    for begin in range(0, len(data), size):
        os.write(pipe.into, data[begin : begin + size])
        got += pipe.inbox.receive()
    assert [plain(one) for one in got] == FRAMES
    assert not pipe.inbox.ended
    pipe.hang_up()
    assert pipe.inbox.receive() == []
    assert pipe.inbox.ended


def test_each_frame_comes_as_soon_as_it_is_whole(pipe: Pipe) -> None:
    for one in FRAMES:
        data = raw(*one)
        for byte in data[:-1]:
            os.write(pipe.into, bytes([byte]))
            assert pipe.inbox.receive() == []
        os.write(pipe.into, data[-1:])
        assert [plain(got) for got in pipe.inbox.receive()] == [one]


def test_many_frames_in_one_read(pipe: Pipe) -> None:
    frames = [(str(number).encode(), [bytes([number])] * (number % 3)) for number in range(200)]
    os.write(pipe.into, b"".join(raw(*one) for one in frames))
    assert [plain(one) for one in pipe.inbox.receive()] == frames
    assert pipe.inbox.receive() == []


@pytest.mark.parametrize("last", [0, 1, 100, 1 << 16])
def test_all_that_a_writer_sent_before_it_died_comes_at_once(pipe: Pipe, last: int) -> None:
    """Of a worker that died, nobody asks a second time."""
    os.write(pipe.into, raw(b"first", [b"x" * 100])[:-1])
    assert pipe.inbox.receive() == []  # waits in the middle of a buffer
    rest = b"x" + raw(b"second", []) + raw(b"third", [b"y" * 1000])
    os.write(pipe.into, rest)
    data = raw(b"z" * last, [])
    sent = os.write(pipe.into, data[: (1 << 16) - len(rest)])
    pipe.hang_up()
    whole = sent == len(data)
    assert [one.message for one in pipe.inbox.receive()] == [b"first", b"second", b"third"] + [b"z" * last] * whole


@pytest.mark.parametrize("length", [(1 << 16) - 12, (1 << 17) - 12, (1 << 16) - 13, 1 << 16])
def test_messages_around_the_size_of_a_read(pipe: Pipe, length: int) -> None:
    thread = threading.Thread(target=lambda: (write(pipe.into, b"m" * length), write(pipe.into, b"n"), pipe.hang_up()))
    thread.start()
    assert pipe.collect() == [(b"m" * length, []), (b"n", [])]
    thread.join()


SIZES = st.one_of(st.integers(0, 40), st.integers(65_500, 65_600), st.integers(0, 300_000))


@given(st.lists(st.tuples(SIZES, st.lists(SIZES, max_size=3)), max_size=6))
def test_buffers_of_all_sizes(sizes: list[tuple[int, list[int]]]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    frames = [(bytes(noise[:length]), [bytes(noise[-count:][:count]) for count in counts]) for length, counts in sizes]
    pipe = Pipe()

    def send() -> None:
        for message, buffers in frames:
            write(pipe.into, message, [memoryview(buffer) for buffer in buffers])
        pipe.hang_up()

    thread = threading.Thread(target=send)
    thread.start()
    assert pipe.collect() == frames
    thread.join()
    pipe.close()


def test_buffers_are_writable_memory_of_their_own(pipe: Pipe) -> None:
    write(pipe.into, b"a", [memoryview(b"xyz")])
    write(pipe.into, b"b", [memoryview(b"xyz")])
    one, other = pipe.inbox.receive()
    one.buffers[0][:] = 0
    assert bytes(other.buffers[0]) == b"xyz"


def test_the_inbox_keeps_no_buffers(pipe: Pipe) -> None:
    import weakref

    write(pipe.into, b"a", [memoryview(b"x" * 1000)])
    received = pipe.inbox.receive()
    alive = weakref.ref(received[0].buffers[0])
    del received
    assert alive() is None


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_writer_that_stops_in_the_middle(pipe: Pipe, cut: int) -> None:
    data = raw(b"message", [b"0123456789", b"abc"])
    os.write(pipe.into, raw(b"before", []) + data[:cut])
    whole = [b"before", b"message"][: 1 + (cut >= len(data))]
    assert [one.message for one in pipe.inbox.receive()] == whole
    assert pipe.inbox.receive() == []  # nobody is kept waiting
    pipe.hang_up()
    assert pipe.inbox.receive() == []  # half a frame is lost
    assert pipe.inbox.ended
    assert pipe.inbox.receive() == []


def test_an_outbox_never_waits(pipe: Pipe) -> None:
    os.set_blocking(pipe.into, False)
    outbox = Outbox(pipe.into)
    messages = [bytes([number]) * 50_000 for number in range(20)]
    for message in messages:
        outbox.send(message)
    assert outbox.waiting
    got = []
    while outbox.waiting:
        got += pipe.inbox.receive()
        outbox.flush()
    got += pipe.inbox.receive()
    assert [one.message for one in got] == messages


def test_an_outbox_whose_reader_is_gone() -> None:
    out, into = os.pipe()
    os.set_blocking(into, False)
    outbox = Outbox(into)
    outbox.send(b"a" * 200_000)
    assert outbox.waiting
    os.close(out)
    outbox.flush()
    assert not outbox.waiting
    outbox.send(b"b")
    assert not outbox.waiting
    with pytest.raises(BrokenPipeError):
        write(into, b"c")
    os.close(into)
