"""Train a small model on torchtitan's text loader; its own trainer needs a GPU.

python torchtitan_loop.py DATA --epochs 2       each step's loss; the loader's state is taken after each, as by it
python torchtitan_loop.py DATA --save step.pt   stop after the third step, and save model and loader
python torchtitan_loop.py DATA --load step.pt   go on from there
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from datasets import load_dataset

LENGTH, BATCH, STOP = 256, 4, 3


def main() -> None:
    """Print each step's loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--save")
    parser.add_argument("--load")
    options = parser.parse_args()
    DATASETS["lines"] = DatasetConfig(
        path=str(options.data / "documents"),
        loader=partial(load_dataset, split="train"),
        sample_processor=lambda sample: sample["text"],
    )
    config = HuggingFaceTextDataLoader.Config(dataset="lines", infinite=False, num_workers=options.workers)
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(options.data / "tokenizer"))
    loader = HuggingFaceTextDataLoader(
        config, dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=LENGTH, local_batch_size=BATCH
    )
    torch.manual_seed(0)
    vocabulary = tokenizer.get_vocab_size()
    model = nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if options.load:
        saved = torch.load(options.load, weights_only=False)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
    for _ in range(options.epochs):
        for step, (inputs, labels) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = loader.state_dict()
            # At once, on a line of its own: the worker logs to the same pipe.
            sys.stdout.write(f"\nloss {loss.item()}\n")
            if options.save and step == STOP:
                torch.save({"model": model.state_dict(), "loader": state}, options.save)
                return


if __name__ == "__main__":
    main()
