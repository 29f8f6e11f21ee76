"""Every public name of the package says what it is: modules, classes, functions, methods without a leading underscore.

The rule is in CONTRIBUTING.md: what overrides a documented method of a class of ours, or implements one of a protocol
of ours, may say nothing if it has nothing to add. So may the setter of a property, and the signatures of an overloaded
function, whose implementation says it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "penstock"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def last_name(node: ast.expr) -> str:
    """Of ``a.b.C[T]``: C."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Classes and functions, under an ``if`` or ``try``, too."""
    for node in body:
        if isinstance(node, Definition):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions([*node.body, *node.orelse])


def public(body: list[ast.stmt]) -> list[Definition]:
    return [node for node in definitions(body) if not node.name.startswith("_")]


class Documented:
    """Which methods have docstrings, by the name of their class; classes of one name count as one."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.bases: dict[str, set[str]] = {}
        self.methods: dict[str, set[str]] = {}
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.bases.setdefault(node.name, set()).update(map(last_name, node.bases))
                    said = {m.name for m in public(node.body) if ast.get_docstring(m)}
                    self.methods.setdefault(node.name, set()).update(said)
        self.protocols = set().union(*(self.methods[name] for name, bases in self.bases.items() if "Protocol" in bases))

    def inherited(self, node: ast.ClassDef) -> set[str]:
        """Methods that a base class or a protocol documents."""
        found, todo = set(self.protocols), [*map(last_name, node.bases)]
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                found |= self.methods.get(name, set())
                todo += self.bases.get(name, set())
        return found


def silent(sources: dict[str, str]) -> list[str]:
    """What has no docstring and needs one, as ``file: name``."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    documented = Documented(trees)

    def within(body: list[ast.stmt], prefix: str, inherited: set[str]) -> Iterator[str]:
        for node in public(body):
            setter = any(getattr(d, "attr", "") in ("setter", "deleter") for d in node.decorator_list)
            signature = any(last_name(d) == "overload" for d in node.decorator_list)
            if not ast.get_docstring(node) and node.name not in inherited and not setter and not signature:
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.", documented.inherited(node))

    return [
        *(f"{name}: no docstring of the module" for name, tree in trees.items() if not ast.get_docstring(tree)),
        *(f"{name}: {found}" for name, tree in trees.items() for found in within(tree.body, "", set())),
    ]


def test_every_public_name_has_a_docstring() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    assert len(sources) > 300
    assert silent(sources) == []


def test_what_is_missing_is_found() -> None:
    base = '"""Base."""\nclass Base:\n    """A."""\n    def run(self):\n        """Said."""\n    def _own(self): ...\n'
    other = (
        '"""Other."""\nclass Child(module.Base[int]):\n    """B."""\n    def run(self): ...\n    def more(self): ...\n'
        "    @property\n    def x(self):\n        '''X.'''\n    @x.setter\n    def x(self, value): ...\n"
        "class Alone:\n    def run(self): ...\nif True:\n    def late(): ...\n"
    )
    protocol = '"""P."""\nclass P(Protocol):\n    """P."""\n    def done(self):\n        """Said."""\n'
    mine = '"""M."""\nclass M:\n    """M."""\n    def done(self): ...\n'
    assert silent({"a": base, "b": other, "c": "x = 1\n", "d": protocol, "e": mine}) == [
        "c: no docstring of the module",
        "b: Child.more",
        "b: Alone",
        "b: Alone.run",
        "b: late",
    ]
