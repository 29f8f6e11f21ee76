"""Train on a folder of images. Started again, the program resumes at the next batch."""

import argparse
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn

import penstock as ps
from penstock.images.transforms import HorizontalFlip, RandomResizedCrop, ToTensor


def make_images(folder):
    """Write 100 images each of three colours, for a first try without data."""
    rng = np.random.default_rng(0)
    for channel, name in enumerate(["blue", "green", "red"]):
        (folder / name).mkdir(parents=True)
        for number in range(100):
            pixels = rng.integers(0, 100, (48, 64, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            cv2.imwrite(f"{folder}/{name}/{number:03d}.jpg", pixels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default="images")
    parser.add_argument("--stop-after", type=int, help="stop after so many batches")
    args = parser.parse_args()
    if not args.folder.exists():
        make_images(args.folder)

    steps = [RandomResizedCrop(32), HorizontalFlip(), ToTensor()]
    dataset = ps.open(args.folder, transform=steps, seed=0)  # a folder for each class
    loader = ps.DataLoader(dataset, batch_size=20, shuffle=True, num_workers=2)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(16, len(dataset.classes)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = model, optimizer, loader
    if Path("run.pt").exists():
        for part, state in zip(parts, torch.load("run.pt"), strict=True):
            part.load_state_dict(state)

    for epoch in range(loader.epoch, 3):
        loader.set_epoch(epoch)  # keeps the position in an epoch that was loaded
        for count, (images, labels) in enumerate(loader, start=1):
            scores = model(images)  # of float32 (20, 3, 32, 32)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            if count == args.stop_after:
                torch.save([part.state_dict() for part in parts], "run.pt")
                print(f"stopped in epoch {epoch}, after {count} of {len(loader)} batches")
                return
        right = (scores.argmax(1) == labels).float().mean()
        print(f"epoch {epoch}: {count} batches, {right:.0%} of the last one are right")


if __name__ == "__main__":
    main()
