"""Rows by reference: the tables on which handles operate, and the rows that ranks keep.

::

    a kept result ──► kept: the place of each rank's rows ──► table: ranges, columns, joins of them (pure)
    Future ── slices, select, join ... (handle) ──────────────┘

This package moves no row. `bandmaster.calls` names the rows that a call needs, and `bandmaster.hosts` moves them.
"""
