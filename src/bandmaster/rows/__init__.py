"""Rows by reference: the tables that handles compute with, and the rows that ranks keep.

::

    a kept result ──► kept: where each rank's rows lie ──► table: ranges, columns, joins of them (pure)
    Future ── slices, select, join ... (handle) ──────────────┘

No row moves here. `bandmaster.calls` names the rows that a call needs, and `bandmaster.hosts` moves them.
"""
