"""The signatures of `penstock.open` for editors and type checkers: one for each kind of dataset.

python tests/opening/test_signatures.py --write     write them again, after a constructor has changed
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import opening
from penstock.opening.kinds import OF_IMAGES, constructors_of, image_options
from penstock.plan import share_options

STUB = Path(str(opening.__file__)).with_suffix(".pyi")
ORDER = (
    *("manifests", "shards", "compressed shards", "MDS folders", "tables", "arrays", "tokens", "documents", "images"),
    *("videos", "recordings", "LeRobot folders"),
)
"""A call takes the first signature that has its options, and ``size=`` alone is for images."""
AMBIGUOUS = ORDER[:5]
"""An option of several of these does not tell the class, so the first signature has it."""
FIRST_LINES = '''\
"""Signatures of `open`, written by tests/opening/test_signatures.py from the constructors."""
'''
LAST_LINES = """
def folder_manifest(path: str) -> dict[str, Any] | None: ...
def kind_of(source: Urls, **options: Any) -> str: ...
def shards_in(path: str, endings: tuple[str, ...] = ...) -> list[str]: ...
"""

Options = dict[str, str]
"""Options as a signature has them: ``{"seed": "seed: int = ..."}``."""


def options_of(*constructors: Any) -> Options:
    """Return the options of constructors, after their source."""
    found: Options = {}
    for function in constructors:
        function = function.__init__ if isinstance(function, type) else function
        for each in [one for one in inspect.signature(function).parameters.values() if one.name != "self"][1:]:
            if each.kind is inspect.Parameter.VAR_KEYWORD:
                hints = share_options.ShareOptions.__annotations__.items()
                found |= {name: f"{name}: {hint.__forward_arg__} = ..." for name, hint in hints}
            else:
                found[each.name] = f"{each.name}: {each.annotation}{'' if each.default is each.empty else ' = ...'}"
    return found


def merged(options: Iterable[Options]) -> Options:
    """Return the options of several kinds of source; one whose types differ is of any type."""
    found: Options = {}
    for each in options:
        for name, text in each.items():
            found[name] = text if found.get(name, text) == text else f"{name}: Any = ..."
    return found


def signatures() -> list[tuple[str, Options]]:
    """Return the class and the options of each signature."""
    taken = {kind: options_of(*constructors_of(kind)) for kind in ORDER if kind != "images"}
    sources = merged(taken[kind] for kind in OF_IMAGES if kind in taken)
    decoding = {name: text for name, text in options_of(ps.ImageDataset).items() if name in image_options()}
    taken["images"] = {name: sources[name] for name in sources.keys() - {"load", "decode", "images"}} | decoding
    several = Counter(name for kind in AMBIGUOUS for name in taken[kind])
    shared = {name: text for name, text in merged(taken[kind] for kind in AMBIGUOUS).items() if several[name] > 1}
    classes = {kind: "ImageDataset" if kind == "images" else constructors_of(kind)[0].__name__ for kind in ORDER}
    return [("SourceDataset | Any", shared), *((classes[kind], taken[kind]) for kind in ORDER)]


def imports(text: str) -> list[str]:
    """Return the imports of the names in signatures, from the modules of the constructors."""
    lines = {"SourceDataset": "from penstock.datasets.source_dataset import SourceDataset"}
    constructors = [each for kind in ORDER if kind != "images" for each in constructors_of(kind)]
    for constructor in [*constructors, ps.ImageDataset]:
        module = sys.modules[constructor.__module__]
        lines[constructor.__name__] = f"from {module.__name__} import {constructor.__name__}"
        for node in ast.walk(ast.parse(inspect.getsource(module) + inspect.getsource(share_options))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                lines |= {each.asname or each.name: f"{start}{ast.unparse(ast.Import([each]))}" for each in node.names}
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return sorted({lines[name] for name in names if name in lines})


def stub() -> str:
    """Return the signatures."""
    written = ['\n__all__ = ["folder_manifest", "kind_of", "open", "shards_in"]\n']
    for returned, options in signatures():
        # Lines break between options, not in their types.
        words = [
            each.replace(" ", "\0") for each in ("source: Urls", "*", *(options[name] for name in sorted(options)))
        ]
        lines = textwrap.wrap(", ".join(words), 116, initial_indent="    ", subsequent_indent="    ")
        written += ["@overload", "def open(", *(line.replace("\0", " ") for line in lines), f") -> {returned}: ..."]
    text = "\n".join(written) + LAST_LINES
    return "\n".join([FIRST_LINES, *imports(text), "from typing import overload", text])


def test_signatures_are_those_of_the_constructors() -> None:
    assert STUB.read_text() == stub(), "run python tests/opening/test_signatures.py --write"


@pytest.mark.parametrize(
    ("call", "wanted"),
    [("shuf", "shuffle="), ("siz", "size="), ("sequence_l", "sequence_length="), ("image", "images_from=")],
)
def test_editors_complete_the_options(call: str, wanted: str) -> None:
    jedi = pytest.importorskip("jedi")
    text = f"import penstock as ps\nps.open('a', {call}"
    assert wanted in [each.name_with_symbols for each in jedi.Script(text).complete()]


def test_a_running_interpreter_knows_the_options() -> None:
    found = inspect.signature(ps.open).parameters
    assert next(iter(found)) == "source"
    assert {"size", "shuffle", "sequence_length", "delta_timestamps"} <= found.keys()
    assert str(inspect.signature(ps.open)).startswith("(source, *, allow_pickle=None, ")


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    STUB.write_text(stub())
