"""One call, from the request to its result.

::

    method ── spec ── plan ──► submission ── encoding, row_arguments ──► Workers.put, Workers.call
                                   └──► Call ── reads replies, escalates, collects ──► Future
"""
