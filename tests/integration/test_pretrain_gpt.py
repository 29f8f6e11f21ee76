"""``examples/pretrain_gpt.py``: killed and resumed on more ranks it trains as if nothing had been, and its documents do
not see each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from example_support import output, run_ranks

import penstock as ps

pytest.importorskip("tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
LIBRARIES = "torch._dynamo", "tokenizers"  # the optimizer imports the former
STEPS, BATCH, SAVED, KILLED = 10, 4, 4, 6
# An epoch, of some 32 packs, ends between the checkpoint and the end.
SIZES = ["--characters", "5000", "--vocabulary", "300", "--context", "256", "--change-at", "20"]


def launch(folder: Path, name: str, *options: str, ranks: int = 1) -> list[int]:
    """Exit codes of the ranks of a job, which find each other as torchrun tells them to."""
    command = [str(EXAMPLE), *SIZES, "--steps", str(STEPS), "--batch-size", str(BATCH)]
    command += ["--checkpoint-every", str(SAVED), "--record", name, *options]
    return run_ranks(command, folder, ranks, imports=LIBRARIES, told=ranks > 1)


def lines(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """What a rank wrote of each step; 0 is its start."""
    read = map(json.loads, (folder / name).read_text().splitlines())
    return {line.get("step", 0): line for line in read}


def test_killed_and_resumed_on_two_ranks(tmp_path: Path) -> None:
    assert launch(tmp_path, "whole") == [0], output(tmp_path)
    saved = ["--checkpoint", "run.pt"]
    assert launch(tmp_path, "begun", *saved, "--stop-at", str(KILLED)) == [-9], output(tmp_path)
    assert launch(tmp_path, "ended", *saved, "--resume", ranks=2) == [0, 0], output(tmp_path)

    whole, begun = lines(tmp_path, "whole.rank0"), lines(tmp_path, "begun.rank0")
    ended = [lines(tmp_path, f"ended.rank{rank}") for rank in range(2)]
    assert list(begun) == list(range(KILLED + 1))
    assert ended[0][0]["start"] == SAVED, "two steps were to be lost"
    assert list(ended[0]) == [0, *range(SAVED + 1, STEPS + 1)]
    for step in range(SAVED + 1, STEPS + 1):
        parts = [rank[step]["packs"] for rank in ended]
        assert [len(part) for part in parts] == [BATCH // 2] * 2
        assert sorted(pack for part in parts for pack in part) == sorted(whole[step]["packs"])
    epochs = [whole[step]["epoch"] for step in range(1, STEPS + 1)]
    assert epochs[SAVED] == 0
    assert epochs[-1] == 1
    assert [rank[step]["epoch"] for rank in ended for step in range(SAVED + 1, STEPS + 1)] == 2 * epochs[SAVED:]

    def losses(run: dict[int, dict[str, Any]], begin: int, end: int) -> list[float]:
        return [run[step]["loss"] for step in range(begin, end + 1)]

    # On the same number of ranks to the last bit; on two the gradients are summed in another order.
    assert losses(begun, 1, KILLED) == losses(whole, 1, KILLED)
    for rank in ended:
        assert losses(rank, SAVED + 1, STEPS) == pytest.approx(losses(whole, SAVED + 1, STEPS), abs=1e-5)
    assert whole[STEPS]["loss"] < whole[1]["loss"] - 0.2, "it learns"


@pytest.fixture(scope="module")
def example() -> Any:
    """The program, as a module."""
    module = ModuleType("pretrain_gpt")
    exec(compile(EXAMPLE.read_bytes(), str(EXAMPLE), "exec"), vars(module))
    return module


def pack_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """A batch of one pack of 64 tokens."""
    torch.manual_seed(0)
    documents = [torch.randint(1, 50, (length,)) for length in lengths]
    (pack,) = ps.PackedDataset(documents, 64, lengths=lengths, rank=0, world_size=1)
    return {name: value[None] for name, value in pack.items()}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("flex", [False, True], ids=["mask", "flex"])
def test_documents_do_not_see_each_other(example: Any, flex: bool) -> None:
    """Other tokens in one document leave the scores of all others what they were, to the last bit."""
    pack = pack_of([20, 17, 9, 13])
    torch.manual_seed(0)
    model = example.GPT(50, 64, flex=flex).eval()
    documents = pack["document_ids"]

    def scores(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids, pack["position_ids"], documents)

    before = scores(pack["input_ids"])
    for changed in range(4):
        mine = documents == changed
        after = scores(torch.where(mine, (pack["input_ids"] + 7) % 50, pack["input_ids"]))
        assert torch.equal(after[~mine], before[~mine])
        assert not torch.isclose(after[mine], before[mine]).all(-1).any()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_document_is_scored_as_if_it_were_alone(example: Any) -> None:
    """By either attention; and no token sees those behind it."""
    pack = pack_of([20, 17, 9, 13])
    names = "input_ids", "position_ids", "document_ids"
    torch.manual_seed(0)
    masked = example.GPT(50, 64).eval()
    flex = example.GPT(50, 64, flex=True).eval()
    flex.load_state_dict(masked.state_dict())
    with torch.no_grad():
        found = masked(*(pack[name] for name in names))
        torch.testing.assert_close(flex(*(pack[name] for name in names)), found)
        for number in range(4):
            mine = pack["document_ids"] == number
            alone = [pack[name][mine][None] for name in names]
            torch.testing.assert_close(masked(*alone)[0], found[mine])
            torch.testing.assert_close(masked(*(part[:, :5] for part in alone))[0], found[mine][:5])
