"""`Timeline`: the picture of a run, in a notebook and as a file."""

from __future__ import annotations

import html
from pathlib import Path

from bandmaster import Trace, UsageError
from bandmaster.timeline.causes import diagnosis
from bandmaster.timeline.page import page
from bandmaster.timeline.run import Run

FORMATS = (".html", ".svg", ".png")
HEIGHT_PX = 560  # in a notebook


class Timeline:
    """The picture of a run: a lane for each rank, with its calls in the colours of their methods.

    A notebook shows it when it is the value of a cell. It can be zoomed and moved there, and in the HTML file; neither
    needs a network or a package.

    Args:
        run: The calls.

    Example:
        >>> import bandmaster as bm
        >>> class Adder(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def double(self, rows): return [2 * row for row in rows]
        >>> with bm.ResourcePool([2], backend="inprocess") as pool, bm.trace() as trace:
        ...     bm.WorkerGroup(pool, Adder).double([1, 2, 3])
        [2, 4, 6]
        >>> trace.timeline()
        <Timeline of 1 call on 2 ranks>
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def of(cls, trace: Trace, last: float | None = None) -> Timeline:
        """The picture of what a trace has recorded until now.

        Args:
            trace: The trace; it may still be open.
            last: Show the calls of so many last seconds only.

        Raises:
            UsageError: ``last`` is neither None nor a number of 0 or more.
        """
        return cls(Run.of(trace, last))

    @property
    def sentence(self) -> str:
        """Say where the time went; see `bandmaster.timeline.diagnosis`."""
        return diagnosis(self.run.calls)

    def html(self) -> str:
        """The picture as an HTML page that needs no other file."""
        return page(self.run, self.sentence)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file.

        Args:
            path: The file, whose folder is made if it is missing. Its suffix says what the file becomes: ``.html``,
                which can be zoomed, or ``.svg`` or ``.png``, which matplotlib draws.

        Raises:
            UsageError: The suffix is another one.
            ImportError: An SVG or PNG was asked for, and matplotlib is not installed.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in FORMATS:
            raise UsageError(
                f"a timeline is saved as one of {', '.join(FORMATS)}, got the suffix {suffix!r} of {str(path)!r}; for "
                "https://ui.perfetto.dev, use Trace.save"
            )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".html":
            Path(path).write_text(self.html(), encoding="utf-8")
        else:
            from bandmaster.timeline.plot import plot

            plot(self.run, self.sentence, Path(path))

    def _repr_html_(self) -> str:
        """An element that shows the page by itself, so that neither changes the styles of the other."""
        style = f"width:100%;height:{HEIGHT_PX}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self.html())}"></iframe>'

    def __repr__(self) -> str:
        n_calls = len(self.run.calls)
        n_ranks = len({(call.group, rank) for call in self.run.calls for rank in call.moments})
        return f"<Timeline of {n_calls:,} call{'s' * (n_calls != 1)} on {n_ranks} rank{'s' * (n_ranks != 1)}>"
