"""What a loader's pipeline can do on this machine: the measurement behind ``penstock profile``.

from penstock.tools.profiling import profile

found = profile(loader, seconds=20, step=0.1)      # any torch DataLoader, ours or not; it stays as it is
found.verdict.limit, found.verdict.setting         # "decode", Setting("process", 8)
found.stages[0].ceiling(found.cores)               # samples/s of one stage on all cores
Path("report.html").write_text(report(found))

alone, the first time   one thread, files dropped from the page cache
alone, once more        the same samples                                -> seconds by stage, share of waiting
together                executors x workers, samples read before        -> samples/s of each setting
together, new samples   the best of them
rehearsal               the best of them beside a training step         -> waiting
"""

from __future__ import annotations

from penstock.tools.profiling.measure import profile
from penstock.tools.profiling.report import report
from penstock.tools.profiling.result import Moment, Profile, Rehearsal, Setting, Stage, Trial, Verdict

__all__ = ["Moment", "Profile", "Rehearsal", "Setting", "Stage", "Trial", "Verdict", "profile", "report"]
