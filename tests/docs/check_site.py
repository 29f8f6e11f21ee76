"""Check the built site: `python tests/docs/check_site.py site [--external]`; what is wrong goes to standard output.

Every link and anchor of the pages resolves, nothing is loaded from elsewhere, every public name is in the reference,
and every page is in the search index. Addresses of other sites are tried with ``--external`` only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

PACKAGES = (
    *("penstock", "penstock.manifest", "penstock.order", "penstock.samplers", "penstock.datasets", "penstock.loader"),
    *("penstock.shards", "penstock.shards.mds", "penstock.wds", "penstock.images.decode", "penstock.images.sizes"),
    *("penstock.images.region", "penstock.images.transforms", "penstock.storage", "penstock.compat"),
    *(
        "penstock.server",
        "penstock.tools.profiling",
        "penstock.tools.planning",
        "penstock.tools.quality",
        "penstock.errors",
    ),
    *("penstock.integrations.accelerate", "penstock.integrations.transformers"),
    *("penstock.compat.rank_dataset", "penstock.compat.mpdataset"),
)
# Names that modules of ours share and no user calls. Those of a package that are not here are in the reference.
INTERNAL = {
    *(f"penstock.order.{name}" for name in ("BlockShuffle", "NodeShuffle", "SHUFFLES", "derive_key")),
    *(f"penstock.shards.{name}" for name in ("Member", "base_and_extension", "compression_of", "group", "open_stream")),
    *(f"penstock.shards.{name}" for name in ("split_name", "walk", "walk_stream")),
    *(
        f"penstock.storage.{name}"
        for name in ("UNWRITABLE", "file_lock", "io_error", "is_writable", "write_atomically")
    ),
    *(f"penstock.tools.planning.{name}" for name in ("Dealing", "Packing", "check_dealing", "deal", "epochs_of")),
    *(f"penstock.tools.planning.{name}" for name in ("memory_of", "needs_of", "start_up_of")),
    *(f"penstock.tools.quality.{name}" for name in ("Invertible", "classes_in", "runs_in")),
    "penstock.images.sizes.MAX_ERRORS",
}
LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src"}
LOADED_RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "prefetch"}


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what one tag says."""
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])
        if tag == "link" and LOADED_RELATIONS & set(values.get("rel", "").split()):
            self.loaded.append(values.get("href", ""))


def read(site: Path) -> dict[str, Page]:
    """All pages, by their address within the site."""
    pages = sorted(site.rglob("*.html"))
    return {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in pages}


def broken(site: Path, pages: dict[str, Page]) -> list[str]:
    """Links that lead nowhere, and what would be loaded from elsewhere."""
    problems = []
    for name, page in pages.items():
        problems += [f"{name}: loads {url}" for url in page.loaded if is_external(url)]
        for link in [*page.links, *page.loaded]:
            if is_external(link):
                if not well_formed(link):
                    problems.append(f"{name}: {link}: no address")
                continue
            parts = urlsplit(urljoin("/" + name, link))
            path, anchor = unquote(parts.path).lstrip("/"), unquote(parts.fragment)
            path = path + "index.html" if path.endswith("/") or not path else path
            if not (site / path).is_file():
                problems.append(f"{name}: {link}: no such file")
            elif anchor and path in pages and anchor not in pages[path].anchors:
                problems.append(f"{name}: {link}: no such anchor")
    return problems


def is_external(link: str) -> bool:
    """Whether a link leads out of the site."""
    parts = urlsplit(link)
    return bool(parts.netloc or (parts.scheme and parts.scheme != "data"))


def well_formed(link: str) -> bool:
    """Whether it could be the address of something."""
    parts = urlsplit(link)
    if parts.scheme == "mailto":
        return "@" in parts.path
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not any(c.isspace() for c in link)


def undocumented(pages: dict[str, Page]) -> list[str]:
    """Public names that the reference does not have, under this or another name, and internal ones that it has."""
    named = {anchor for page in pages.values() for anchor in page.anchors if anchor.startswith("penstock.")}
    shown = set()
    for anchor in named:
        try:
            shown.add(id(pkgutil.resolve_name(anchor)))
        except (AttributeError, ImportError):
            continue  # an attribute of instances
    exported = {f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__}
    problems = [f"{name}: internal, and in the reference" for name in sorted(INTERNAL & named)]
    problems += [f"{name}: internal, and not there" for name in sorted(INTERNAL - exported)]
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            is_there = f"{package}.{name}" in named or (callable(value) and id(value) in shown)
            if f"{package}.{name}" in INTERNAL:
                continue
            if not is_there and not isinstance(value, types.ModuleType) and not name.startswith("_"):
                problems.append(f"{package}.{name}: not in the reference")
    return problems


def not_searched(site: Path, pages: dict[str, Page]) -> list[str]:
    """Pages that the search does not know."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    known = {entry["location"].partition("#")[0] or "index.html" for entry in index["docs"]}
    return [f"{name}: not in the search index" for name in pages if name not in known and name != "404.html"]


def unreachable(pages: dict[str, Page]) -> list[str]:
    """Addresses of other sites that do not answer."""
    links = {link for page in pages.values() for link in page.links if urlsplit(link).scheme in ("http", "https")}

    def tried(link: str) -> str | None:
        try:
            with urllib.request.urlopen(urllib.request.Request(link, headers={"User-Agent": "check_site"}), timeout=20):
                return None
        except (OSError, ValueError) as error:
            return f"{link}: {error}"

    with ThreadPoolExecutor(8) as pool:
        return [problem for problem in pool.map(tried, sorted(links)) if problem]


def check(site: Path, *, external: bool = False) -> list[str]:
    """Everything that is wrong with a site, one line each."""
    pages = read(site)
    problems = [*broken(site, pages), *undocumented(pages), *not_searched(site, pages)]
    return [*problems, *(unreachable(pages) if external else [])]


def main() -> int:
    """Print what is wrong; 1 if there is anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--external", action="store_true", help="try addresses of other sites, too")
    options = parser.parse_args()
    problems = check(options.site, external=options.external)
    print(*problems, f"{options.site}: {len(problems) or 'no'} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
