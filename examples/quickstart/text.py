"""Pretrain on documents of two sources: tokenized once, mixed by weight, packed."""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

import penstock as ps


def tokenize(folder):
    """Write the tokens of 400 texts and 400 lines of code."""
    draw, words = random.Random(0), ["a", "river", "flows", "slowly", "to", "the", "sea"]
    prose = [" ".join(draw.choices(words, k=draw.randint(10, 60))) for _ in range(400)]
    code = [f"def add_{number}(x): return x + {number}" for number in range(400)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        show_progress=False, vocab_size=256, special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator(prose + code, trainer)
    for name, texts in {"prose": prose, "code": code}.items():
        ps.tokenize(texts, folder / name, tokenizer, append_eos="<end>", workers=1)


def make_loader(folder):
    """Return batches of 4 packs of 128 tokens. Seven documents in ten are prose."""
    names = ["prose", "code"]
    prose, code = (
        ps.DocumentDataset(folder / name, rank=0, world_size=1) for name in names
    )
    mixture = ps.Mixture([(prose, 0.7), (code, 0.3)], names=names, stop=600, seed=0)
    packs = ps.PackedDataset(mixture, 128)  # each rank reads its share of them
    return ps.DataLoader(packs, batch_size=4, num_workers=2, drop_last=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stop-after", type=int, help="stop after so many batches")
    args = parser.parse_args()
    folder = Path("tokens")
    if not folder.exists():
        tokenize(folder)
    loader = make_loader(folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))  # stands for yours
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = model, optimizer, loader
    if Path("run.pt").exists():
        for part, state in zip(parts, torch.load("run.pt"), strict=True):
            part.load_state_dict(state)

    for count, batch in enumerate(loader, start=1):
        scores = model(batch["input_ids"])  # int64 (4, 128); so are labels and document_ids
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores.mT, batch["labels"]).backward()
        optimizer.step()
        if count == args.stop_after:
            torch.save([part.state_dict() for part in parts], "run.pt")
            break
    step = ps.Ledger(loader).rows(3)  # computed from the seed: nothing was logged
    prose, code = ((step.sources == number).sum() for number in (0, 1))
    print(
        f"{count} of {len(loader)} batches; in step 3 {prose} texts, {code} lines of code"
    )


if __name__ == "__main__":
    main()
