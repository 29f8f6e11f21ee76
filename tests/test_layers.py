"""Layers: a file imports its own layer and lower ones, and no files import each other in a circle.

`UPWARD` and `CIRCLES` hold the imports that break these rules today. Both lists only shrink: a new import fails, and so
does one that is listed and gone. Imports in functions count; those for types alone do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "penstock"
LAYERS = (
    {"", "distributed", "errors", "lazy", "processes", "progress", "random", "stages", "state", "svg", "threads"}
    | {"wording"},
    {"order"},
    {"plan"},
    {"samplers"},
    {"images", "manifest", "server", "shards", "storage", "tables"},
    {"datasets"},
    {"opening"},
    {"loader"},
    {"compat", "integrations", "wds"},
    {"__main__", "cli", "diagnosis", "planning", "profiling", "quality"},
)
"""Packages and files, from the bottom up; each imports its own layer and those before it. "" is penstock itself."""
UPWARD = [
    "loader.configured -> integrations.accelerate",
    "loader.configured -> integrations.lightning",
    "loader.dpex -> integrations.lightning",
    "random -> order.hashing",
    "random -> storage.urls",
    "samplers.alias -> storage.cache",
    "samplers.grouped -> images.sizes",
    "shards.dataset -> datasets.share",
    "shards.dataset -> datasets.share_dataset",
    "shards.decode -> datasets.mapped",
    "shards.mds.dataset -> datasets.place",
    "shards.mds.dataset -> datasets.share",
    "shards.mds.dataset -> datasets.share_dataset",
    "shards.mds.folder -> datasets.base",
    "shards.mds.folder -> datasets.place",
    "shards.stream -> datasets.clock",
    "tables.dataset -> datasets.place",
    "tables.dataset -> datasets.rows_ahead",
    "tables.dataset -> datasets.share",
    "tables.dataset -> datasets.share_dataset",
    "tables.pictures -> datasets.loading",
    "tables.pictures -> datasets.raw",
    "tables.pieces -> datasets.mapped",
    "tables.table -> datasets.mapped",
]
CIRCLES = [
    "images.transforms.base -> images.transforms.compose",
    "images.transforms.compose -> images.transforms.base",
    "images.transforms.compose -> images.transforms.foreign",
    "images.transforms.foreign -> images.transforms.base",
    "integrations.accelerate -> loader.dataloader",
    "integrations.lightning -> loader.dataloader",
    "loader.configured -> integrations.accelerate",
    "loader.configured -> integrations.lightning",
    "loader.dataloader -> loader.configured",
    "wds.decoders -> wds.filters",
    "wds.filters -> wds.decoders",
]

FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
MODULES = {name.removesuffix("__init__").removesuffix("."): path for name, path in FILES.items()}


@cache
def lazy_names(package: str) -> dict[str, str]:
    """Return the module behind each name that a package imports when it is used."""
    nodes = list(ast.walk(ast.parse(MODULES[package].read_text())))
    assigned = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy.names"]
    tables = [assigned.get(ast.unparse(call.args[1]), call.args[1]) for call in calls]
    return {name: f"{package}.{home}".lstrip(".") for table in tables for name, home in ast.literal_eval(table).items()}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full names that a file imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING":
            yield from imports(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(value.value) for value in node.args if isinstance(value, ast.Constant))
        else:
            yield from imports(node)


def module_of(name: str) -> str | None:
    """Return the module that an imported name is in; None where that is not ours."""
    head, _, rest = name.partition(".")
    if head != "penstock":
        return None
    if rest in MODULES:
        return rest
    package, _, last = rest.rpartition(".")
    return lazy_names(package).get(last, package)


def imported_by(module: str) -> set[str]:
    """Return the modules of ours that a module imports."""
    found = map(module_of, imports(ast.parse(MODULES[module].read_text())))
    return {name for name in found if name is not None and name != module}


GRAPH = {module: imported_by(module) for module in MODULES}
EDGES = [(importer, imported) for importer, found in GRAPH.items() for imported in found]


def layer(module: str) -> int:
    """Return the number of a module's layer; each has one."""
    (number,) = (number for number, names in enumerate(LAYERS) if module.partition(".")[0] in names)
    return number


def reaches(begin: str, end: str) -> bool:
    """Return whether a module imports another, directly or through others."""
    seen, waiting = set(), [begin]
    while waiting:
        if (module := waiting.pop()) not in seen:
            seen.add(module)
            waiting += GRAPH[module]
    return end in seen


def check(broken: set[str], listed: list[str]) -> None:
    """Fail if the list of exceptions is not what breaks a rule."""
    assert listed == sorted(listed)
    assert sorted(broken - set(listed)) == [], "new: import from a lower layer, or move down what both need"
    assert sorted(set(listed) - broken) == [], "gone: delete it from the list"


def test_imports_go_down() -> None:
    check({f"{a} -> {b}" for a, b in EDGES if layer(a) < layer(b)}, UPWARD)


def test_no_files_import_each_other() -> None:
    check({f"{a} -> {b}" for a, b in EDGES if reaches(b, a)}, CIRCLES)
