"""Plan a training run: batches, memory, cache, bottleneck, shuffle quality, start-up and resume.

* `job`: the run, and assumptions about a machine.
* `partition_report`: batches, padding and remainder of the real `Partition`; spot checks at full size.
* `cache`: the reads that a page cache saves, for each shuffle.
* `resources`: memory, the index on disk, start-up and resume.
* `rates`: the samples/s that storage, processors and the hand-over allow.
* `plan`: all of these.
* `token_budget`: batches within a token budget, from the lengths of all samples.
* `packing`: padding and cost of packs, from the lengths of all documents.

All but the last two are pure functions of a few numbers, and measure nothing except the order itself. `penstock plan`
prints the plan.

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
