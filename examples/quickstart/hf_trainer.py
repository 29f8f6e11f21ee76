"""Train with the Trainer of Hugging Face. Started again, the program resumes."""

import argparse
import json
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import penstock as ps
from penstock.integrations.transformers import PenstockTrainer


def make_reviews(path):
    """Write 400 rows with "text" and "label", for a first try without data."""
    words = ["bad", "dull", "fine", "great"]
    with path.open("w") as file:
        for number in range(400):
            row = {"text": f"{words[number % 4]} film", "label": int(number % 4 > 1)}
            file.write(json.dumps(row) + "\n")


def encode(row):
    """Return the model's arguments for a row. Call your tokenizer here."""
    tokens = torch.tensor(list(row["text"].encode()[:32].ljust(32, b"\0")))
    return {"input_ids": tokens, "labels": row["label"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="?", default="reviews.jsonl")
    parser.add_argument("--max-steps", type=int, default=-1)
    args = parser.parse_args()
    if not args.rows.exists():
        make_reviews(args.rows)
    rows = ps.open(args.rows, columns=["text", "label"], load=encode, seed=0)
    loader = ps.DataLoader(rows, batch_size=20)

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = BertForSequenceClassification(config)
    options = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=20,
        num_train_epochs=2,
        max_steps=args.max_steps,
        save_steps=5,
        learning_rate=1e-3,
        use_cpu=True,
    )
    trainer = PenstockTrainer(model, options, train_loader=loader)
    checkpoint = get_last_checkpoint("run")  # None the first time
    trainer.train(resume_from_checkpoint=checkpoint)
    print(f"from {checkpoint} to step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
