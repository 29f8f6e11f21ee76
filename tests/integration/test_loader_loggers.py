"""What a loader does, in TensorBoard's files, in a run of W&B, and in progress bars: by hand, and by the frameworks."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_support import Range

import penstock as ps
from penstock.errors import ConfigError
from penstock.integrations.loader_logger import LoaderLogger
from penstock.integrations.tensorboard import TensorBoardLogger
from penstock.integrations.wandb import WandbLogger

BLOCK, LAST = 32_768, 4
"""Of LevelDB's log format: bytes of a block, and the kind of a record's last part."""

pytestmark = pytest.mark.filterwarnings("ignore")


class Staged(torch.utils.data.Dataset[Any]):
    """Each sample is decoded."""

    pure = True

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        with ps.stage("decode"):
            return torch.full((100,), float(index))


class Kept(LoaderLogger):
    """Keeps what it is to write."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write(self, values: dict[str, float], step: int) -> None:
        self.lines.append((step, values))


def make(**options: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(Staged(), **{"batch_size": 2, "shuffle": "global", "seed": 0, **options})


def check(values: dict[str, float], prefix: str = "loader") -> None:
    """Numbers that a loader of `Staged` has."""
    assert values[f"{prefix}/samples_per_second"] > 0
    assert 0 < values[f"{prefix}/wait_share"] <= 1
    stages = {name.rpartition("/")[2] for name in values if "ms_per_sample" in name}
    assert {"fetch", "decode", "collate", "hand-over"} <= stages
    assert values[f"{prefix}/ms_per_sample/decode"] > 0


# In a loop.


@pytest.mark.parametrize("how", [{}, {"num_workers": 2, "executor": "process"}])
def test_every_so_many_steps(how: dict[str, Any]) -> None:
    with make(**how) as loader:
        logger = Kept(loader, every=4, prefix="train")
        for _ in range(2):
            for _ in loader:
                logger.step()
    assert [step for step, _ in logger.lines] == [4, 8, 12, 16, 20, 24]
    for _, values in logger.lines:
        check(values, "train")


def test_numbers_are_those_since_the_last_time() -> None:
    loader = make()
    logger = Kept(loader, every=3)
    before: dict[str, Any] = loader.stats()
    for number, _ in enumerate(loader, 1):
        logger.step(100 + number)
        if number % 3 == 0:
            now = loader.stats()
            step, values = logger.lines[-1]
            assert step == 100 + number
            samples, seconds = now["samples"] - before["samples"], now["seconds"] - before["seconds"]
            assert samples == 6
            assert values["loader/samples_per_second"] == pytest.approx(samples / seconds)
            waited = now["wait_seconds"] - before["wait_seconds"]
            assert values["loader/wait_share"] == pytest.approx(waited / seconds)
            collated = now["stages"]["collate"] - before["stages"]["collate"]
            assert values["loader/ms_per_sample/collate"] == pytest.approx(1e3 * collated / samples)
            before = now


def test_statistics_that_were_reset_begin_anew() -> None:
    loader = make()
    logger = Kept(loader, every=4)
    for number, _ in enumerate(loader, 1):
        if number == 6:
            loader.reset_stats()
        logger.step()
    assert [step for step, _ in logger.lines] == [4, 8, 12]
    check(logger.lines[1][1])


def test_nothing_is_logged_where_nothing_came() -> None:
    logger = Kept(make(), every=1)
    logger.step()
    assert logger.lines == []


def test_what_cannot_be_logged_is_refused() -> None:
    with pytest.raises(ConfigError, match="every must be a number of steps"):
        Kept(make(), every=0)
    with pytest.raises(ConfigError, match="a DataLoader has no statistics of a Penstock loader"):
        Kept(torch.utils.data.DataLoader(Range(4)))
    with pytest.raises(ConfigError, match=r"Kept has no loader: pass the loader, or call watch\(loader\)"):
        Kept(every=1).step()
    with pytest.raises(ConfigError, match="takes a SummaryWriter as its first argument, got a DataLoader"):
        TensorBoardLogger(make())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"takes the run of wandb\.init as its first argument, got a DataLoader"):
        WandbLogger(make())


# TensorBoard.


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Read event files back: by name the values of the steps."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(folder))
    events.Reload()
    return {name: {one.step: one.value for one in events.Scalars(name)} for name in events.Tags()["scalars"]}


def at(found: dict[str, dict[int, float]], step: int) -> dict[str, float]:
    return {name: values[step] for name, values in found.items() if step in values}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer, make() as loader:
        logger = TensorBoardLogger(writer, loader, every=5)
        for _ in loader:
            logger.step()
    found = scalars(tmp_path)
    assert {step for values in found.values() for step in values} == {5, 10}
    check(at(found, 5))


# W&B.


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run that writes to a folder and reaches for no network."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    run = wandb.init(project="test", dir=str(tmp_path), settings=wandb.Settings(console="off"))
    yield run
    run.finish()


def history(folder: Path) -> list[dict[str, float]]:
    """Read the run's file back: what was logged, in order."""
    protobuf = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    lines = []
    for data in records(path.read_bytes()):
        record = protobuf.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            lines.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return lines


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, whose blocks begin with the file's header of 7 bytes."""
    whole, place = 1, 7
    parts: list[bytes] = []
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (whole, LAST):
            yield b"".join(parts)
            parts = []


