"""A program for Dpex, with one import changed. Without a cluster, batches are made here."""

import sys

import torch
from torch.utils.data import Dataset

from penstock import DpexDataLoader  # was: from Dpex.dataloader

ADDRESS = (
    sys.argv[1] if len(sys.argv) > 1 else None
)  # of a Ray cluster, such as 10.0.0.1:6379


class Squares(Dataset):
    """Stands in for your dataset."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index, index**2


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DpexDataLoader(
        Squares(),
        distribute_mode=ADDRESS is not None,
        head_address=ADDRESS or "auto",
        batch_size=8,
        shuffle=True,
        num_workers=2,
    )
    for epoch in range(2):
        indices = [index for indices, squares in loader for index in indices.tolist()]
        print(f"epoch {epoch}: {len(loader)} batches, {len(set(indices))} samples")
