"""Checks the requested features, episodes and windows against a LeRobot dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from penstock.clips.lerobot_meta import LeRobotMeta
from penstock.clips.packets import Ints
from penstock.errors import ConfigError, DataFileError

__all__ = ["PLACE", "Window", "check_tolerance", "chosen_columns", "chosen_episodes", "windows_of"]

PLACE = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""The features that identify a frame."""
Window = tuple[int, ...]
"""Times relative to a frame, in frames."""
_NO_WINDOW = ("string", "language")


def check_tolerance(tolerance_s: Any) -> float:
    """Return the tolerance. Raises `ConfigError` if it is not a positive number."""
    if isinstance(tolerance_s, bool) or not isinstance(tolerance_s, Real) or tolerance_s <= 0:
        raise ConfigError(f"tolerance_s= takes a positive number of seconds, got {tolerance_s!r}")
    return float(tolerance_s)


def chosen_columns(meta: LeRobotMeta, columns: Any) -> list[str]:
    """Return the features to read, in the order of the dataset, including `PLACE`.

    Raises:
        ConfigError: not a list of names, an unknown name, or a depth map.
        DataFileError: the dataset lacks one of `PLACE`.
    """
    if columns is not None and (isinstance(columns, str | Mapping) or not isinstance(columns, Sequence)):
        raise ConfigError(f"columns= takes a list of names, got {columns!r}")
    wanted = list(meta.features) if columns is None else list(columns)
    for name in wanted:
        _check_name(meta, "columns=", name)
        if meta.is_depth(name):
            others = [other for other in meta.features if other not in PLACE and not meta.is_depth(other)]
            raise ConfigError(f"{meta.root}: {name!r} is a depth map, which is not supported: pass columns={others}")
    missing = [name for name in PLACE if name not in meta.features]
    if missing:
        raise DataFileError(f"{meta.root}: meta/info.json has no feature {missing[0]!r}, which every frame needs")
    return [name for name in meta.features if name in wanted or name in PLACE]


def chosen_episodes(meta: LeRobotMeta, episodes: Any) -> Ints:
    """Return the requested episode numbers, ascending and unique.

    Raises:
        ConfigError: not a list of integers, an unknown episode, or no frames.
    """
    if episodes is None:
        episodes = range(meta.total_episodes)
    elif isinstance(episodes, str | bytes | Mapping) or not hasattr(episodes, "__iter__"):
        raise ConfigError(f"episodes= takes a list of numbers, got {episodes!r}")
    numbers: list[Any] = list(episodes)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise ConfigError(f"episodes= takes a list of numbers, got {number!r} in it")
        if number < 0 or number >= meta.total_episodes:
            raise ConfigError(f"{meta.root} has no episode {number}: it has {meta.total_episodes} episodes")
    chosen = np.unique(np.array(numbers, np.int64))
    if not (meta.episodes.end - meta.episodes.begin)[chosen].any():
        raise ConfigError(f"{meta.root}: episodes={episodes!r} have no frames")
    return chosen


def windows_of(
    meta: LeRobotMeta, columns: Sequence[str], delta_timestamps: Any, tolerance_s: float
) -> dict[str, Window]:
    """Return the times of each feature's window, in frames.

    Raises:
        ConfigError: not a mapping of features to lists of seconds; a feature that is not read or is text; or a time
            that is not a whole number of frames, within the tolerance.
    """
    if delta_timestamps is None:
        return {}
    if not isinstance(delta_timestamps, Mapping):
        raise ConfigError(f"delta_timestamps= takes a dict of feature to list of seconds, got {delta_timestamps!r}")
    for name in delta_timestamps:
        _check_name(meta, "delta_timestamps=", name)
        if name not in columns or meta.features[name]["dtype"] in _NO_WINDOW:
            why = "is text" if name in columns else "is not among columns="
            raise ConfigError(f"delta_timestamps= names {name!r}, which {why}")
    return {name: _window(meta, name, seconds, tolerance_s) for name, seconds in delta_timestamps.items()}


def _window(meta: LeRobotMeta, name: str, seconds: Any, tolerance_s: float) -> Window:
    given = list(seconds) if hasattr(seconds, "__iter__") and not isinstance(seconds, str) else []
    if not given or not all(isinstance(second, Real) and math.isfinite(second) for second in given):
        raise ConfigError(f"delta_timestamps[{name!r}] must be a non-empty list of seconds, not {seconds!r}")
    frames = [round(second * meta.fps) for second in given]
    for second, frame in zip(given, frames, strict=True):
        if abs(second * meta.fps - frame) / meta.fps > tolerance_s:
            raise ConfigError(
                f"delta_timestamps[{name!r}] has {second} s, not a whole number of frames of 1/{meta.fps:g} s, "
                f"within tolerance_s={tolerance_s}"
            )
    return tuple(frames)


def _check_name(meta: LeRobotMeta, option: str, name: Any) -> None:
    if not isinstance(name, str) or name not in meta.features:
        raise ConfigError(f"{option} contains {name!r}, but the features of {meta.root} are {', '.join(meta.features)}")
