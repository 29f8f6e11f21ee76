"""Pretrain a tiny GPT on packed documents of two sources; kill it at any moment, go on with any number of ranks.

    python pretrain_gpt.py --checkpoint run.pt
    torchrun --nproc-per-node 2 pretrain_gpt.py --checkpoint run.pt --resume

The text is on every machine with Python: the code of its standard library, a document for each function, and the
prose of the language reference that ``help()`` shows, a document for each paragraph. The first run trains a tokenizer
and writes the tokens to ``--data``. The batch size is that of the whole job and the loss is a mean over its
tokens, so one rank and two ranks train on the same batches and have the same losses.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import signal
import sys
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported before ranks join: later it would keep their group, whose threads can then abort a process that ends.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

END = "<end>"  # the token behind each document
IGNORED = -100  # the label of a position that no loss is for

# ---------------------------------------------------------------------------------------------------------------- text


def code(characters: int) -> list[str]:
    """Functions and classes of the standard library; a class ends where its first method begins."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    begin = re.compile(r"\n\n+(?= *(?:async def|def|class|@))")
    return first(characters, (text for file in files for text in begin.split(file.read_text("utf-8"))))


def prose(characters: int) -> list[str]:
    """Paragraphs of the language reference."""
    from pydoc_data.topics import topics

    return first(characters, (text for name in sorted(topics) for text in topics[name].split("\n\n")))


def first(characters: int, texts: Iterable[str]) -> list[str]:
    """Return as many of the texts as there is room for."""
    found = []
    for text in filter(str.strip, texts):
        characters -= len(text)
        if characters < 0:
            break
        found.append(text)
    return found


def prepare(folder: Path, characters: int, vocabulary: int) -> None:
    """Train the tokenizer and write the tokens, once: what is there already is not made again."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        sys.exit("this example trains a tokenizer: pip install 'penstock[text]'")
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"code": code(characters), "prose": prose(characters)}
    path = folder / "tokenizer.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(itertools.chain(*texts.values()), trainer)
        partial = path.with_suffix(".partial")
        tokenizer.save(str(partial))
        partial.replace(path)
    for name, documents in texts.items():
        ps.tokenize(documents, folder / name, path, append_eos=END, workers=1)


# ---------------------------------------------------------------------------------------------------------------- data


def packed(folder: Path, context: int, change_at: int, seed: int) -> Any:
    """This rank's packs: mostly prose at first, mostly code from a document of the job on."""
    prose, code = (ps.DocumentDataset(folder / name, rank=0, world_size=1) for name in ("prose", "code"))
    documents = ps.Mixture(
        [prose, code],
        names=["prose", "code"],
        schedule=[(0, [0.9, 0.1]), (change_at, [0.3, 0.7])],
        stop=len(prose) + len(code),  # documents of an epoch
        seed=seed,
        remainder="drop",  # no sample twice: the same epoch on any number of ranks
    )
    return ps.PackedDataset(documents, context)


# --------------------------------------------------------------------------------------------------------------- model


def same_document(document_ids: Tensor) -> Tensor:
    """The mask that lets a token see those before it in its own document: bool (N, 1, T, T) from int64 (N, T)."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


def same_document_blocks(document_ids: Tensor) -> Any:
    """The same for `flex_attention`, which passes over blocks that are masked; (N, T) int64."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(n: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document_ids[n, query] == document_ids[n, key]) & (query >= key)

    count, length = document_ids.shape
    return create_block_mask(seen, count, None, length, length, device=str(document_ids.device))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Attention over (N, heads, T, width), with the mask of either of the functions above."""
    if isinstance(mask, Tensor):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return flex_attention(query.is_cuda)(query, key, value, block_mask=mask)


@functools.cache
def flex_attention(compiled: bool) -> Any:
    """torch's function; without compilation it fills in the scores that it is there to pass over."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        query, key, value = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(query, key, value, mask).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.between(x))


