"""Hugging Face Trainer: trains from our loaders, and goes on from each of its checkpoints as if nothing had been."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from integration_support import Noisy

import penstock as ps
from penstock.errors import ConfigError, StateError

transformers = pytest.importorskip("transformers")
from penstock.integrations.transformers import LoaderPosition, PenstockTrainer, TrainerLoaders  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    """Accelerate keeps its state in singletons."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Model(torch.nn.Module):
    """One layer, which notes what it is given, and draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)
        self.seen: list[Any] = []

    def forward(self, items: Any) -> dict[str, Any]:
        self.seen.append(items.tolist())
        scores = torch.nn.functional.dropout(self.layer(items.float() / 32), training=self.training)
        return {"loss": scores.square().mean(), "scores": scores}


def named(samples: list[Any]) -> dict[str, Any]:
    return {"items": torch.stack(samples)}


def make(**how: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(Noisy(30), **{"batch_size": 4, "shuffle": "global", "seed": 3, "collate_fn": named, **how})


def arguments(folder: Path, **options: Any) -> Any:
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "save_steps": 1}
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2}
    return transformers.TrainingArguments(str(folder), **{**quiet, **sizes, **options})


def train(folder: Path, resume: str | None = None, trainer: Any = PenstockTrainer, **options: Any) -> Any:
    run = trainer(Model(), arguments(folder, **options), train_loader=make())
    run.train(resume_from_checkpoint=resume)
    return run


def test_goes_on_from_every_checkpoint(tmp_path: Path) -> None:
    """Eight batches an epoch, three a step: the third step of an epoch has two. Weights are equal at the end, too."""
    whole = train(tmp_path, gradient_accumulation_steps=3)
    expected = [batch["items"].tolist() for loader in [make()] for _ in range(2) for batch in loader]
    assert whole.model.seen == expected
    assert whole.state.global_step == 6
    for step, had in [(1, 3), (2, 6), (3, 8), (4, 11), (5, 14)]:
        last = tmp_path / f"checkpoint-{step}"
        rest = train(tmp_path / "other", str(last), gradient_accumulation_steps=3, save_strategy="no")
        assert rest.model.seen == expected[had:]
        assert (rest.state.global_step, rest.state.epoch) == (6, 2)
        assert torch.equal(rest.model.layer.weight, whole.model.layer.weight)
        assert rest._loaders["train"].stats()["batches"] == 16 - had


def test_other_trainers_need_the_callback_alone(tmp_path: Path) -> None:
    class Own(TrainerLoaders, transformers.Trainer):
        def __init__(self, *arguments: Any, train_loader: Any) -> None:
            super().__init__(*arguments, callbacks=[LoaderPosition()])
            self.loader = train_loader

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(self.loader)

    whole = train(tmp_path, trainer=Own, restore_callback_states_from_checkpoint=True)
    last = str(tmp_path / "checkpoint-5")
    rest = train(tmp_path, last, trainer=Own, restore_callback_states_from_checkpoint=True)
    assert rest.model.seen == whole.model.seen[5:]
    again = train(tmp_path, str(tmp_path / "checkpoint-13"), trainer=Own)  # which was saved by the resumed run
    assert again.model.seen == whole.model.seen[13:]


def test_a_trainer_without_the_callback_skips_as_it_always_does(tmp_path: Path) -> None:
    """Its own way to resume leaves out the first batches of the epoch, and our loader makes the others."""

    class Own(TrainerLoaders, transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            self.loader = make()
            return self.accelerator.prepare(self.loader)

    def run(resume: str | None = None) -> Any:
        trainer = Own(Model(), arguments(tmp_path))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run()
    for step in (5, 13):
        rest = run(str(tmp_path / f"checkpoint-{step}"))
        assert rest.model.seen == whole.model.seen[step:]
        assert rest.loader.stats()["batches"] == 16 - step


def test_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    class Plain(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(make())

    with pytest.raises(ConfigError, match="put its TrainerLoaders before"):
        Plain(Model(), arguments(tmp_path)).train()


def test_a_loader_that_was_not_prepared_is_refused_where_the_trainer_would_make_another(tmp_path: Path) -> None:
    """The Trainer's own skipping would read torch's loader, in the order of the first epoch."""

    class Own(TrainerLoaders, transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return make()

    Own(Model(), arguments(tmp_path)).train()
    with pytest.raises(ConfigError, match=r"return self\.accelerator\.prepare\(loader\)"):
        Own(Model(), arguments(tmp_path)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-13"))
    with pytest.raises(ConfigError, match=r"not prepared: return self\.accelerator\.prepare\(loader\)"):
        Own(Model(), arguments(tmp_path), callbacks=[LoaderPosition()]).train()


def test_evaluates_from_a_loader(tmp_path: Path) -> None:
    tests = make(shuffle=False)
    trainer = PenstockTrainer(Model(), arguments(tmp_path), eval_loader=tests)
    assert trainer.gather_function.func.__self__ is trainer.accelerator  # which removes samples that ranks repeat
    assert trainer.evaluate()["eval_samples_per_second"] > 0
    assert [int(item[0]) for batch in trainer.model.seen for item in batch] == list(range(30))
    assert tests.stats()["batches"] == 8


def test_evaluates_in_order_a_data_set_with_its_own_order(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("".join(f"{n}.jpg {n}\n" for n in range(30)))
    rows = ps.RankDataset(str(tmp_path / "rows.txt"), load=attrgetter("label"))
    tests = ps.DataLoader(
        rows, 4, shuffle=False, collate_fn=lambda labels: {"items": torch.tensor([[n, n] for n in labels])}
    )
    trainer = PenstockTrainer(Model(), arguments(tmp_path), eval_loader=tests, eval_dataset=rows)
    trainer.evaluate(rows)
    assert [item[0] for batch in trainer.model.seen for item in batch] == [*range(30)]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size is 8, but batch_size of train_loader is 4"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers would have no effect on train_loader"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PenstockTrainer(Model(), arguments(tmp_path, **options), train_loader=make())


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_data_set_beside_a_loader_is_refused(tmp_path: Path, kind: str) -> None:
    both = {f"{kind}_dataset": Noisy(30), f"{kind}_loader": make()}
    with pytest.raises(ConfigError, match=f"{kind}_dataset differs from the dataset of {kind}_loader"):
        PenstockTrainer(Model(), arguments(tmp_path), **both)


def test_a_loader_of_torch_is_refused(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        Model(), arguments(tmp_path), train_dataset=Noisy(30), data_collator=named, callbacks=[LoaderPosition()]
    )
    with pytest.raises(ConfigError, match=r"not a Penstock loader.*train_loader="):
        trainer.train()


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    train(tmp_path, num_train_epochs=1)
    last = str(tmp_path / "checkpoint-5")
    with pytest.raises(StateError, match="batches of a step are 1 in the checkpoint and 2 here"):
        train(tmp_path, last, gradient_accumulation_steps=2)
    run = PenstockTrainer(Model(), arguments(tmp_path), train_loader=make(seed=4))
    with pytest.raises(StateError, match="seed is 3 in the state and 4 here"):
        run.train(resume_from_checkpoint=last)


def test_a_checkpoint_without_a_position_begins_its_epoch_anew_if_told(tmp_path: Path) -> None:
    class Alone(PenstockTrainer):
        def add_callback(self, callback: Any) -> None:
            if not isinstance(callback, LoaderPosition):
                super().add_callback(callback)

    whole = train(tmp_path, trainer=Alone, num_train_epochs=1)
    last = str(tmp_path / "checkpoint-3")
    with pytest.raises(StateError, match="saved without LoaderPosition"):
        train(tmp_path, last)
    anew = train(tmp_path, last, num_train_epochs=1, ignore_data_skip=True)
    assert anew.model.seen[:5] == whole.model.seen[:5]
