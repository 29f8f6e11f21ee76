"""Text into tokens: `penstock tokenize` beside ``encode_batch`` of `tokenizers` alone, and ``map`` of `datasets`.

The text is the source of Python's standard library, in a file of Parquet; the tokenizer one of 8,192 tokens that is
trained on it. ``encode_batch`` has all texts in memory and its own threads on all cores; it reads and writes nothing,
and its ids are not taken out. ``encode_batch_fast`` leaves out where tokens stand in the text, too, as the command
does. The command reads, tokenizes and writes, by as many processes, and so does ``map``, whose ids are written as its
cache. The command counts from its first line to its end, with its imports; so does the program around ``map``, of which
the map alone is given, too.

    python benchmarks/tokenizing.py --repeat 3
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from _common import arguments, folder, interleave, parse, spread, table

END = "<|endoftext|>"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)

MAP = """
import json, sys, time
from datasets import Dataset
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
def encode(batch):
    return {"input_ids": [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]}
if __name__ == "__main__":
    data = Dataset.from_parquet(sys.argv[1], cache_dir=sys.argv[3])
    begin = time.perf_counter()
    done = data.map(encode, batched=True, batch_size=100, num_proc=int(sys.argv[4]), remove_columns=["text"])
    print(json.dumps(time.perf_counter() - begin))
"""


def texts(megabytes: float) -> list[str]:
    """The sources of the standard library, again and again with another first line, until there are so many."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    found, size, turn = list[str](), 0, 0
    while size < megabytes * 1e6:
        for path in files:
            found.append(f"# {turn} {path.name}\n{path.read_text(errors='replace')}")
            size += len(found[-1])
            if size >= megabytes * 1e6:
                break
        turn += 1
    return found


def train(found: list[str], path: Path) -> None:
    """Train a tokenizer of bytes on some of the texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=[END], show_progress=False, initial_alphabet=sorted(alphabet)
    )
    made.train_from_iterator(found[:400], trainer)
    made.save(str(path))


def program(*line: str, parallel: bool = True) -> Any:
    """Run a program of its own; return what it prints, as JSON."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if not parallel:
        environment["TOKENIZERS_PARALLELISM"] = "false"
    done = subprocess.run([sys.executable, *line], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    _wait_for_orphans()
    return json.loads(done.stdout.splitlines()[-1])


def _adopt_orphans() -> None:
    """Be the parent of processes whose own parent has ended, so that their time counts: the server of forks is one."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _wait_for_orphans() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def runs(where: Path, found: list[str], workers: int, inside: dict[str, list[float]]) -> dict[str, Callable[[], None]]:
    """What is measured, by name; the seconds that programs say of themselves are appended to ``inside``."""
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    text, model = str(where / "text.parquet"), str(where / "tokenizer.json")

    def alone() -> None:
        tokenizer.encode_batch(found)

    def fast() -> None:
        tokenizer.encode_batch_fast(found)

    def command() -> None:
        shutil.rmtree(where / "tokens", ignore_errors=True)
        options = ["--tokenizer", model, "--out", str(where / "tokens"), "--append-eos", END, "--workers", str(workers)]
        report = program("-m", "penstock", "tokenize", text, *options, "--json")
        inside["penstock tokenize"].append(report["seconds"])

    def mapped() -> None:
        shutil.rmtree(where / "cache", ignore_errors=True)
        line = str(where / "map.py"), text, model, str(where / "cache"), str(workers)
        inside["datasets.map"].append(program(*line, parallel=False))

    return {
        "tokenizers.encode_batch": alone,
        "tokenizers.encode_batch_fast": fast,
        "penstock tokenize": command,
        "datasets.map": mapped,
    }


def main() -> None:
    parser = arguments(__doc__, lines=0, repeat=3)
    parser.add_argument("--megabytes", type=float, default=30, help="of text (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    options = parse(parser, {"megabytes": 1, "repeat": 1}, ["datasets", "tokenizers"])
    found = texts(options.megabytes)
    size = sum(map(len, found)) / 1e6
    _adopt_orphans()
    with folder(options.dir) as where:
        train(found, where / "tokenizer.json")
        (where / "map.py").write_text(MAP)
        pyarrow.parquet.write_table(pa.table({"text": found}), where / "text.parquet", row_group_size=200)
        inside: dict[str, list[float]] = {"penstock tokenize": [], "datasets.map": []}
        samples = interleave(runs(where, found, options.workers, inside), options.repeat)
    rows = []
    best = samples["tokenizers.encode_batch"]
    for name, one in samples.items():
        rate = [size / seconds for seconds in one.wall]
        work = statistics.median(size / seconds for seconds in inside.get(name, one.wall))
        cpu = statistics.median(one.cpu) / size
        rows.append((name, *spread(rate, 3), f"{work:.3g}", f"{cpu:.3f}", f"{best.median / one.median:.2f}x"))
    header = ["", "MB/s: min", "median", "max", "without start", "CPU s/MB", "of encode_batch"]
    title = f"{len(found):,} texts of {size:.0f} MB, a vocabulary of 8,192, {options.workers} workers"
    table(title, header, rows, peer=lambda name: "tokenizers.encode_batch")


if __name__ == "__main__":
    main()
