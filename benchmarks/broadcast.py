"""What does it cost to give every rank the same array?

Each rank reads 64 places of it, which hold something else in every call; in one more line of the table, all of it.
"""

from __future__ import annotations

from harness.cli import run
from harness.sizes import SizedQuestion

QUESTION = SizedQuestion("broadcast", "broadcast", also="broadcast_read_all")

if __name__ == "__main__":
    run(__doc__, QUESTION.measure)
