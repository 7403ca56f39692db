"""The site has every public name, every page is in its navigation, and links between pages lead somewhere.

`make docs` builds the site, and `tools/site_shots.py` opens it in a browser.
"""

import importlib
import posixpath
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIGURATION = (ROOT / "mkdocs.yml").read_text()
MODULES = (
    "bandmaster",
    "bandmaster.rl",
    "bandmaster.serve",
    "bandmaster.telemetry",
    "bandmaster.testing",
    "bandmaster.timeline",
    "bandmaster.single_controller.base",
)
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("module", [*MODULES, "bandmaster.single_controller.ray"])
def test_every_public_name_is_in_the_reference(module):
    if module.endswith(".ray"):
        pytest.importorskip("ray")
    documented = re.findall(r"^::: (\S+)$", "".join(page.read_text() for page in DOCS.glob("reference/*.md")), re.M)
    assert len(documented) == len(set(documented))
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    assert names == {name for name in documented if name.rpartition(".")[0] == module}


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"[\s:](\S+\.md)$", CONFIGURATION, re.M))
    notebooks = {f"tutorials/{path.stem}.md" for path in DOCS.glob("tutorials/*.ipynb")}
    results = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/results/*.md")}
    outside = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"}
    assert named == {page.relative_to(DOCS).as_posix() for page in PAGES} | notebooks | results | outside


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if posixpath.splitext(name)[0].startswith("../tutorials/") or "tutorials/" in name:
            file = file.with_suffix(".ipynb")
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert heading in {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", sorted(DOCS.glob("diagrams/*.svg")), ids=lambda path: path.stem)
def test_a_diagram_follows_light_and_dark_and_a_page_describes_it(path):
    text = path.read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title").text
    assert int(root.get("viewBox").split()[2]) <= 420, "wider ones cannot be read on a telephone"
    shown = re.findall(rf"!\[([^\]]*)\]\((?:\.\./)*diagrams/{path.name}\)", "".join(page.read_text() for page in PAGES))
    assert shown and all(shown), "no page shows it, or one lacks its description in words"
