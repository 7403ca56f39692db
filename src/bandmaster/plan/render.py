"""Text tables, HTML tables and SVG drawings for `__str__`, `_repr_html_` and `_repr_svg_`. Pure."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

# Sites and notebooks show a drawing on a white or on a dark page, which it cannot always find out. Frames, and text
# outside of boxes, have colours that are visible on both; text in boxes is dark, as boxes are light.
TEXT, IN_BOX, FRAME, THIN = "#767676", "#222", "#2f6fde", "#999"
WIDTH, LABEL_WIDTH, LINE_HEIGHT, MARGIN, BOXES_PER_LINE = 760, 76, 15, 6, 8  # of drawings; all but the last in pixels


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table for a terminal: a title line, then columns padded to their widest cell."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([title, *lines])


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table for a notebook: an HTML paragraph with the title, if there is one, then a table element."""
    head = "".join(f"<th>{_escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    heading = f"<p><code>{_escape(title)}</code></p>" if title else ""
    return f"{heading}<table><tr>{head}</tr>{body}</table>"


@dataclass(frozen=True)
class Cell:
    """One box of a drawing.

    Attributes:
        lines: Lines of text in the box.
        colour: Index of the colour, from 0; boxes with equal indices have equal colours.
        is_framed: Whether the box has a thick frame.
    """

    lines: tuple[str, ...]
    colour: int
    is_framed: bool = False


def svg_bands(title: str, subtitle: str, bands: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """Draw horizontal bands of boxes below each other as an SVG, for a notebook.

    It has no background, and can be read on light and on dark pages. An SVG keeps its colours on sites that remove the
    styles of HTML, such as GitHub.

    Args:
        title: First line, in bold.
        subtitle: Second line.
        bands: ``(label, boxes)`` of each band; more than 8 boxes take several lines.
    """
    n_colours = 1 + max(box.colour for _, boxes in bands for box in boxes)
    parts = [_text(0, LINE_HEIGHT, title, "font-weight='bold'"), _text(0, 2 * LINE_HEIGHT, subtitle)]
    y = 2 * LINE_HEIGHT + 2 * MARGIN
    for label, boxes in bands:
        height = LINE_HEIGHT * max(len(box.lines) for box in boxes) + MARGIN
        width = (WIDTH - LABEL_WIDTH) / min(len(boxes), BOXES_PER_LINE)
        parts.append(_text(0, y + LINE_HEIGHT, label))
        for start in range(0, len(boxes), BOXES_PER_LINE):
            for column, box in enumerate(boxes[start : start + BOXES_PER_LINE]):
                parts += _drawn(box, (LABEL_WIDTH + column * width, y), (width - MARGIN, height), n_colours)
            y += height + MARGIN
        y += MARGIN
    size = f"width='{WIDTH}' height='{y}' viewBox='0 0 {WIDTH} {y}' font-family='sans-serif' font-size='11'"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", *parts, "</svg>"])


def _drawn(box: Cell, corner: tuple[float, float], size: tuple[float, float], n_colours: int) -> list[str]:
    (x, y), (width, height) = corner, size
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(0.58 + box.colour / n_colours, 0.85, 0.75))
    frame = f"stroke='{FRAME}' stroke-width='2.5'" if box.is_framed else f"stroke='{THIN}'"
    place = f"x='{x:.0f}' y='{y}' width='{width:.0f}' height='{height}' rx='3'"
    texts = [
        _text(x + width / 2, y + LINE_HEIGHT * (line + 1) - 1, text, "text-anchor='middle'", IN_BOX)
        for line, text in enumerate(box.lines)
    ]
    return [f"<rect {place} fill='#{red:02x}{green:02x}{blue:02x}' {frame}/>", *texts]


def _text(x: float, y: float, text: str, options: str = "", colour: str = TEXT) -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' fill='{colour}'{options and ' ' + options}>{_escape(text)}</text>"


def _escape(text: str) -> str:
    import html  # imported here, because only notebooks need it and it slows the import of bandmaster

    return html.escape(text)
