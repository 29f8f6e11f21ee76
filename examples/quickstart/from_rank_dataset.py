"""A program for rank_dataset, with one import changed."""

import sys
from pathlib import Path

from torch.utils.data import DataLoader

from penstock.compat.rank_dataset import RandomSampler, RankDataset  # was: rank_dataset

META = sys.argv[1] if len(sys.argv) > 1 else "train.txt"
if not Path(META).exists():
    lines = [f"img_{number:03d}.jpg {number % 10}\n" for number in range(100)]
    Path(META).write_text("".join(lines))

for epoch in range(2):
    for mini_epoch in range(2):
        reload_cfg = {
            "mini_epoch": 2,
            "mini_epoch_idx": mini_epoch,
            "seed": epoch,
            "group": 1,
        }
        dataset = RankDataset(META, is_test=False, reload_cfg=reload_cfg)
        sampler = RandomSampler(dataset)
        loader = DataLoader(dataset, batch_size=10, num_workers=2, sampler=sampler)
        rows = []
        for _filenames, _labels, indices in loader:
            rows += indices.tolist()
        print(f"epoch {epoch}, mini-epoch {mini_epoch}: {len(set(rows))} rows")
