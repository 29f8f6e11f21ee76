"""Cooperation with libraries that recreate our loader from its attributes, without patching them.

Accelerate reads the attributes of a loader and creates a torch loader from them: `AccelerateGuard` refuses that.
Lightning calls ``type(loader)`` again, with a sampler for the rank, and gets the arguments in one of two ways::

    loader created in a hook      the arguments that Lightning recorded, made usable by `drop_base_record` and
                                  `convert_positional_arguments`
    loader created before         the attributes of the same names

    new = type(loader)(**arguments, sampler=torch's DistributedSampler)
    for args, function in record of assignments: function(new, *args)          `Assignments` supplies the record

Lightning first checks ``isinstance(loader.sampler, DistributedSampler)`` and does not touch such a loader. Therefore
our samplers of a share belong to that class, see `penstock.samplers.shares`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import ConfigError

__all__ = [
    "RECORD",
    "AccelerateGuard",
    "Assignments",
    "convert_positional_arguments",
    "drop_base_record",
]

RECORD = "__pl_attrs_record"
"""Attribute in which Lightning looks for operations on a recreated loader."""

_ARGS, _KWARGS, _NAMES = "__pl_saved_args", "__pl_saved_kwargs", "__pl_saved_arg_names"


class AccelerateGuard:
    """The attribute ``_is_accelerate_prepared``, which ``Accelerator.prepare`` tests before it creates a torch loader.

    Only that truth test raises, because tools read every attribute of a loader and must not fail. A program that sets
    the attribute disables Accelerate's change.
    """

    def __bool__(self) -> bool:
        raise ConfigError(
            "accelerate.Accelerator would replace this DataLoader by torch's, without its workers, seed and state: "
            "write `from penstock.integrations.accelerate import Accelerator` instead of `from accelerate import "
            "Accelerator`; in a Trainer, use penstock.integrations.transformers.PenstockTrainer or put its "
            "TrainerLoaders before the Trainer's class. loader._is_accelerate_prepared = True disables the change"
        )

    def __repr__(self) -> str:
        return "<refused where accelerate.Accelerator asks for it>"


@contextmanager
def drop_base_record(loader: Any) -> Iterator[None]:
    """Context manager that drops a record of arguments created inside: it belongs to a base class with other arguments.

    Lightning records arguments of the loader classes that are imported before a hook such as ``train_dataloader``. For
    a class imported in the hook, only the base class's constructor is recorded. Without a record, Lightning reads the
    attributes of the same names.
    """
    recorded = _ARGS in vars(loader)
    yield
    if not recorded:
        for name in [name for name in vars(loader) if name.startswith("__pl_")]:
            del vars(loader)[name]


def convert_positional_arguments(loader: Any, dataset: Any) -> None:
    """Convert positional arguments in Lightning's record to keyword arguments, since it adds others by keyword.

    Positional-only arguments and ``*args`` of a subclass stay. ``split`` and the ranks are removed, because Lightning's
    sampler replaces them. ``dataset`` is the one that the loader reads.
    """
    record = vars(loader)
    if _ARGS not in record:
        return
    args, kwargs = record[_ARGS], dict(record[_KWARGS])
    parameters = list(inspect.signature(type(loader).__init__).parameters.values())[1 : 1 + len(args)]
    if args and len(parameters) == len(args) and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters):
        kwargs |= {one.name: value for one, value in zip(parameters, args, strict=True)}
        record[_ARGS], record[_NAMES] = (), ()
    if isinstance(kwargs.get("split"), bool | None):
        for name in ("split", "rank", "world_size", "process_group", "mesh"):
            kwargs.pop(name, None)
    if "dataset" in kwargs:
        kwargs["dataset"] = dataset
    record[_KWARGS] = kwargs


class Assignments:
    """Operations for Lightning to run on a recreated loader: pairs of arguments and a function.

    The first one makes the new loader read the old one's order. The others are the assignments that Lightning recorded
    on the old loader. Private attributes are left out, since the new loader starts fresh.

    """

    def __get__(self, loader: Any, owner: type) -> Any:
        return self if loader is None else [((loader,), _take_place), *vars(loader).get(RECORD, ())]

    def __set__(self, loader: Any, record: list[tuple[tuple[Any, ...], Any]]) -> None:
        vars(loader)[RECORD] = kept = []
        for args, function in record:
            name = args[0]
            if isinstance(name, str) and name != "pipeline" and not name.startswith("_"):
                kept.append((args, function))


def _take_place(made: Any, other: Any) -> None:
    # Imported only when Lightning recreates a loader.
    from penstock.integrations.recreated import take_place

    take_place(made, other)
