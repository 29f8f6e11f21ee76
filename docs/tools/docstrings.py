"""Docstrings as Markdown: ``>>>`` blocks and aligned columns become code, names of the reference links to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
PROMPT = re.compile(r"^( *)>>> .*(?:\n\1(?! *$).+)*", re.MULTILINE)
COLUMNS = re.compile(r"^(\S.* {3,}\S.*\n){3,}", re.MULTILINE)
NAME = re.compile(r"(?<![`\w\[])`((?:penstock\.)?[\w.]+)`(?![`\]])")


def documented() -> dict[str, str]:
    """What docstrings call a public name, and the name that the reference has it under."""
    found: dict[str, str] = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for path in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            for name in (path, *(f"{path}.{member}" for member in exported(path))):
                if (ROOT / "src" / f"{name.replace('.', '/')}.py").is_file() and name != path:
                    continue  # a module that a package exports has no place on its page
                found[name] = name
                found.setdefault(name.rpartition(".")[2], name)
    return found


def exported(module: str) -> list[str]:
    """`__all__` of a module of ours without what begins with an underscore; nothing if that is no module."""
    base = ROOT / "src" / module.replace(".", "/")
    for source in (base / "__init__.py", base.with_suffix(".py")):
        if source.is_file():
            for node in ast.parse(source.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
                    return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    return []


class Docstrings(griffe.Extension):
    """Rewrites each docstring as it is read, and shows what was made of a function as that function."""

    def __init__(self) -> None:
        self.names = documented()

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of a module, a class, a function or an attribute."""
        if obj.docstring is not None:
            obj.docstring.value = self.markdown(obj.docstring.value, obj.name)

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Give ``map = pipelinefilter(_map)`` and ``shuffle = Shuffle`` the arguments and words of the right side."""
        for name, member in list(mod.members.items()):
            if member.is_alias or not member.is_attribute or member.docstring is not None:
                continue
            called = re.fullmatch(r"(?:pipelinefilter\()?(\w+)\)?", str(member.value))
            origin = mod.members.get(called[1]) if called else None
            if origin is not None and not origin.is_alias and (origin.is_function or origin.is_class):
                mod.set_member(name, as_function(name, member, origin))

    def markdown(self, text: str, own: str) -> str:
        """A docstring of the object `own`, as Markdown."""

        def link(match: re.Match[str]) -> str:
            target = self.names.get(match[1])
            return f"[`{match[1]}`][{target}]" if target and match[1] != own else match[0]

        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        text = COLUMNS.sub(lambda match: f"```text\n{match[0]}```\n", text)
        parts, end = [], 0
        for block in PROMPT.finditer(text):
            indent = block[1]
            parts += [NAME.sub(link, text[end : block.start()]), f"{indent}```pycon\n{block[0]}\n{indent}```"]
            end = block.end()
        return "".join([*parts, NAME.sub(link, text[end:])])


def as_function(name: str, member: Any, origin: Any) -> griffe.Function:
    """A function of this name with the docstring of the other, and its arguments but the first: the source, or self."""
    function = origin.members["__init__"] if origin.is_class else origin
    return griffe.Function(
        name,
        parameters=griffe.Parameters(*list(function.parameters)[1:]),
        lineno=member.lineno,
        endlineno=member.endlineno,
        docstring=origin.docstring,
    )
