"""What calls cost: records of calls while a trace is open, tables of them, and a file for Perfetto.

::

    submission ── begin ──► records ◄── times of the ranks, with their replies
    trace(...) ── ledger ── tables; perfetto: the file
"""
