"""Records the cost of calls while a trace is open, as tables and as a file for Perfetto.

::

    submission ── begin ──► records ◄── times of the ranks, with their replies
    trace(...) ── ledger ── tables; perfetto: the file
"""
