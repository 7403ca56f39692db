"""Pages of the documentation site that are made from other files. Pure functions; `site_hooks` calls them."""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any

import bandmaster as bm

_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")
_PLAN = re.compile(r"```plan\n(.*?)```", re.DOTALL)
_FENCED = re.compile(r"(```.*?```)", re.DOTALL)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def relinked(text: str, here: str, place_of: Callable[[str], str | None], page: str) -> str:
    """Markdown whose relative links lead to pages of the site.

    Args:
        text: The markdown.
        here: Where it lies in the repository, such as ``benchmarks/README.md``.
        place_of: The page of a file of the repository; None if the site has none.
        page: Where it lies on the site.
    """

    def changed(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith(("mailto:", "/")):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        place = place_of(file)
        if place is None:
            return f"`{file}`" if not match[0].startswith("!") else match[0]
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(page) or '.')}{match[3]}"

    parts = _FENCED.split(text)  # code stays as it is
    return "".join(part if part.startswith("```") else _LINK.sub(changed, part) for part in parts)


def with_drawings(text: str) -> str:
    """Markdown in which fenced blocks of the language ``plan`` became the drawings of `bandmaster.plan`.

    A block has one line, such as ``3D_PROTO, pp=2, dp=2, tp=2, rows=10``; ``gen_pp`` and ``gen_tp`` refine the mesh.
    """
    return _PLAN.sub(lambda match: _drawn(match[1]), text)


def _drawn(line: str) -> str:
    name, *settings = [part.strip() for part in line.split(",")]
    sizes = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
    rows = sizes.pop("rows")
    generation = {axis: sizes.pop(axis) for axis in ("gen_pp", "gen_tp") if axis in sizes}
    mesh = bm.Mesh(**sizes)
    plan = bm.plan(name, mesh.refine(**generation) if generation else mesh, rows=rows)
    return f'<div class="drawing">{plan._repr_svg_()}</div>'


def page_of_notebook(text: str) -> str:
    """A notebook as markdown: its texts, its code, and below each cell what it has printed and returned."""
    cells = json.loads(text)["cells"]
    return "\n\n".join(part for cell in cells for part in _of_cell(cell)) + "\n"


def _of_cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
    elif source.strip():
        yield f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            yield _of_output(output)


def _of_output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _printed("".join(output["text"]))
    if output["output_type"] == "error":
        return _printed("\n".join(output["traceback"]))
    data = output["data"]
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return f'<div class="output">{_joined(data[kind])}</div>'
    return _printed(_joined(data["text/plain"]))


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _printed(text: str) -> str:
    plain = html.escape(_ANSI.sub("", text).rstrip())
    return f'<pre class="output"><code>{plain}</code></pre>'
