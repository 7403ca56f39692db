"""What does a data-parallel call cost? Rows are split over the ranks, each adds 1, the results are joined in order."""

from __future__ import annotations

from harness.cli import run
from harness.sizes import SizedQuestion

QUESTION = SizedQuestion("split_concat", "split_inc_concat")

if __name__ == "__main__":
    run(__doc__, QUESTION.measure)
