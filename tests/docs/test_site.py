"""The site is built in strict mode, and nothing in it is broken or missing; see `check_site`.

Its pictures stand alone, and its tools (docs/tools) do what they say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from busy_support import HANG
from check_site import broken, check, not_searched, read, undocumented
from full_run import full_only
from interpreter_support import FULL

import penstock

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.skipif(not FULL, reason="half a minute of building; `make docs` does it, too; PENSTOCK_TEST_FULL=1")
@pytest.mark.slow
def test_site_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    # Not --quiet: warnings that are not logged are not counted by --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check(tmp_path / "site") == []


@full_only("builds sites")
def test_what_is_broken_is_found(tmp_path: Path) -> None:
    (tmp_path / "guides").mkdir()
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text('{"docs": [{"location": "index.html#top"}]}')
    (tmp_path / "plot.svg").touch()
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="https://fonts.example.org/a.css"><link rel="next" href="https://example.org/">'
        '<h1 id="top">x</h1><img src="plot.svg"><img src="https://example.org/b.png"><script src="/none.js"></script>'
        '<a href="#top"></a><a href="#nowhere"></a><a href="guides/page.html#here"></a>'
        '<a href="guides/page.html#x"></a>'
        '<a href="gone.html"></a><a href="https://example.org/a b"></a><a href="htp://example.org"></a>'
        '<a href="mailto:a@example.org"></a>'
    )
    (tmp_path / "guides" / "page.html").write_text('<a name="here" href="../index.html#top"></a><a href="../x.md"></a>')
    pages = read(tmp_path)
    assert broken(tmp_path, pages) == [
        "guides/page.html: ../x.md: no such file",
        "index.html: loads https://fonts.example.org/a.css",
        "index.html: loads https://example.org/b.png",
        "index.html: #nowhere: no such anchor",
        "index.html: guides/page.html#x: no such anchor",
        "index.html: gone.html: no such file",
        "index.html: https://example.org/a b: no address",
        "index.html: htp://example.org: no address",
        "index.html: /none.js: no such file",
    ]
    assert not_searched(tmp_path, pages) == ["guides/page.html: not in the search index"]
    (tmp_path / "index.html").write_text('<h2 id="penstock.manifest.Manifest"></h2>')
    missing = undocumented(read(tmp_path))
    assert "penstock.DataLoader: not in the reference" in missing
    assert "penstock.Manifest: not in the reference" not in missing  # the same thing under another name


def test_links_to_files_outside_of_docs_lead_to_their_pages() -> None:
    pytest.importorskip("mkdocs")
    from hooks import content_of, page_of, rewritten

    text = "[a](../x.py) [b](other.md#c) [d](#e) [f](https://example.org)\n\n```text\n[g](h.md)\n```\n[i](j.md)\n"
    assert rewritten(text, "docs/guides/page.md", str.upper) == (
        "[a](DOCS/X.PY) [b](DOCS/GUIDES/OTHER.MD#c) [d](#e) [f](https://example.org)\n\n```text\n[g](h.md)\n```\n"
        "[i](DOCS/GUIDES/J.MD)\n"
    )
    assert page_of("README.md") == "repository/README.md"
    assert "\n* [train_ddp.py](examples/train_ddp.py)\n" in content_of(ROOT / "examples", "examples")
    program = "examples/train_ddp.py"
    assert content_of(ROOT / program, program).startswith("# train_ddp.py\n\n`examples/train_ddp.py`\n\n~~~~python\n")


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe")
    from docstrings import Docstrings

    columns = "name      what\nb         c d\nlonger    e\n"
    text = f"See `Manifest` and `own`::\n\n>>> a = `Manifest`\n>>> a\n3\n\n{columns}\nEnd.\n"
    assert Docstrings().markdown(text, "own") == (
        "See [`Manifest`][penstock.Manifest] and `own`:\n\n```pycon\n>>> a = `Manifest`\n>>> a\n3\n```\n\n"
        f"```text\n{columns}```\n\nEnd.\n"
    )


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_pictures_stand_alone(path: Path) -> None:
    """They say what they show, follow dark mode, load nothing, and their text stays inside."""
    picture = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    assert not re.search(r"https?:|@import|<image|<script", path.read_text().replace("http://www.w3.org/2000/svg", ""))
    if path.name != "favicon.svg":
        assert picture.findtext(f"{SVG}title")
        assert picture.findtext(f"{SVG}desc")
        assert "prefers-color-scheme: dark" in picture.findtext(f"{SVG}style", "")
    for text in picture.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["x"]) < width
        assert 0 < float(text.attrib["y"]) < height


def test_figures_of_the_first_pages_are_those_of_the_performance_page() -> None:
    measured = set(re.findall(r"[\d.]+", (ROOT / "docs" / "performance.md").read_text().replace(",", "")))
    table = re.findall(r"^\| [^|]+ \| ([\d.,]+) \|", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE)
    assert len(table) == 5
    assert {figure.replace(",", "") for figure in table} <= measured


def test_the_readme_is_short() -> None:
    """The problem, two pictures, a start, a table, two commands and links; figures in detail are on the site."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 2


def test_the_citation_names_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [penstock.__version__]


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda path: path.name)
def test_forms_and_workflows_can_be_read(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    keys = {"ISSUE_TEMPLATE": {"name", "description", "body"}, "workflows": {"name", "permissions", "jobs"}}
    assert path.name == "config.yml" or keys[path.parent.name] <= set(content)


def test_each_ability_of_the_readme_names_a_test_or_a_benchmark() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| | who else | shown by |") :].partition("\n\n")[0].splitlines()[2:]
    assert table
    assert [row for row in table if not re.search(r"\[(test|benchmark)\]\(", row.rpartition("|")[0])] == []
