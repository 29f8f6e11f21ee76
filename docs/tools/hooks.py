"""What the site adds to MkDocs: pages of files that lie outside of docs/, and links to them that work in both places.

The Markdown files at the root, the licence, the examples, and whatever a page links to get pages under ``repository/``,
so that a relative link such as ``../examples/train_ddp.py`` means the same on the site as in a repository browser.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^()\s#]+)(?=#[^()\s]*\)|\))")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".c": "c"}


def on_config(config: Any) -> Any:
    """Add decisions, texts at the root and examples to the navigation, so that none has to be listed."""
    project = next(group["Project"] for group in config.nav if "Project" in group)
    next(group["Decisions"] for group in project if "Decisions" in group).extend(decisions())
    paths = [path for entry in project if isinstance(entry, dict) for path in entry.values()]
    listed = {path for path in paths if isinstance(path, str)}
    project += [path for path in map(page_of, texts()) if path not in listed]
    project.append({"Examples": [{path.removeprefix("examples/"): page_of(path)} for path in examples()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of files outside of docs/."""
    linked: set[str] = set()
    for file in files.documentation_pages():
        rewritten(file.content_string, "docs/" + file.src_uri, lambda target: linked.add(target) or "")
    for name in filter(lambda name: name.endswith(".md"), texts()):
        rewritten((ROOT / name).read_text(encoding="utf-8"), name, lambda target: linked.add(target) or "")
    outside = {name for name in linked if not name.startswith("docs/") and (ROOT / name).exists()}
    outside |= {f"{name}/{path.name}" for name in outside for path in programs(ROOT / name)}
    listed = {*texts(), *examples()}
    for name in sorted(listed | outside):
        level = InclusionLevel.INCLUDED if name in listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, page_of(name), content=content_of(ROOT / name, name), inclusion=level))
        for picture, content in pictures(ROOT / name).items():
            files.append(File.generated(config, f"repository/{Path(name).parent}/{picture}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    source = page.file.src_uri
    here = source.removeprefix("repository/") if source.startswith("repository/") else "docs/" + source

    def address(target: str) -> str:
        uri = target.removeprefix("docs/") if target.startswith("docs/") else page_of(target)
        return posixpath.relpath(uri, posixpath.dirname(source))

    return rewritten(markdown, here, address)


def rewritten(markdown: str, here: str, address: Callable[[str], str]) -> str:
    """A text at this place of the repository with its links, outside of code, by a function of what they lead to."""

    def replace(match: re.Match[str]) -> str:
        return address(posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1])))

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replace, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replace, markdown[end:])])


def texts() -> list[str]:
    """The texts at the root of the repository."""
    return sorted([*(path.name for path in ROOT.glob("*.md")), "LICENSE"])


def decisions() -> list[str]:
    """Return the pages of decisions, in the order of their index."""
    index = (ROOT / "docs" / "decisions" / "index.md").read_text(encoding="utf-8")
    return [f"decisions/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", index)]


def examples() -> list[str]:
    """Programs and notebooks."""
    found = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/*.ipynb")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def programs(folder: Path) -> list[Path]:
    """The programs in a folder; none if it is a file."""
    return sorted(folder.glob("*.py"))


def page_of(name: str) -> str:
    """Where the site has a file of the repository."""
    return f"repository/{name}" if name.endswith(".md") else f"repository/{name}.md"


def content_of(path: Path, name: str) -> str:
    """A file as Markdown; a folder as a list of its programs."""
    if path.is_dir():
        return f"# {name}\n\n" + "".join(f"* [{one.name}]({path.name}/{one.name})\n" for one in programs(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return "\n\n".join(cell_of(cell) for cell in json.loads(text)["cells"])
    return f"# {path.name}\n\n`{name}`\n\n{fenced(text, LANGUAGES.get(path.suffix, 'text'))}\n"


def cell_of(cell: Any) -> str:
    """A cell of a notebook as Markdown, with what it has printed and shown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [fenced(source, "python")]
    for output in cell["outputs"]:
        if "text" in output:
            parts.append(fenced("".join(output["text"]), "text"))
        if "image/jpeg" in output.get("data", {}):
            parts.append(f'<img src="{cell["id"]}.jpg" alt="The output of the cell">')
    return "\n\n".join(parts)


def pictures(path: Path) -> dict[str, bytes]:
    """The pictures that a notebook shows, by the names that its page has for them; none of other files."""
    if path.suffix != ".ipynb":
        return {}
    found = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            if "image/jpeg" in output.get("data", {}):
                found[f"{cell['id']}.jpg"] = base64.b64decode("".join(output["data"]["image/jpeg"]))
    return found


def fenced(code: str, language: str) -> str:
    """A block of code, whatever is in it."""
    return f"~~~~{language}\n{code.rstrip()}\n~~~~"
