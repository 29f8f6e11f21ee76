"""Digests of version 0.1: orders, batches, generator keys, and what follows a resume.

    python tests/digests/make.py                       say what differs from digests.json
    python tests/digests/make.py --write mixtures      write one group anew

These are the digests of 0.1, made once before the second design, and never made again: what they say is what programs
rely on. The one exception is the group "mixtures", whose order has changed once. A case that differs is a fault of the
code, or a change of a promise that the release notes name. (Seven tails of iterations are of such a change: resumed at
the end of a run, 0.1 went on in another epoch than the run that never stopped.)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "shards"))

from digest_cases import GROUPS, compute

FILE = Path(__file__).with_name("digests.json")


def main(arguments: list[str]) -> int:
    """Compare all groups with the file, or write some of them; the exit code says whether any case differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs="+", choices=GROUPS, default=[], help="groups to write anew")
    writing: list[str] = parser.parse_args(arguments).write
    recorded: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    recorded.setdefault("torch", ".".join(torch.__version__.split(".")[:2]))
    differing = 0
    for group in writing or GROUPS:
        computed, before = compute(group), recorded.get(group, {})
        for name in sorted(computed.keys() | before.keys()):
            if computed.get(name) != before.get(name):
                differing += 1
                print(f"{group}: {name}: {before.get(name)} -> {computed.get(name)}")
        recorded[group] = computed
    if writing:
        FILE.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return int(differing > 0 and not writing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
