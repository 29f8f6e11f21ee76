"""What the programs read, made of the images of ``PENSTOCK_TEST_DATA`` and of words."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from published import CLASSES

import penstock as ps

WORDS = "the water of a river flows through old pipes and stone channels until it falls from high rocks into a lake"
TOKENS = 512


def write_data(images: Path, folder: Path, *, each: int = 12) -> None:
    """Write folders of classes, files named by class, shards with captions, and text with a tokenizer.

    Args:
        images: a folder of JPEG files.
        folder: gets ``folders``, ``named``, ``shards`` and ``text``.
        each: training images of a class; there are `CLASSES` classes. Where there are fewer, they come again.
    """
    paths = list(itertools.islice(itertools.cycle(sorted(images.glob("*.JPEG"))), CLASSES * each))
    (folder / "named").mkdir(parents=True)
    (folder / "shards").mkdir()
    for number, path in enumerate(paths):
        kind = number % CLASSES
        for split in ("train", "val") if number < 2 * CLASSES else ("train",):
            target = folder / "folders" / split / f"class_{kind}" / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
        (folder / "named" / f"class_{kind}_{number}.jpg").symlink_to(path)
    with ps.ShardWriter(str(folder / "shards" / "%d.tar"), maxcount=-(-len(paths) // 4)) as shards:
        for number, path in enumerate(paths):
            name = path.stem.partition("_")[2].replace("_", " ")
            shards.write({"__key__": f"{number:05}", "jpg": path.read_bytes(), "txt": f"a photo of a {name}"})
    write_text(folder / "text", each=each)


def write_text(folder: Path, *, each: int) -> None:
    """Write documents of many lengths as JSON lines, and a tokenizer of bytes trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(0)
    words = WORDS.split()
    texts = [" ".join(draw.choices(words, k=int(draw.lognormvariate(4.5, 1)))) for _ in range(20 * each)]
    (folder / "documents").mkdir(parents=True)
    (folder / "documents" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
