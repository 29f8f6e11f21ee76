"""Plain PyTorch: train, be killed, go on at the next batch, from one file.

python plain_torch.py --checkpoint run.pt              again after a kill: it goes on
"""

from __future__ import annotations

import os

import torch
from common import Log, Network, arguments, images
from torch.nn.functional import cross_entropy

import penstock as ps


def main() -> None:
    """Train one network in one process."""
    args = arguments(__doc__).parse_args()
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = ps.DataLoader(images(args.data), args.batch_size, shuffle="global", seed=0)

    step = 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # a few hundred bytes: plain numbers and text
        step = saved["step"]

    log = Log(args)
    log.start(step)
    for epoch in range(loader.epoch, args.epochs):
        loader.set_epoch(epoch)  # the epoch of a state just loaded keeps its position
        for pixels, labels, rows in loader:
            step += 1
            loss = cross_entropy(model(pixels), labels)
            log.step(step, loss.item(), rows, loader)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.checkpoint and step % args.checkpoint_every == 0:
                parts = {"model": model, "optimizer": optimizer, "loader": loader}
                partial = args.checkpoint.with_suffix(".partial")  # a kill while saving leaves the old one whole
                torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, partial)
                os.replace(partial, args.checkpoint)
    loader.report()


if __name__ == "__main__":
    main()
