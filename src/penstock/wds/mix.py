"""Mixing under the name of the module that programs import."""

from __future__ import annotations

from penstock.wds.mixing import RandomMix, RoundRobin

__all__ = ["RandomMix", "RoundRobin"]