def test_wandb(wandb_run: Any, tmp_path: Path) -> None:
    with make() as loader:
        logger = WandbLogger(wandb_run, loader, every=5)
        for number, _ in enumerate(loader):
            wandb_run.log({"loss": float(number)}, step=number)  # the program's own step goes on as it likes
            logger.step()
    wandb_run.finish()
    lines = history(tmp_path)
    ours = [line for line in lines if "loader/step" in line]
    assert [line["loader/step"] for line in ours] == [5, 10]
    check(ours[0])
    assert [line["loss"] for line in lines if "loss" in line] == list(range(12))


# Lightning.


def lightning_trainer(**options: Any) -> Any:
    pytest.importorskip("lightning.pytorch")
    from lightning_support import trainer

    return trainer(max_epochs=2, **options)


def lightning_model() -> Any:
    from lightning_support import Model

    return Model()


def test_lightning_calls_a_logger() -> None:
    trainer_class = pytest.importorskip("penstock.integrations.lightning")
    logger = Kept(every=4)
    trainer = lightning_trainer(callbacks=[trainer_class.LoaderLogging(logger)], accumulate_grad_batches=2)
    trainer.fit(lightning_model(), make())
    assert [step for step, _ in logger.lines] == [4, 8, 12], "steps of the optimizer: two batches each"
    check(logger.lines[0][1])


def test_lightning_writes_to_its_own_loggers(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    from penstock.integrations.lightning import LoaderLogging

    trainer = lightning_trainer(callbacks=[LoaderLogging(every=6)], logger=CSVLogger(tmp_path))
    trainer.fit(lightning_model(), make())
    (path,) = tmp_path.rglob("metrics.csv")
    names, *lines = path.read_text().splitlines()
    assert "loader/samples_per_second" in names
    assert len(lines) == 4
    with pytest.raises(ConfigError, match="the Trainer has no logger"):
        lightning_trainer(callbacks=[LoaderLogging()]).fit(lightning_model(), make())
    with pytest.raises(ConfigError, match="every=3 applies to the trainer's own loggers: pass it to the Kept"):
        LoaderLogging(Kept(), every=3)


def test_lightning_with_another_loader_is_refused() -> None:
    pytest.importorskip("lightning.pytorch")
    from penstock.integrations.lightning import LoaderLogging

    trainer = lightning_trainer(callbacks=[LoaderLogging(Kept())])
    with pytest.raises(ConfigError, match=r"train from one penstock\.DataLoader"):
        trainer.fit(lightning_model(), torch.utils.data.DataLoader(Range(4)))


@pytest.mark.parametrize("kind", ["LoaderProgressBar", "RichLoaderProgressBar"])
def test_lightnings_progress_bars_show_the_loader(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As Lightning draws them."""
    pytest.importorskip("lightning.pytorch")
    import penstock.integrations.lightning as integration

    bar = getattr(integration, kind)(refresh_rate=1)
    trainer = lightning_trainer(callbacks=[bar], enable_progress_bar=True)
    trainer.fit(lightning_model(), make())
    shown = bar.get_metrics(trainer, trainer.lightning_module)["loader"]
    assert " samples/s · waiting " in shown
    if kind == "LoaderProgressBar":  # rich draws on terminals alone
        out = "".join(capfd.readouterr())
        assert "samples/s · waiting" in out


# Hugging Face.


def test_the_trainer_calls_a_logger(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from penstock.integrations.transformers import LoaderLogging, PenstockTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(100, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).mean() ** 2}

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    logger = Kept(every=8)
    loader = make(collate_fn=named)
    callbacks = [LoaderLogging(logger)]
    PenstockTrainer(Model(), arguments, train_loader=loader, callbacks=callbacks).train()
    assert [step for step, _ in logger.lines] == [8, 16, 24]
    check(logger.lines[-1][1])


def named(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack(samples)}


# Bars of a loop.


def test_tqdm_shows_the_summary() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    loader, out = make(), io.StringIO()
    with tqdm(loader, file=out, mininterval=0, miniters=1, ascii=False) as bar:
        for _ in bar:
            bar.set_postfix_str(loader.summary())
    assert "12/12" in out.getvalue()
    assert "samples/s · waiting " in out.getvalue()


def test_rich_shows_the_summary() -> None:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    loader, out = make(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(TextColumn("{task.fields[loader]}"), console=console) as progress:
        task = progress.add_task("train", total=len(loader), loader="")
        for _ in loader:
            progress.update(task, advance=1, loader=loader.summary(), refresh=True)
    assert "samples/s · waiting " in out.getvalue()


def test_no_tracker_is_imported(tmp_path: Path) -> None:
    """By the modules that are named like them."""
    from interpreter_support import run

    code = (
        "import sys, penstock.integrations.tensorboard, penstock.integrations.wandb;"
        "print(sorted({'tensorboard', 'wandb', 'tensorflow'} & set(sys.modules)))"
    )
    done = run(["-c", code], cwd=tmp_path, env=dict(os.environ), timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
