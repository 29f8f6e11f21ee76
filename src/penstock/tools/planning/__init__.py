"""Plan a run before it is paid for: batches, memory, cache, what limits it, how well it mixes, how soon it resumes.

* `job`: what is planned, and what is assumed of a machine.
* `dealing`: batches, padding and remainder, by the real `Partition` and order; spot checks of them at full size.
* `cache`: how many reads a page cache saves, for each shuffle.
* `resources`: memory, the index on disk, start-up and resume.
* `rates`: what storage, processors and the hand-over allow, and which of them limits.
* `plan`: all of it.
* `token_batches`: batches within a budget of tokens, from the lengths of all samples.
* `packing`: what packs of documents waste and cost, from the lengths of all documents.

Everything but the last two is a pure function of a few numbers; nothing is measured but the order itself. `penstock
plan` prints it.

>>> plan = make_plan(Job(samples=1_281_167, sample_bytes=110_000, ranks=16, batch_size=256, step_s=0.2))
>>> plan.dealing.batches, plan.dealing.padded, plan.memory.index_bytes
(313, 1, 10249472)
"""

from __future__ import annotations

from penstock.tools.planning.cache import hit_rates
from penstock.tools.planning.job import Assumptions, Job
from penstock.tools.planning.packing import Packing, PackingPlan, packing_plan
from penstock.tools.planning.partition_report import Check, Dealing, check_dealing, deal
from penstock.tools.planning.plan import Plan, make_plan
from penstock.tools.planning.rates import Epoch, Needs, epochs_of, needs_of
from penstock.tools.planning.resources import Memory, StartUp, memory_of, start_up_of
from penstock.tools.planning.token_budget import TokenBatches, token_batches

__all__ = [
    "Assumptions",
    "Check",
    "Dealing",
    "Epoch",
    "Job",
    "Memory",
    "Needs",
    "Packing",
    "PackingPlan",
    "Plan",
    "StartUp",
    "TokenBatches",
    "check_dealing",
    "deal",
    "epochs_of",
    "hit_rates",
    "make_plan",
    "memory_of",
    "needs_of",
    "packing_plan",
    "start_up_of",
    "token_batches",
]
