"""Tables of ``penstock shuffle-quality`` for a job: how well its steps mix each source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.tools.cli.data_options import row_cells
from penstock.tools.cli.manifest_options import console, figures, pairs, print_figures
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.tools.quality.packs import PackSpread
    from penstock.tools.quality.shares import ShareQuality
    from penstock.tools.quality.steps import SourceSpread, StepQuality

__all__ = ["print_steps"]


def print_steps(found: StepQuality) -> None:
    """Print the measurements, with the values for random rows in brackets."""
    steps, epochs = counted(found.steps, "step"), counted(found.epochs, "epoch")
    ranks = counted(found.ranks, "rank")
    console().print(f"{steps} of {ranks} x {found.batch_size} measured, in {epochs}; in brackets: random rows")
    heads = ["", "rows", "kept", "measured", "distance", "correlation", "neighbours"]
    print_figures(figures("Steps", heads, list(map(_source_cells, found.sources))))
    packed = [(source.name, source.packs) for source in found.sources if source.packs is not None]
    if packed:
        heads = ["", "batches", "documents per pack", "mean length", "spread"]
        print_figures(figures("Documents in batches of packs", heads, [_pack_cells(*one) for one in packed]))
    if found.shares is not None:
        names = [source.name for source in found.sources]
        console().print(pairs("Shares of sources", _share_rows(found.shares, names)))


def _source_cells(source: SourceSpread) -> list[str]:
    return [
        *row_cells(source),
        f"{source.looked_at:,}",
        f"{source.distance:.4f} ({source.distance_random:.4f})",
        f"{source.correlation:.4f} (±{source.correlation_random:.4f})",
        f"{source.neighbours:.2%} ({source.neighbours_random:.2%})",
    ]


def _pack_cells(name: str, packs: PackSpread) -> list[str]:
    spread = f"{packs.spread:.1%} ({packs.spread_random:.1%})"
    return [name, f"{packs.batches:,}", f"{packs.documents:,.1f}", f"{packs.length:,.1f}", spread]


def _share_rows(shares: ShareQuality, names: list[str]) -> list[tuple[str, str]]:
    where = f"{names[shares.source]} on rank {shares.rank}, from position {shares.begin:,} on"
    return [
        ("worst", f"{shares.worst:.2f} standard deviations ({shares.worst_random:.2f}): {where}"),
        ("its share", f"{shares.share:.2%}, expected from the weights {shares.expected:.2%}"),
        ("measured", f"windows of {shares.window:,} positions of {counted(shares.ranks, 'rank')}"),
    ]
