"""What does it cost to have large results? Each rank gives its part of so many bytes, and the controller reads all."""

from __future__ import annotations

from harness.cli import run
from harness.sizes import SizedQuestion

QUESTION = SizedQuestion("gather", "gather")

if __name__ == "__main__":
    run(__doc__, QUESTION.measure)
