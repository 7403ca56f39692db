"""Tables for `repr` and `_repr_html_`: the one place that knows what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["html_table", "text_table"]


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in columns of equal width, for a terminal."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([title, *lines])


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table for a notebook."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption><code>{escape(title)}</code></caption><tr>{head}</tr>{body}</table>"
