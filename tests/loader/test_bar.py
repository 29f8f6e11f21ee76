"""The progress bar of a pass."""

from __future__ import annotations

import os
import pty

import pytest
from interpreter_support import Popen

from penstock.loader.bar import Bar
from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.statistics import Statistics


def pass_over(batches: int, total: int | None, done: int = 0) -> Statistics:
    """A pass with a bar."""
    statistics = Statistics()
    statistics.begin(LoaderConfig())
    bar = Bar(statistics, total, done)
    for number in range(batches):
        statistics.delivered(BatchResult(None, BatchMetrics(), number), 1, 0.01, 0, 0)
        bar.update()
    bar.close()
    bar.close()
    return statistics


def test_bar_writes_one_line_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    pass_over(5, 20, done=10)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "15/20" in err
    assert "waiting" in err
    pass_over(5, None)
    assert "5/?" in capsys.readouterr().err


def test_bar_within_a_bar_is_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    outer = Bar(Statistics(), 3)
    pass_over(5, 7)
    assert capsys.readouterr().err == ""
    outer.close()
    assert capsys.readouterr().err == ""  # nothing was had
    pass_over(5, 7)
    assert "5/7" in capsys.readouterr().err


def test_bar_that_is_dropped_leaves_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    statistics = Statistics()
    statistics.begin(LoaderConfig())
    bar = Bar(statistics, 7)
    statistics.delivered(BatchResult(None, BatchMetrics(), 0), 1, 0.01, 0, 0)
    bar.update()
    bar.update()  # too early to be drawn
    del bar
    assert "2/7" in capsys.readouterr().err
    pass_over(5, 7)
    assert "5/7" in capsys.readouterr().err


_PROGRAM = """
import os, sys, time
from penstock.loader.bar import Bar
from penstock.loader.config import LoaderConfig
from penstock.loader.statistics import Statistics
from penstock.loader.messages import BatchMetrics, BatchResult
statistics = Statistics()
statistics.begin(LoaderConfig())
bar = Bar(statistics, 40)
before = sys.stdout, sys.stderr
for number in range(30):
    time.sleep(0.04)
    statistics.delivered(BatchResult(None, BatchMetrics(), number), 1, 0.03, 0, 0)
    bar.update()
    assert (sys.stdout, sys.stderr) == before
    if number == 20 and os.fork() == 0:
        sys.exit()  # a child draws nothing, and does not show the cursor
"""


def test_bar_on_a_terminal_is_drawn_now_and_then_and_gives_the_cursor_back() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    program = Popen(["-c", _PROGRAM], stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # Linux: nobody has the other end any more
            data = b""
        if not data:
            break
        seen += data
    os.close(ours)
    assert program.wait() == 0, seen.decode()
    text = seen.decode()
    assert "/40" in text
    assert 2 <= text.count("waiting") <= 6
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.rstrip().endswith("\x1b[?25h")
