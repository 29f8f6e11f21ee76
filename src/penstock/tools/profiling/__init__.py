"""Measure the throughput of a loader's pipeline on this machine: the tool behind ``penstock profile``.

from penstock.tools.profiling import profile

found = profile(loader, seconds=20, step=0.1)      # any DataLoader of torch or Penstock; it is not changed
found.verdict.limit, found.verdict.setting         # "decode", Setting("process", 8)
found.stages[0].ceiling(found.cores)               # samples/s of one stage on all cores
Path("report.html").write_text(report(found))

alone, the first time   one thread, files dropped from the page cache
alone, again            the same samples                                -> seconds by stage, share of waiting
together                executors x workers, cached samples             -> samples/s of each setting
together, new samples   the best setting
rehearsal               the best setting beside a training step         -> waiting
"""

from __future__ import annotations

from penstock.tools.profiling.measure import profile
from penstock.tools.profiling.report import report
from penstock.tools.profiling.result import Moment, Profile, Rehearsal, Setting, Stage, Trial, Verdict

__all__ = ["Moment", "Profile", "Rehearsal", "Setting", "Stage", "Trial", "Verdict", "profile", "report"]
