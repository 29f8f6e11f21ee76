"""Train a small classifier of what moves how, on clips of videos that this program makes.

    python examples/train_clips.py
    python examples/train_clips.py --videos FOLDER         # one folder of videos for each class

A square moves to the right, down, in a circle, or stands and blinks: one frame alone does not tell. Each epoch reads
another clip of each video. What is saved after each epoch goes on from there, on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import nn

import penstock as ps

SIDE, SQUARE, FRAMES, RATE = 64, 12, 8, 24

Place = tuple[float, float] | None
"""Where the square is, in sides of the picture; None where it is not seen."""

KINDS: dict[str, Callable[[float, float, float], Place]] = {
    "right": lambda x, y, time: ((x + 0.5 * time) % 1, y),
    "down": lambda x, y, time: (x, (y + 0.5 * time) % 1),
    "circle": lambda x, y, time: (0.5 + 0.3 * math.cos(4 * time), 0.5 + 0.3 * math.sin(4 * time)),
    "blink": lambda x, y, time: (x, y) if int(time * 6) % 2 else None,
}


def write_video(path: Path, kind: str, seconds: float, draw: random.Random) -> None:
    """Write a video of a square that moves in its way, over a background of its own."""
    x, y, shade = draw.random(), draw.random(), draw.randrange(40, 120)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=RATE, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for number in range(round(seconds * RATE)):
            pixels = np.full((SIDE, SIDE, 3), shade, np.uint8)
            place = KINDS[kind](x, y, number / RATE)
            if place is not None:
                left, top = (int(where * (SIDE - SQUARE)) for where in place)
                pixels[top : top + SQUARE, left : left + SQUARE] = 230
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))


def write_videos(folder: Path, count: int, seed: int) -> Path:
    """Write so many videos of each class, unless they are there."""
    draw = random.Random(seed)
    for kind in KINDS if not folder.exists() else ():
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            write_video(folder / kind / f"{number:03d}.mp4", kind, draw.uniform(2, 4), draw)
    return folder


class Classifier(nn.Module):
    """Convolutions over time and space, and the mean of what they find."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv3d(3, 16, (3, 5, 5), (1, 2, 2), padding=(1, 2, 2)), nn.ReLU()),
            *(nn.Conv3d(16, 32, 3, (2, 2, 2), padding=1), nn.ReLU()),
            *(nn.Conv3d(32, 32, 3, (2, 2, 2), padding=1), nn.ReLU()),
        )
        self.head = nn.Linear(64, classes)

    def forward(self, videos: torch.Tensor) -> torch.Tensor:
        """Return logits of clips, uint8 (n, frames, 3, height, width)."""
        found = self.layers(videos.float().div(127.5).sub(1).transpose(1, 2))
        return self.head(torch.cat([found.mean((2, 3, 4)), found.amax((2, 3, 4))], 1))


def accuracy(model: nn.Module, clips: ps.VideoDataset) -> float:
    """Return the share of clips that are recognised."""
    right = 0
    with torch.inference_mode():
        for videos, labels in ps.DataLoader(clips, batch_size=16):
            right += int((model(videos).argmax(1) == labels).sum())
    return right / len(clips)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=Path, help="one folder for each class; made up if there is none")
    parser.add_argument("--out", type=Path, default=Path("clips-output"), help="for videos and what is saved")
    parser.add_argument("--count", type=int, default=24, help="videos of each class that are made")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    how: dict[str, Any] = {"frames": FRAMES, "step": 3, "size": SIDE}
    train = ps.VideoDataset(options.videos or write_videos(options.out / "train", options.count, 0), seed=0, **how)
    test = options.videos or write_videos(options.out / "test", max(1, options.count // 4), 1)
    held = ps.VideoDataset(test, random_start=False, shuffle="none", remainder="uneven", **how)
    model = Classifier(len(train.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ps.DataLoader(train, batch_size=16, num_workers=options.workers, drop_last=False)
    saved = options.out / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    for epoch in range(loader.epoch, options.epochs):
        loader.set_epoch(epoch)
        losses = []
        for videos, labels in loader:
            loss = nn.functional.cross_entropy(model(videos), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}, recognised {accuracy(model, held):.0%}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(state, saved)


if __name__ == "__main__":
    main()
