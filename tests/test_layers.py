"""Layers: a file imports its own layer and lower ones, and no files import each other in a circle.

Imports in functions count; those for types alone do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "penstock"
_BOTTOM = (
    "cores distributed errors hashing html_page lazy memory processes progress random stages state storage svg threads "
    "warn_once wording"
)
LAYERS = (
    {"", *_BOTTOM.split()},
    {"manifest", "order"},
    {"images", "plan"},
    {"samplers"},
    {"clips", "server", "shards", "sources", "tables", "tokens"},
    {"datasets"},
    {"ledger", "opening"},
    {"loader"},
    {"compat", "integrations", "wds"},
    {"__main__", "tokenizing", "tools"},
)
"""Packages and files, from the bottom up; each imports its own layer and those before it. "" is penstock itself."""

AT_USE = ["loader.dataloader -> integrations.recreated", "loader.dataloader -> tools.report"]
"""What users call on a loader, and a higher layer does: imported by the method that is called."""

FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
MODULES = {name.removesuffix("__init__").removesuffix("."): path for name, path in FILES.items()}


@cache
def lazy_names(package: str) -> dict[str, str]:
    """Return the module behind each name that a package imports when it is used."""
    text = MODULES[package].read_text()
    if "lazy.names" not in text:
        return {}
    nodes = list(ast.walk(ast.parse(text)))
    assigned = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy.names"]
    tables = [assigned.get(ast.unparse(call.args[1]), call.args[1]) for call in calls]
    modules = [(home, names) for table in tables for home, names in ast.literal_eval(table).items()]
    return {name: f"{package}.{home}".lstrip(".") for home, names in modules for name in names}


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
        elif isinstance(node, ast.Call) and _last(node.func) == "import_module":
            yield from (str(value.value) for value in node.args if isinstance(value, ast.Constant))
        else:
            yield from imports(node)


def _last(function: ast.expr) -> str:
    """Return the last word of a name with dots."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


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


# Seconds, and each process of a test run imports this file.
@cache
def graph() -> dict[str, set[str]]:
    """Return what each of our modules imports of ours."""
    return {module: imported_by(module) for module in MODULES}


def edges() -> list[tuple[str, str]]:
    """Return each module with each that it imports."""
    return [(importer, imported) for importer, found in graph().items() for imported in found]


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
            waiting += graph()[module]
    return end in seen


def test_imports_go_down() -> None:
    upward = sorted(f"{a} -> {b}" for a, b in edges() if layer(a) < layer(b))
    assert upward == AT_USE, "import from a lower layer, or move down what both need"


def test_no_files_import_each_other() -> None:
    circles = sorted(f"{a} -> {b}" for a, b in edges() if reaches(b, a))
    assert circles == [], "move down what both need"
