"""Signatures of `open`, written by tests/opening/test_signatures.py from the constructors."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from penstock.datasets.arrays import ArrayDataset
from penstock.datasets.clips import AudioDataset
from penstock.datasets.clips import VideoDataset
from penstock.datasets.images import ImageDataset
from penstock.datasets.lerobot import LeRobotDataset
from penstock.datasets.mds import MDSDataset
from penstock.datasets.rank import RankDataset
from penstock.datasets.shards import ShardDataset
from penstock.datasets.source_dataset import SourceDataset
from penstock.datasets.tables import TableDataset
from penstock.datasets.tokens import DocumentDataset
from penstock.datasets.tokens import TokenDataset
from penstock.images.sample_record import ImageType
from penstock.images.transforms import Compose
from penstock.manifest import Record
from penstock.manifest.options import Blank
from penstock.manifest.options import Columns
from penstock.manifest.options import Format
from penstock.manifest.options import Header
from penstock.shards.grouping import Handler
from penstock.shards.grouping import Sample
from penstock.shards.stream import StreamShards
from penstock.storage import Cache
from penstock.storage import Storage
from penstock.storage.names import Urls
from penstock.storage.urls import Name
from typing import Any
from typing import Literal
from typing import overload
import numpy.typing as npt
import os
import torch
import torch.distributed as dist
from typing import overload

__all__ = ["folder_manifest", "kind_of", "open", "shards_in"]

@overload
def open(
    source: Urls, *, block_size: int | None = ..., cache_dir: Any = ..., columns: Any = ...,
    decode: bool | Mapping[str, Callable[[bytes], Any] | None] | Callable[[Sample], Sample] | None = ...,
    exclude: Any = ..., group: int | None = ..., images: ImageType | None = ..., load: Any = ...,
    locality: Literal['none', 'node'] = ..., mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., progress: bool | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ..., shuffle: Any = ..., split: str | None = ...,
    storage: Storage | None = ..., window: int | None = ..., window_shards: int = ..., world_size: int | None = ...
) -> SourceDataset | Any: ...
@overload
def open(
    source: Urls, *, blank: Blank = ..., block_size: int | None = ..., cache_dir: Name | None = ...,
    classes: Sequence[str] | None = ..., columns: Columns = ..., comment: str | None = ..., exclude: Any = ...,
    format: Format = ..., group: int | None = ..., header: Header = ..., label: str | None = ...,
    load: Callable[[Record], Any] | None = ..., locality: Literal['none', 'node'] = ...,
    mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., progress: bool | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., root: Name | None = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., storage: Storage | None = ..., window: int | None = ...,
    world_size: int | None = ...
) -> RankDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., cache_dir: str | os.PathLike[str] | None = ..., copy: bool = ...,
    decode: bool | Mapping[str, Callable[[bytes], Any] | None] | Callable[[Sample], Sample] | None = ...,
    exclude: Any = ..., group: int | None = ..., load: Callable[[Sample], Any] | None = ...,
    locality: Literal['none', 'node'] = ..., mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., progress: bool | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., storage: Storage | None = ..., window: int | None = ...,
    window_shards: int = ..., world_size: int | None = ..., write_index: bool = ...
) -> ShardDataset: ...
@overload
def open(
    source: Urls, *, buffer_bytes: int = ...,
    decode: bool | Mapping[str, Callable[[bytes], Any] | None] | Callable[[Sample], Sample] | None = ...,
    handler: Handler | None = ..., load: Callable[[Sample], Any] | None = ...,
    mesh: dist.device_mesh.DeviceMesh | None = ..., process_group: dist.ProcessGroup | None = ...,
    rank: int | None = ..., seed: int = ..., shuffle: Literal['shards', 'none'] = ...,
    storage: Storage | None = ..., world_size: int | None = ...
) -> StreamShards: ...
@overload
def open(
    source: Urls, *, allow_pickle: bool | None = ..., block_size: int | None = ...,
    cache_dir: Cache | str | os.PathLike[str] | None = ..., columns: Sequence[str] | None = ..., exclude: Any = ...,
    group: int | None = ..., images: ImageType | None = ..., load: Callable[[dict[str, Any]], Any] | None = ...,
    locality: Literal['none', 'node'] = ..., mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., split: str | None = ..., storage: Storage | None = ...,
    validate_hash: str | None = ..., window: int | None = ..., world_size: int | None = ...
) -> MDSDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., cache_bytes: int | None = ...,
    columns: Sequence[str] | None = ..., exclude: Any = ..., group: int | None = ...,
    images: ImageType | None = ..., images_from: str | os.PathLike[str] | None = ...,
    load: Callable[[dict[str, Any]], Any] | None = ..., locality: Literal['none', 'node'] = ...,
    mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., split: str | None = ..., storage: Storage | None = ...,
    window: int | None = ..., window_shards: int = ..., world_size: int | None = ...
) -> TableDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., exclude: Any = ..., group: int | None = ...,
    labels: Urls | None = ..., load: Callable[[Any], Any] | None = ..., locality: Literal['none', 'node'] = ...,
    mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., storage: Storage | None = ..., window: int | None = ...,
    world_size: int | None = ...
) -> ArrayDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., dtype: npt.DTypeLike | None = ..., end_token: int | None = ...,
    exclude: Any = ..., group: int | None = ..., load: Callable[[torch.Tensor], Any] | None = ...,
    locality: Literal['none', 'node'] = ..., mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    pad_token: int = ..., process_group: dist.ProcessGroup | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ..., sequence_length: int,
    shuffle: Literal['global', 'block', 'none'] = ..., storage: Storage | None = ..., stride: int | None = ...,
    token_type: str = ..., window: int | None = ..., world_size: int | None = ...
) -> TokenDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., dtype: npt.DTypeLike | None = ..., end_token: int | None = ...,
    exclude: Any = ..., group: int | None = ..., load: Callable[[torch.Tensor], Any] | None = ...,
    locality: Literal['none', 'node'] = ..., mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., storage: Storage | None = ..., token_type: str = ...,
    window: int | None = ..., world_size: int | None = ...
) -> DocumentDataset: ...
@overload
def open(
    source: Urls, *, allow_pickle: bool | None = ..., blank: Blank = ..., block_size: int | None = ...,
    cache_bytes: int | None = ..., cache_dir: Any = ..., classes: Sequence[str] | None = ..., columns: Any = ...,
    comment: str | None = ..., copy: bool = ..., exclude: Any = ..., flip: bool = ..., format: Format = ...,
    group: int | None = ..., header: Header = ..., images_from: str | os.PathLike[str] | None = ...,
    index: str | os.PathLike[str] | bool | None = ..., label: str | None = ..., labels: Urls | None = ...,
    locality: Literal['none', 'node'] = ..., max_pixels: int = ..., mesh: dist.device_mesh.DeviceMesh | None = ...,
    mini_epochs: int = ..., process_group: dist.ProcessGroup | None = ..., progress: bool | None = ...,
    rank: int | None = ..., remainder: Literal['pad', 'drop', 'uneven'] = ..., root: Name | None = ...,
    row: bool = ..., seed: int = ..., shuffle: Literal['global', 'block', 'none'] = ...,
    size: int | tuple[int, int] | None = ..., split: str | None = ..., storage: Storage | None = ...,
    target: Callable[[Any], dict[str, Any]] | None = ...,
    transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = ...,
    validate_hash: str | None = ..., window: int | None = ..., window_shards: int = ...,
    world_size: int | None = ..., write_index: bool = ...
) -> ImageDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., clips: Any = ..., exclude: Any = ..., flip: bool = ...,
    frames: int = ..., group: int | None = ..., index: str | os.PathLike[str] | None = ...,
    labels: Sequence[Any] | None = ..., locality: Literal['none', 'node'] = ..., max_pixels: int | None = ...,
    mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., progress: bool | None = ..., random_start: bool | None = ...,
    rank: int | None = ..., remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., size: int | tuple[int, int] | None = ..., step: int = ...,
    storage: Storage | None = ..., stride: int | None = ...,
    transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = ..., window: int | None = ...,
    world_size: int | None = ...
) -> VideoDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., channels: int | None = ..., clips: Any = ..., exclude: Any = ...,
    group: int | None = ..., index: str | os.PathLike[str] | None = ..., labels: Sequence[Any] | None = ...,
    locality: Literal['none', 'node'] = ..., mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., progress: bool | None = ..., random_start: bool | None = ...,
    rank: int | None = ..., remainder: Literal['pad', 'drop', 'uneven'] = ..., sample_rate: int | None = ...,
    seconds: float | None = ..., seed: int = ..., shuffle: Literal['global', 'block', 'none'] = ...,
    storage: Storage | None = ..., stride: float | None = ...,
    transform: Callable[[torch.Tensor], Any] | None = ..., window: int | None = ..., world_size: int | None = ...
) -> AudioDataset: ...
@overload
def open(
    source: Urls, *, block_size: int | None = ..., cache_bytes: int | None = ...,
    columns: Sequence[str] | None = ..., delta_timestamps: Mapping[str, Sequence[float]] | None = ...,
    episodes: Sequence[int] | None = ..., exclude: Any = ..., group: int | None = ...,
    index: str | os.PathLike[str] | None = ..., locality: Literal['none', 'node'] = ...,
    max_pixels: int | None = ..., mesh: dist.device_mesh.DeviceMesh | None = ..., mini_epochs: int = ...,
    process_group: dist.ProcessGroup | None = ..., progress: bool | None = ..., rank: int | None = ...,
    remainder: Literal['pad', 'drop', 'uneven'] = ..., seed: int = ...,
    shuffle: Literal['global', 'block', 'none'] = ..., size: int | tuple[int, int] | None = ...,
    tolerance_s: float = ..., transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = ...,
    window: int | None = ..., world_size: int | None = ...
) -> LeRobotDataset: ...
def folder_manifest(path: str) -> dict[str, Any] | None: ...
def kind_of(source: Urls, **options: Any) -> str: ...
def shards_in(path: str, endings: tuple[str, ...] = ...) -> list[str]: ...