class GPT(nn.Module):
    """Some 200,000 parameters. Positions begin anew with each document, and documents do not see each other.

    Args:
        vocabulary: how many tokens there are.
        context: the most positions of a document.
        flex: use `flex_attention` in place of a mask.
    """

    def __init__(
        self, vocabulary: int, context: int, *, width: int = 64, layers: int = 3, heads: int = 4, flex: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.make_mask = same_document_blocks if flex else same_document
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Scores of the next token, (N, T, vocabulary), of int64 (N, T) each."""
        mask = self.make_mask(document_ids)
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(x) @ self.tokens.weight.T


# ------------------------------------------------------------------------------------------------------------ training


def save(path: Path, step: int, **parts: Any) -> None:
    """Replace the checkpoint in one go: whoever is killed meanwhile leaves the old one whole."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def job_loss(losses: Tensor, targets: int, world: int) -> tuple[Tensor, float]:
    """The mean over the tokens of all ranks, to be shown, and a rank's part of it, to be differentiated.

    Ranks have different numbers of targets, so the mean of their means would not be that of one rank. The part is
    ``world`` times larger, since DistributedDataParallel divides the sum of the gradients by that.
    """
    sums = torch.tensor([losses.detach().double().sum(), targets], dtype=torch.float64)
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return losses.sum() * world / count, total / count


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    packs = packed(args.data, args.context, args.change_at, args.seed)
    loader = ps.DataLoader(packs, args.batch_size // world, num_workers=args.workers, drop_last=True)
    model = GPT(args.vocabulary, args.context, flex=args.attention == "flex").to(args.device)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if args.resume and args.checkpoint.exists():  # every rank reads the file that rank 0 wrote
        saved = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # a few integers, from however many ranks
    parallel = DistributedDataParallel(model) if world > 1 else model
    log = Log(args, rank)
    log.start(step, packs)
    for epoch in itertools.count(loader.epoch):
        if step >= args.steps:
            break
        loader.set_epoch(epoch)  # the epoch of a state just loaded keeps its position
        for pack in loader:
            step += 1
            ids, labels, positions, documents = (
                pack[name].to(args.device) for name in ("input_ids", "labels", "position_ids", "document_ids")
            )
            scores = parallel(ids, positions, documents)
            losses = cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
            loss, shown = job_loss(losses, int((labels != IGNORED).sum()), world)
            optimizer.param_groups[0]["lr"] = args.learning_rate * min(1.0, step / 20)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(epoch, step, shown, ids)
            if args.checkpoint and step % args.checkpoint_every == 0 and rank == 0:
                save(args.checkpoint, step, model=model, optimizer=optimizer, loader=loader)
            if step == args.stop_at and not args.resume:
                os.kill(os.getpid(), signal.SIGKILL)  # as a preempted machine goes: no handler, no farewell
            if step == args.steps:
                break
    log.end(packs, loader)


class Log:
    """What a rank reports: lines on rank 0, and JSON lines in ``FILE.rankR``, which no kill can take back."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.file = None if args.record is None else open(f"{args.record}.rank{rank}", "a", buffering=1)  # noqa: SIM115
        self.quiet = rank > 0

    def start(self, step: int, packs: Any) -> None:
        if not self.quiet:
            fill = ", ".join(f"{part.fill:.2%}" for part in packs.sources)
            print(f"going on after step {step}; real tokens in the packs of each source: {fill}")
        self._write(start=step)

    def step(self, epoch: int, step: int, loss: float, ids: Tensor) -> None:
        """The loss of the job, and checksums of this rank's packs."""
        if not self.quiet and step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}")
        self._write(epoch=epoch, step=step, loss=loss, packs=[zlib.crc32(pack.numpy()) for pack in ids.cpu()])

    def end(self, packs: Any, loader: Any) -> None:
        """How many packs of each source the job has had."""
        if not self.quiet:
            for source in packs.statistics(loader.state_dict()):
                print(f"{source.name}: {source.had:,} packs, {source.passes:.2f} times all of it")

    def _write(self, **line: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------------------------------------------------------- main


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a tiny GPT on packed documents, on any number of ranks.")
    add = parser.add_argument
    add("--data", type=Path, default=Path("gpt-data"), help="tokens; written there the first time")
    add("--characters", type=int, default=400_000, help="text of each source")
    add("--vocabulary", type=int, default=1024, help="tokens of the tokenizer")
    add("--context", type=int, default=256, help="tokens of a pack")
    add("--change-at", type=int, default=1500, metavar="DOCUMENTS", help="when code takes over from prose")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=8, help="packs per step, over all ranks")
    add("--ranks", type=int, help="start so many with torchrun, on this machine")
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0, help="of the order and of the first weights")
    add("--workers", type=int, default=0, help="data loading workers per rank")
    add("--attention", choices=("mask", "flex"), default="mask", help="flex needs --device cuda")
    add("--device", default="cpu")
    add("--checkpoint", type=Path, help="where to save, and what to resume from")
    add("--checkpoint-every", type=int, default=20, metavar="STEPS")
    add("--resume", action="store_true", help="go on from the checkpoint, if there is one yet")
    add("--stop-at", type=int, metavar="STEP", help="be killed (SIGKILL) after this step, unless resumed")
    add("--record", type=Path, metavar="FILE", help="write every step of rank R to FILE.rankR, with its loss")
    args = parser.parse_args(arguments)
    world = args.ranks or int(os.environ.get("WORLD_SIZE", 1))
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint FILE")
    if args.batch_size % world:
        parser.error(f"{world} ranks cannot share batches of {args.batch_size} equally")
    if args.attention == "flex" and args.device == "cpu":
        parser.error("flex_attention has no backward pass on a CPU: use --attention mask, or --device cuda")
    return args


def main() -> None:
    args = parse()
    if args.ranks and "WORLD_SIZE" not in os.environ:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        os.execv(sys.executable, [*start, *sys.argv])
    torch.set_num_threads(1)  # ranks share the cores of a machine
    torch.manual_seed(args.seed)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() == 0:
        prepare(args.data, args.characters, args.vocabulary)
    dist.barrier()
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
