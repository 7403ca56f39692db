"""A griffe extension: what docstrings mark in the way of reStructuredText, as markdown."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension

_EXAMPLE = re.compile(r"^Example:\n", re.MULTILINE)
_LITERAL = re.compile(r"^(?P<words>.*)::\n(?P<block>(?:\n|[ ]+.*\n?)+)", re.MULTILINE)


class MarkdownDocstrings(Extension):
    """Makes ``Example:`` the section that is read as code, and fences the blocks behind a ``::``."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring as markdown."""
    return _LITERAL.sub(_fenced, _EXAMPLE.sub("Examples:\n", text))


def _fenced(match: re.Match[str]) -> str:
    words, block = match["words"], textwrap.dedent(match["block"]).strip("\n")
    lead = "**Example**" if words == "Example" else f"{words}:" if words.strip() else ""
    return f"{lead}\n\n```python\n{block}\n```\n\n"
