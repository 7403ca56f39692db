"""One call, from the request to its result.

::

    method ── spec ── plan ──► submission ── orders_of, row_arguments ──► Workers.put, Workers.call
                                   └──► Call ── reads replies, escalates ── outcome ──► Future
                                          └── open_work: other calls of the same workers, and which thread drives them
"""
