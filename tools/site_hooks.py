"""Hooks of mkdocs: pages that lie outside docs/, notebooks, links between them, and drawings of plans."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from site_pages import page_of_notebook, relinked, with_drawings

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
RESULTS = ROOT / "benchmarks/results"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/, and those of notebooks."""
    for name in OUTSIDE:
        _add(files, config, name, ROOT / name)
    for path in [*RESULTS.glob("*.md"), *RESULTS.glob("*/*.svg")]:
        _add(files, config, path.relative_to(ROOT).as_posix(), path)
    for path in (ROOT / "docs/tutorials").glob("*.ipynb"):
        files.remove(files.src_uris[f"tutorials/{path.name}"])
        page = page_of_notebook(path.read_text())
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Lead links to pages of the site, and draw plans."""
    uri = page.file.src_uri
    return with_drawings(relinked(markdown, _file_of(uri), lambda file: _page_of(file, files), uri))


def _add(files: Files, config: Any, uri: str, path: Path) -> None:
    files.append(File.generated(config, uri, content=path.read_bytes() if path.suffix == ".svg" else path.read_text()))


def _file_of(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return uri if uri in OUTSIDE or uri.startswith("benchmarks/") else f"docs/{uri}"


def _page_of(file: str, files: Files) -> str | None:
    """The page, or the picture, that a file of the repository is on the site."""
    if file == "README.md":
        return "index.md"
    uri = file.removeprefix("docs/").replace(".ipynb", ".md")
    found = [uri, posixpath.join(uri, "index.md"), posixpath.join(uri, "README.md")]
    return next((name for name in found if name in files.src_uris), None)
